"""KERPLE: learned logarithmic and power decays with distance (Chi et al., NeurIPS 2022)."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch
from torch.nn.functional import softplus

from tisa.scoring.base import ScoringFunction, head_parameter
from tisa.scoring.parabolas import bend
from tisa.scoring.published import at_least_float32, groups, only
from tisa.shapes import Float, Int, Int32, Tensor


class _Kerple(ScoringFunction):
    """What KERPLE's two kernels share: r₁ and r₂ per head, from `raw_r1` and `raw_r2`.

    How they are kept positive the paper leaves open: by softplus, or with `variant="author"` as in
    the authors' code, where the parameters are r₁ and r₂ themselves and count as 0.01 below it.
    (That code writes the 0.01 back into the parameter; here the gradient passes, the value stays.)
    """

    # What their code calls r₁ and r₂.
    _reference: tuple[str, str]

    def __init__(
        self, num_attention_heads: int = 12, *, variant: Literal["paper", "author"] = "paper"
    ) -> None:
        super().__init__(num_attention_heads)
        if variant not in ("paper", "author"):
            raise ValueError(
                f'{type(self).__name__}: variant must be "paper" or "author", got {variant!r}'
            )
        self.variant = variant
        self.raw_r1 = head_parameter(num_attention_heads)
        self.raw_r2 = head_parameter(num_attention_heads)
        self.reset_parameters()

    @abstractmethod
    def reset_parameters(self) -> None:
        """Draw new initial values."""

    @abstractmethod
    def set_to(self, r1: Float[Tensor, " heads"], r2: Float[Tensor, " heads"]) -> None:
        """Set r₁ and r₂; what is outside their range counts as its end."""

    def read_reference(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take the authors' `bias_a` and `bias_p`, (heads, 1, 1) each."""
        name = type(self).__name__
        group = only(groups(name, state_dict, self._reference), name)
        r1, r2 = (group[key].reshape(-1) for key in self._reference)
        if len(r1) != self.num_attention_heads or len(r2) != len(r1):
            raise ValueError(
                f"{name}.from_reference: the checkpoint must have {self.num_attention_heads} "
                f"heads, got {len(r1)}"
            )
        if r1.dtype == torch.float64:
            self.double()
        self.set_to(at_least_float32(r1), at_least_float32(r2))

    @property
    def r1(self) -> Float[Tensor, " heads"]:
        """Return the strength of the decay."""
        raw = self.raw_r1.to(self._dtype)
        return _held(raw) if self.variant == "author" else softplus(raw)

    def support(self, eps: float) -> None:
        """Return None: the tail falls for ever."""
        return None

    def extra_repr(self) -> str:
        """Return what `print(module)` shows."""
        return f"{super().extra_repr()}, variant={self.variant!r}"

    def _around(self, distance: Float[Tensor, " heads"]) -> Int32[Tensor, "heads 2"]:
        """Return the bands that reach so far to both sides; everything where that is no number."""
        distance = distance.clamp_min(0).nan_to_num(nan=torch.inf, posinf=torch.inf)
        return self._bands(-distance, distance)


class KerpleLog(_Kerple):
    """KERPLE's logarithmic kernel: f(k) = −r₁·log(1 + r₂·|k|), r₁, r₂ > 0 learned per head.

    r₁ = softplus(`raw_r1`), r₂ = softplus(`raw_r2`), or the author's (see `variant`). At step 0:
    r₁ ~ U(0, 2), r₂ ~ U(0, 1) as in the authors' code, every head a slow decay of its own.
    """

    _reference = ("bias_p", "bias_a")

    def reset_parameters(self) -> None:
        """Draw new initial values."""
        self.set_to(torch.rand_like(self.raw_r1) * 2, torch.rand_like(self.raw_r2))

    def set_to(self, r1: Float[Tensor, " heads"], r2: Float[Tensor, " heads"]) -> None:
        """Set r₁ and r₂; below 0.01 they count as 0.01."""
        own = self.variant == "author"
        with torch.no_grad():
            self.raw_r1.copy_(r1 if own else inverse_softplus(r1))
            self.raw_r2.copy_(r2 if own else inverse_softplus(r2))

    @property
    def r2(self) -> Float[Tensor, " heads"]:
        """Return the rate, 1/r₂ being the distance from which on the decay is logarithmic."""
        raw = self.raw_r2.to(self._dtype)
        return _held(raw) if self.variant == "author" else softplus(raw)

    def scores(self, offsets: Int[Tensor, "*shape"]) -> Float[Tensor, "heads *shape"]:
        """Return f(k) of each offset for each head."""
        distance = self._distances(offsets).abs().reshape(-1)
        flat = -self.r1.unsqueeze(-1) * torch.log1p(self.r2.unsqueeze(-1) * distance)
        return flat.reshape(self.num_attention_heads, *offsets.shape)

    def parabola_support(self, eps: float, reach: int) -> Int32[Tensor, "heads 2"]:
        """Return how far out the third derivatives are too large.

        With u = 1 + r₂k those of the score and of its derivative by r₂ are 2r₁r₂³/u³ and 6r₁r₂²/u⁴;
        by `raw_r1` it is no larger than the score's, by `raw_r2` it is the latter times 1 − e^−r₂.
        """
        with torch.no_grad():
            limit, r1, r2 = eps / bend(reach), self.r1, self.r2.clamp_min(1e-20)
            score = (2 * r1 / limit) ** (1 / 3)
            rate = (6 * r1 / limit * -torch.expm1(-r2)) ** 0.25 / r2.sqrt()
            return self._around(torch.maximum(score, rate) - 1 / r2)


