"""Rotary's rates for inputs longer than the training: linear, NTK, YaRN; and p-RoPE.

A model that was trained at L positions turns pair i by θ_i = base^(−2i/d) from position to
position. To read s times as many, d being the head's width:

    linear        θ_i / s. Position interpolation (Chen et al., 2023): no place beyond the known.
    ntk           base · s^(d/(d − 2)) as the base ("NTK-aware", bloc97, 2023): the fastest pair
                  keeps its rate, the slowest has θ_i / s.
    dynamic_ntk   the same with 1 + s·(n/L − 1) in the place of s for an input of n > L tokens.
                  s is 1 unless it is given: n/L.
    yarn          (1 − γ)·θ_i / s + γ·θ_i (Peng et al., ICLR 2024): γ is 1 for pairs that turn more
                  than 32 times in L positions, 0 for those that turn less than once, and rises
                  between. Queries and keys are multiplied by 0.1·ln(s) + 1.

p-RoPE (Barbero et al., ICLR 2025) turns the share p of the pairs, those of the highest rates; the
others see no positions.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from tisa.positions.angles import rates_of
from tisa.positions.base import Variant
from tisa.shapes import Float, Tensor

Kind = Literal["none", "linear", "ntk", "dynamic_ntk", "yarn"]
KINDS: tuple[Kind, ...] = ("none", "linear", "ntk", "dynamic_ntk", "yarn")
# Turns in L positions between which YaRN's ramp rises: the paper's α and β.
SLOW, FAST = 1.0, 32.0


@dataclass(frozen=True)
class Scaling:
    """How the rates of pairs, `width` numbers in a head, are changed; checked when it is made."""

    kind: Kind
    factor: float
    length: int
    ramp: Variant
    p: float
    base: float
    width: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"Rotary: scaling must be one of {', '.join(KINDS)}, got {self.kind!r}"
            )
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"Rotary: factor must be at least 1, got {self.factor}")
        if self.length < 1:
            raise ValueError(f"Rotary: original_length must be at least 1, got {self.length}")
        # At 1 all pairs turn alike, and none is slow.
        if self.kind != "none" and not self.base > 1:
            raise ValueError(f"Rotary: base must be above 1 with scaling, got {self.base}")
        if not 0 <= self.p <= 1:
            raise ValueError(f"Rotary: p must lie in [0, 1], the share of pairs, got {self.p}")
        if self.kind in ("ntk", "dynamic_ntk") and self.width < 4:
            raise ValueError(
                f"Rotary: heads must be at least 4 wide for scaling={self.kind!r}, got "
                f"{self.width}: it keeps the rate of one pair and changes that of another"
            )
        if self.ramp not in ("paper", "author"):
            raise ValueError(f"Rotary: ramp must be paper or author, got {self.ramp!r}")

    @property
    def temperature(self) -> float:
        """What queries and keys are multiplied by."""
        return 0.1 * math.log(self.factor) + 1.0 if self.kind == "yarn" else 1.0

    def rates(self, length: int, device: torch.device | None = None) -> Float[Tensor, " pairs"]:
        """Return the rate of every pair in an input of that many tokens."""
        rates = rates_of(self.width, base=self.base, device=device)
        if self.kind == "linear":
            rates = rates / self.factor
        elif self.kind == "ntk":
            rates = self._stretched(rates, rates.new_full((), self.factor))
        elif self.kind == "dynamic_ntk":
            # As a tensor: the length of an exported graph is no number.
            longer = rates.new_full((), length).clamp_min(self.length)
            rates = self._stretched(rates, self.factor * longer / self.length - (self.factor - 1))
        elif self.kind == "yarn":
            kept = self._kept(rates)
            rates = (1 - kept) * rates / self.factor + kept * rates
        turned = int(self.p * self.width // 2)
        return torch.where(torch.arange(self.width // 2, device=device) < turned, rates, 0.0)

    def _stretched(
        self, rates: Float[Tensor, " pairs"], stretch: Float[Tensor, ""]
    ) -> Float[Tensor, " pairs"]:
        """Return the rates of the base times stretch^(d/(d − 2)), pair by pair."""
        pair = torch.arange(0, self.width, 2, device=rates.device, dtype=rates.dtype)
        return rates * stretch ** (-pair / (self.width - 2))

    def _kept(self, rates: Float[Tensor, " pairs"]) -> Float[Tensor, " pairs"]:
        """Return YaRN's γ: how much of its own rate each pair keeps."""
        if self.ramp == "paper":
            turns = self.length * rates / (2 * math.pi)
            return ((turns - SLOW) / (FAST - SLOW)).clamp(0, 1)
        # The pair that turns so many times in L positions, as a real number.
        first, last = (
            self.width * math.log(self.length / (turns * 2 * math.pi)) / (2 * math.log(self.base))
            for turns in (FAST, SLOW)
        )
        low, high = max(math.floor(first), 0), min(math.ceil(last), self.width - 1)
        pair = torch.arange(len(rates), device=rates.device, dtype=rates.dtype)
        # The authors' guard where both ends are one.
        wide = high - low if high != low else 0.001
        return 1 - ((pair - low) / wide).clamp(0, 1)
