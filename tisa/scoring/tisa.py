"""TISA: radial-basis scores of the offset (Wennberg & Henter, ACL 2021)."""

import math
from collections.abc import Mapping

import torch

from tisa.scoring.base import Init, ScoringFunction, check_init, head_parameter
from tisa.scoring.parabolas import bend
from tisa.scoring.published import at_least_float32, fill, groups, only
from tisa.shapes import Float, Int, Int32, Tensor

# What the author's code calls them.
_REFERENCE = ("kernel_amplitudes", "kernel_sharpness", "kernel_offsets")


class TISA(ScoringFunction):
    """The paper's scores: f(k) = Σ_s a_s · exp(−|b_s| · (k − c_s)²), S kernels per head.

    Parameters, each (heads, kernels): `kernel_amplitudes` a, `kernel_sharpness` b,
    `kernel_offsets` c. `num_kernels=0` is the zero function.

    At step 0:
        init="reference": the author's a ~ N(0.1, 0.01), b ~ N(0.1, 0.01), c ~ N(0, 5) (mean and
            standard deviation). Bumps of height 0.1 and about ±2 tokens width at places near the
            query: a slight preference, different for each head, for some of its neighbours.
        init="zero": the same b and c, a = 0. Scores are exactly 0, so a model to which TISA is
            added computes the same as before. Amplitudes get a gradient in the first step, b and c
            from the second step on.
    """

    def __init__(
        self, num_attention_heads: int = 12, num_kernels: int = 5, *, init: Init = "reference"
    ) -> None:
        super().__init__(num_attention_heads)
        if num_kernels < 0:
            raise ValueError(f"TISA: num_kernels must be 0 or more, got {num_kernels}")
        check_init(self, init)
        self.num_kernels = num_kernels
        self.init = init
        self.kernel_amplitudes = head_parameter(num_attention_heads, num_kernels)
        self.kernel_sharpness = head_parameter(num_attention_heads, num_kernels)
        self.kernel_offsets = head_parameter(num_attention_heads, num_kernels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new initial values."""
        with torch.no_grad():
            self.kernel_amplitudes.normal_(0.1, 0.01)
            self.kernel_sharpness.normal_(0.1, 0.01)
            self.kernel_offsets.normal_(0.0, 5.0)
            if self.init == "zero":
                self.kernel_amplitudes.zero_()

    @classmethod
    def from_reference(cls, state_dict: Mapping[str, Tensor]) -> "TISA":
        """Return the function with the weights of the author's published code.

        That code computes entry (i, j) as f(i − j − 1), mirrored and shifted against the paper;
        its tensors are (kernels, heads). The map is exact: a, b as they are, c = −(c_ref + 1).
        """
        group = only(groups("TISA", state_dict, _REFERENCE), "TISA")
        a, b, c = (group[name] for name in _REFERENCE)
        if a.ndim != 2 or not a.shape == b.shape == c.shape:
            raise ValueError(
                "TISA.from_reference: the three tensors must have one shape (kernels, heads), "
                f"got {tuple(a.shape)}, {tuple(b.shape)}, {tuple(c.shape)}"
            )
        num_kernels, num_attention_heads = a.shape
        tisa = cls(num_attention_heads, num_kernels)
        tisa.read_reference(group)
        return tisa.to(a.device)

    def read_reference(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take the weights of the author's published code, as `from_reference` does."""
        group = only(groups("TISA", state_dict, _REFERENCE), "TISA")
        a, b, c = (at_least_float32(group[name]).T for name in _REFERENCE)
        values = {
            "kernel_amplitudes": a,
            "kernel_sharpness": b,
            # Exact in float32: −(c + 1) of a bfloat16 would round.
            "kernel_offsets": -(c + 1),
        }
        fill(self, values, "give its num_kernels and heads")

    def scores(self, offsets: Int[Tensor, "*shape"]) -> Float[Tensor, "heads *shape"]:
        """Return f(k) of each offset for each head."""
        k = self._distances(offsets).reshape(-1)
        a = self.kernel_amplitudes.to(k.dtype).unsqueeze(-1)
        b = self.kernel_sharpness.to(k.dtype).unsqueeze(-1)
        c = self.kernel_offsets.to(k.dtype).unsqueeze(-1)
        kernels = a * torch.exp(-b.abs() * (k - c) ** 2)
        return kernels.sum(1).reshape(self.num_attention_heads, *offsets.shape)

    def support(self, eps: float) -> Int32[Tensor, "heads 2"]:
        """Return the band outside which every kernel and all its derivatives are below `eps`.

        With u = k − c and E = exp(−|b|u²), the derivatives by a, b, c are E, a·u²·E and a·2|b|u·E.
        An amplitude below 1 is taken as 1: it may be 0 now and still has to learn. With
        L = ln(max(1, |a|)·S/eps), x = |b|u² must be at least L, L − ln|b| + ln x (for b) and
        L + ln 2√|b| + ½ ln x (for c). Both are concave in x: where a tangent of theirs meets x is
        never below the smallest such x, and three tangents come near enough to it.

        The band of a head with a number that is not finite, or whose square is not, is everything.
        """
        if self.num_kernels == 0:
            return torch.zeros(
                self.num_attention_heads, 2, dtype=torch.int32, device=self._place.device
            )
        if not 0 < eps < 1:
            raise ValueError(f"TISA.support: eps must lie between 0 and 1, got {eps}")
        with torch.no_grad():
            a, b, c = (
                p.to(self._dtype)
                for p in (self.kernel_amplitudes, self.kernel_sharpness, self.kernel_offsets)
            )
            # A flat kernel (b = 0) has no band: its width goes beyond every offset.
            strange = torch.addcmul(b, c, c) * 0
            b = b.abs().clamp(torch.finfo(b.dtype).tiny, 1e30)
            level = torch.log(a.abs().clamp_min(1.0) * (self.num_kernels / eps))
            log_b = b.log()
            base = torch.stack((level - log_b - 1, level + log_b / 2 + (math.log(2) - 0.5)))
            share = 1 / torch.arange(1, 3, dtype=base.dtype, device=base.device).view(2, 1, 1)
            x = 2 * (level + log_b.abs() + 2)
            for _ in range(3):
                # The tangent at x = 2 or beyond: nearer to 1 it would never meet x.
                x = x.clamp_min(2.0)
                x = (base + share * x.log()) / (1 - share / x)
            # u²·E falls only from x = 1 on.
            reach = torch.sqrt(torch.maximum(x.amax(0), level).clamp_min(1.0) / b) + strange
            reach, c = reach.nan_to_num(nan=torch.inf, posinf=torch.inf), c.nan_to_num(0.0)
            return self._bands((c - reach).amin(1), (c + reach).amax(1))

    def parabola_support(self, eps: float, reach: int) -> Int32[Tensor, "heads 2"]:
        """Return the band outside which all kernels' third derivatives are small enough.

        With x = |b|u² ≥ 2½, A = max(1, |a|) and E = exp(−x) those of the score and of its
        derivatives by a, c, b are at most A·8b^1½·x^1½·E (twice), A·16b²·x²·E and A·8b^½·x^2½·E,
        and nowhere above A·1.39(2b)^1½, A·3(2b)² and A·4.5(2b)^½. The derivative by b is a/(e·b)
        at its largest and may err by its share of that. So broad kernels have no band at all; and
        where the constant's band (`support`) is narrower, that one holds.
        """
        constant = self.support(eps / 4)
        if self.num_kernels == 0:
            return constant
        with torch.no_grad():
            a, b, c = (
                p.to(self._dtype)
                for p in (self.kernel_amplitudes, self.kernel_sharpness, self.kernel_offsets)
            )
            strange = torch.addcmul(b, c, c) * a * 0
            b = b.abs().clamp(torch.finfo(b.dtype).tiny, 1e30)
            a, log_b = a.abs().clamp_min(1.0), b.log()
            level = torch.log(a * (self.num_kernels * bend(reach) / eps)) + strange
            share = (a.log() - 1 - log_b).clamp_min(0)
            needs = (
                (1.5, level + 1.5 * log_b, 8, 1.39 * 2**1.5),
                (2.0, level + 2 * log_b, 16, 3 * 4),
                (2.5, level + 0.5 * log_b - share, 8, 4.5 * 2**0.5),
            )
            reaches = []
            for power, height, tail, peak in needs:
                # The largest x with x − power·ln x = height + ln tail, from above, by tangents.
                x = 2 * (height.clamp_min(0) + 8)
                for _ in range(3):
                    x = x.clamp_min(5.0)
                    x = (height + math.log(tail) + power * (x.log() - 1)) / (1 - power / x)
                none = height + math.log(peak) <= 0
                reaches.append(torch.where(none, -torch.inf, x.clamp_min(2.5)))
            x = torch.stack(reaches).amax(0)
            # A kernel that is smooth everywhere: from +∞ to −∞.
            u = torch.where(x > 0, torch.sqrt(x / b), -torch.inf) + strange
            u, c = u.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf), c.nan_to_num(0)
            low, high = (c - u).amin(1), (c + u).amax(1)
            bent = low <= high
            own = self._bands(torch.where(bent, low, 0.0), torch.where(bent, high, 0.0))
            low, high = (
                torch.maximum(own[:, 0], constant[:, 0]), torch.minimum(own[:, 1], constant[:, 1])
            )  # fmt: skip
            return torch.stack((low, torch.maximum(low, high)), dim=-1)

    def extra_repr(self) -> str:
        """Return what `print(module)` shows."""
        return f"{super().extra_repr()}, num_kernels={self.num_kernels}, init={self.init!r}"