class KerplePower(_Kerple):
    """KERPLE's power kernel: f(k) = −r₁·|k|^r₂, r₁ > 0, 0 < r₂ < 2 learned per head.

    r₁ = softplus(`raw_r1`), r₂ = 2·sigmoid(`raw_r2`), or the author's (see `variant`). At step 0:
    r₁ ~ U(0, 1), r₂ ~ U(0, 2), every head a decay of its own, some nearly flat and some as steep
    as a Gaussian's.
    """

    _reference = ("bias_a", "bias_p")

    def reset_parameters(self) -> None:
        """Draw new initial values."""
        self.set_to(torch.rand_like(self.raw_r1), 2 * torch.rand_like(self.raw_r2))

    def set_to(self, r1: Float[Tensor, " heads"], r2: Float[Tensor, " heads"]) -> None:
        """Set r₁ (below 0.01 it counts as 0.01) and r₂, which stays within 0 … 2."""
        own = self.variant == "author"
        with torch.no_grad():
            self.raw_r1.copy_(r1 if own else inverse_softplus(r1))
            self.raw_r2.copy_(r2 if own else (r2 / 2).clamp(1e-3, 1 - 1e-3).logit())

    @property
    def r2(self) -> Float[Tensor, " heads"]:
        """Return the exponent."""
        raw = self.raw_r2.to(self._dtype)
        return _held(raw, 2.0) if self.variant == "author" else 2 * torch.sigmoid(raw)

    def scores(self, offsets: Int[Tensor, "*shape"]) -> Float[Tensor, "heads *shape"]:
        """Return f(k) of each offset for each head."""
        distance = self._distances(offsets).abs().reshape(-1)
        # The power of 0 has no second derivative in torch; offsets are integers, so 1 can stand in.
        power = distance.clamp_min(1) ** self.r2.unsqueeze(-1)
        flat = -self.r1.unsqueeze(-1) * torch.where(distance > 0, power, 0.0)
        return flat.reshape(self.num_attention_heads, *offsets.shape)

    def parabola_support(self, eps: float, reach: int) -> Int32[Tensor, "heads 2"]:
        """Return how far out the third derivatives are too large; far indeed for r₂ above 1.

        With p = r₂ and q = p(p − 1)(p − 2) that of the score is r₁·|q|·k^(p − 3). That of the
        derivative by p, r₁k^p·ln k, is at most (|q| + |3p² − 6p + 2|)/k³ of its value from k = e
        on.
        """
        with torch.no_grad():
            limit, p = eps / bend(reach), self.r2
            q = (p * (p - 1) * (p - 2)).abs()
            score = (self.r1 * q / limit) ** (1 / (3 - p))
            exponent = ((q + (3 * p * p - 6 * p + 2).abs()) / limit) ** (1 / 3)
            return self._around(torch.maximum(score, exponent).clamp_min(3))


def inverse_softplus(positive: Tensor) -> Tensor:
    """Return x with softplus(x) = positive; values below 0.01 count as 0.01."""
    positive = positive.clamp_min(1e-2)
    return positive + torch.log(-torch.expm1(-positive))


def _held(raw: Tensor, most: float | None = None) -> Tensor:
    """Return the numbers within [0.01, most], with the gradient as if they were."""
    return raw + (raw.clamp(1e-2, most) - raw).detach()
