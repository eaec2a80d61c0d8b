"""One measured cell of the table: a number, which threshold makes it a ✓, and what was seen."""

from dataclasses import dataclass
from typing import Literal

from tisa_lab.criteria.settings import Settings


@dataclass(frozen=True)
class Measurement:
    """The number behind a mark.

    `number` is None where there is nothing to measure (no positional logits to interpret); the mark
    is ✗ then. `refuted` says that no threshold can make it a ✓.
    """

    number: float | None
    evidence: str
    refuted: bool = False


@dataclass(frozen=True)
class Criterion:
    """A criterion: which setting is its threshold, and on which side of it a number earns a ✓."""

    name: str
    threshold: str
    side: Literal["at least", "at most", "above"]
    number: str

    def mark(self, measured: Measurement, threshold: float) -> bool:
        """Return whether the number earns a ✓ under that threshold."""
        if measured.refuted or measured.number is None:
            return False
        if self.side == "at least":
            return measured.number >= threshold
        if self.side == "above":
            return measured.number > threshold
        return measured.number <= threshold

    def used(self, settings: Settings) -> float:
        """Return the threshold of these settings."""
        return float(getattr(settings, self.threshold))


RULES = {
    rule.name: rule
    for rule in (
        Criterion("inductive", "witness_weight", "at least", "weight on the far key"),
        Criterion("data-driven", "gradient", "above", "parameters with a gradient"),
        Criterion("parameter efficient", "share", "at most", "share of the other parameters"),
        Criterion("translation invariant", "difference", "at most", "largest relative difference"),
        Criterion("parallelizable", "growth", "at most", "exponent of the critical path"),
        Criterion("interpretable", "explained", "at least", "share explained by the offset"),
    )
}
