"""What is asked of every model of a grid, checked before the first is trained."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tisa.positions import resolve
from tisa.store import told

Part = Literal["blimp", "windows", "recall"]
# The shortest rows in which a passage of two tokens comes again.
SHORTEST = 5


@dataclass(frozen=True)
class Asked:
    """What is asked of each model when it is trained, in the same job; the record keeps it.

    Args:
        evaluate: Some of blimp (which of two sentences is acceptable), windows (the loss of sliding
            windows by length), recall (what is found again from far away).
        blimp: The file of BLiMP: blimp.json.xz, or its tokens.
        blimp_pairs: Pairs of each of its paradigms.
        factors: Windows, and inputs of recall, are these times as long as those of the training.
        stride: Tokens from one window to the next; by default the longest row.
        read_tokens: Enough held-out tokens to read in windows of each length.
        reading: Other options that models of that method are read with too, as in
            rotary:scaling=yarn.
        recall_length: Tokens that a small new decoder with the same method is trained to remember
            over; by default as many as `tisa-lab recall` takes.
        recall_steps: Updates of that decoder; by default likewise.
    """

    evaluate: tuple[str, ...] = ()
    blimp: Path | None = None
    blimp_pairs: int = 1000
    factors: tuple[int, ...] = (1, 2, 4, 8, 16)
    stride: int | None = None
    read_tokens: int = 100_000
    reading: tuple[str, ...] = ("rotary:scaling=yarn",)
    recall_length: int | None = None
    recall_steps: int | None = None

    def __post_init__(self) -> None:
        unknown = [part for part in self.evaluate if part not in get_args(Part)]
        if unknown:
            raise ValueError(
                f"evaluate must be some of {', '.join(get_args(Part))}, got {', '.join(unknown)}"
            )
        if ("blimp" in self.evaluate) != (self.blimp is not None):
            raise ValueError(
                "blimp must be its file where evaluate has blimp, and only there, got "
                f"{self.blimp} and evaluate {','.join(self.evaluate) or 'nothing'}"
            )
        if 1 not in self.factors or min(self.factors) < 1:
            raise ValueError(f"factors must be 1 and whole numbers above it, got {self.factors}")
        for name in ("blimp_pairs", "stride", "read_tokens", "recall_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for text in self.reading:
            resolve(text, what="reading")

    @property
    def reads(self) -> bool:
        """Whether held-out documents are read."""
        return bool({"windows", "recall"} & set(self.evaluate))

    def lengths(self, longest: int) -> list[int]:
        """Return the lengths of windows for models trained on rows up to that one."""
        return sorted({factor * longest for factor in self.factors})

    def recall(self, *, seed: int) -> Any:
        """Return the config of the small decoder."""
        # Here: who asks nothing of this kind need not read it.
        from tisa_lab.probes.recall import PAIRS, RecallConfig

        if self.recall_length is not None and self.recall_length < 6 * PAIRS:
            raise ValueError(
                f"recall_length must be at least {6 * PAIRS}, got {self.recall_length}"
            )
        given = {"length": self.recall_length, "steps": self.recall_steps}
        chosen = {name: value for name, value in given.items() if value is not None}
        return RecallConfig(factors=self.factors, seed=seed, **chosen)

    def check(self, *, has_valid: bool, objective: str, longest: int) -> None:
        """Refuse what cannot be asked of these models."""
        if self.reads and not has_valid:
            raise ValueError("evaluate: windows and recall need held-out documents as valid")
        if "recall" in self.evaluate and objective != "causal":
            raise ValueError(
                "evaluate: recall is asked of decoders (objective causal); leave it out"
            )
        if "recall" in self.evaluate:
            self.recall(seed=0)
        if "recall" in self.evaluate and longest < SHORTEST:
            raise ValueError(f"lengths must be at least {SHORTEST} for recall, got {longest}")

    def to_dict(self) -> dict[str, Any]:
        """Return what the answers depend on, as plain values."""
        values = {**asdict(self), "blimp": None}
        values["evaluate"] = sorted(set(self.evaluate))
        small = self.recall(seed=0)
        values |= {"recall_length": small.length, "recall_steps": small.steps}
        if self.blimp is not None:
            with told(self.blimp, reading=True):
                values["blimp"] = hashlib.sha256(self.blimp.read_bytes()).hexdigest()
        return {k: list(v) if isinstance(v, Sequence) and not isinstance(v, str) else v
                for k, v in values.items()}  # fmt: skip
