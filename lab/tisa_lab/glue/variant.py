"""The rows of Table 3: what a model has for positions, and how that starts."""

import re
from dataclasses import dataclass, replace
from typing import Literal

Start = Literal["zero", "reference", "fit"]
Positions = Literal["keep", "replace"]


@dataclass(frozen=True)
class Variant:
    """A row of the table: all of a cell but the model, the task, the recipe and the seed.

    Args:
        num_kernels: the paper's S; 0 with positions kept is the model as it was published.
        positions: kept, the table's part (a), or replaced, part (b); as in `tisa.hf.convert`.
        init: how kernels start: at random as the paper's, without effect, fitted to the model.
        fold: whether the means of removed position vectors stand in their place.
        frozen: whether fitted kernels are not trained.
        distil_steps: how long the fitted start is first trained towards the original on the task's
            texts (`tisa.hf.distil`).
    """

    num_kernels: int = 5
    positions: Positions = "keep"
    init: Start = "reference"
    fold: bool = False
    frozen: bool = False
    distil_steps: int = 0

    def __post_init__(self) -> None:
        if self.positions not in ("keep", "replace"):
            raise ValueError(f"positions must be keep or replace, got {self.positions!r}")
        if self.init not in ("zero", "reference", "fit"):
            raise ValueError(f"init must be zero, reference or fit, got {self.init!r}")
        for name in ("num_kernels", "distil_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.positions == "keep" and (self.fold or self.init == "fit"):
            raise ValueError(f'init="fit" and fold are for positions="replace", got {self}')
        if self.num_kernels == 0 and self.init != "zero":
            raise ValueError(f'without kernels init is "zero", got {self}')
        if (self.frozen or self.distil_steps) and self.init != "fit":
            raise ValueError(f'frozen and distil_steps are for init="fit", got {self}')

    @classmethod
    def named(cls, label: str) -> "Variant":
        """Return the row that has this name in the first column of the table."""
        found = _LABEL.fullmatch(" ".join(label.split()))
        if found is None:
            raise ValueError(
                "rows must be names as in the first column of the table (baseline; S = 5; zeroed; "
                f"zeroed, S = 5; folded, S = 5, fitted, distilled 30, frozen), got {label!r}"
            )
        size = int(found["size"] or 0)
        start: Start = "reference"
        if found["fit"]:
            start = "fit"
        elif found["zero"] or size == 0:
            start = "zero"
        return cls(
            num_kernels=size,
            positions="replace" if found["gone"] else "keep",
            init=start,
            fold=found["gone"] == "folded",
            frozen=found["frozen"] is not None,
            distil_steps=int(found["distil"] or 0),
        )

    @property
    def part(self) -> str:
        """Return the paper's letter for the half of the table in which the row stands."""
        return "a" if self.positions == "keep" else "b"

    @property
    def label(self) -> str:
        """Return what stands in the first column of the table."""
        if self == BASELINE:
            return "baseline"
        words = [] if self.positions == "keep" else ["folded" if self.fold else "zeroed"]
        if self.num_kernels > 0:
            words.append(f"S = {self.num_kernels}")
            words += {"reference": [], "zero": ["from zero"], "fit": ["fitted"]}[self.init]
        words += [f"distilled {self.distil_steps}"] if self.distil_steps else []
        words += ["frozen"] if self.frozen else []
        return ", ".join(words)

    @property
    def is_paper(self) -> bool:
        """Return whether it is a row of the paper that has kernels: random ones, nothing folded."""
        return self.num_kernels > 0 and self.init == "reference" and not self.fold

    @property
    def place(self) -> tuple[object, ...]:
        """Return what rows of a table are sorted by."""
        return (
            self.num_kernels > 0, self.fold, self.init == "fit", self.init, self.frozen,
            self.distil_steps, self.num_kernels,
        )  # fmt: skip

    def unfrozen(self) -> "Variant":
        """Return the row with the same start whose kernels are trained."""
        return replace(self, frozen=False)


# The model as it was published, without its positions, and with their means in their place.
BASELINE = Variant(0, init="zero")
ZEROED = Variant(0, "replace", "zero")
FOLDED = Variant(0, "replace", "zero", fold=True)

_LABEL = re.compile(
    r"baseline|(?=.)(?P<gone>zeroed|folded)?"
    r"(?:(?:^|, )S = (?P<size>[1-9]\d*)(?P<zero>, from zero)?(?P<fit>, fitted)?"
    r"(?:, distilled (?P<distil>[1-9]\d*))?(?P<frozen>, frozen)?)?"
)
