"""The thresholds and sizes of the six criteria, fixed before the first full run.

Nothing here is fitted to the paper's marks. `sensitivity.py` says what other thresholds would give.
"""

from dataclasses import dataclass

import torch

from tisa.packages import device_named


@dataclass(frozen=True)
class Settings:
    """How the criteria are measured and from where on a number earns a ✓.

    Thresholds:
        witness_weight: inductive, if a query's attention on one key at the far offset can be made
            at least this, all tokens being alike. Half: more than on all other keys together.
        gradient: data-driven, if more than this many positional parameters receive a gradient.
        share: parameter efficient, if the positional parameters are at most this share of all
            others at BERT-base size, and do not become more with the length.
        difference: translation invariant, if logits and outputs of moved tokens differ by at most
            this, relatively. The arithmetic is float64, so rounding is near 1e-15.
        growth: parallelizable, if the critical path grows at most like length^growth.
        explained: interpretable, if a function of the offset alone explains at least this share of
            the positional logits' variance.

    Sizes:
        training_length: positions that learned tables have; factor: the far offset is
            factor · training_length. hidden_size and heads: of the layers that are measured.
        draws: random draws of all parameters; contents: random contents for each of them.
        phrase: tokens that are moved, by `shifts`. path_lengths: lengths of the traces.
        search_steps: of the search for a witness where none is known by construction; search_beside
            makes it also where one is.
    """

    witness_weight: float = 0.5
    gradient: int = 0
    share: float = 1e-3
    difference: float = 1e-6
    growth: float = 0.5
    explained: float = 0.9

    training_length: int = 64
    factor: int = 10
    hidden_size: int = 128
    num_attention_heads: int = 2
    draws: int = 3
    contents: int = 16
    phrase: int = 12
    shifts: tuple[int, ...] = (1, 7, 40)
    path_lengths: tuple[int, ...] = (16, 32, 64, 128)
    search_steps: int = 60
    search_beside: bool = True
    seed: int = 0
    device: str | None = None

    def __post_init__(self) -> None:
        device = device_named(self.device)
        # As it is found here: the record says where it was measured.
        object.__setattr__(self, "device", str(device))
        try:
            torch.empty(0, device=device, dtype=torch.float64)
        except (RuntimeError, TypeError) as refusal:
            raise ValueError(
                f"device must be one that computes in float64, such as cpu, got {self.device!r}: "
                f"{str(refusal).splitlines()[0]}"
            ) from None

    @property
    def far(self) -> int:
        """The distance at which a dependency must still be told apart."""
        return self.factor * self.training_length
