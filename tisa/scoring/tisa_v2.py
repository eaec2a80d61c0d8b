"""TISA v2: soft steps and a fixed slope (the author of TISA, in a motion model, 2023)."""

import math
from collections.abc import Mapping

import torch

from tisa.scoring.base import ScoringFunction, head_parameter
from tisa.scoring.parabolas import bend
from tisa.scoring.published import fill, groups, only
from tisa.shapes import Float, Int, Int32, Tensor


class TISAv2(ScoringFunction):
    """TISA v2: log of a sum of soft steps, minus a fixed slope; its tail keeps falling.

    f(k) = log(Σ_s |a_s|·sigmoid(sign(a_s)·(D − o_s)/w_s) + |β| + 1e-8) − m·|D|,  D = −k.

    Parameters, each (heads, kernels): `step_amplitudes` a, `step_offsets` o, `step_widths` w; and
    `floors` β, (heads). The slope m is fixed: −ln(1e-8)/(view/2), the fields of view geometric from
    `shortest_view` (first head) to `longest_view` (last). The last `num_agnostic_heads` heads have
    no steps and no slope: their score is 0. `kernel_dropout` drops whole steps of a head in
    training (dropping single entries would break translation invariance).

    At step 0 (a ~ N(0, 0.01), o ~ N(0, 15), w = 5, β = 1): nearly the slope alone, like ALiBi. The
    steps could not start from a = 0: the sign of a decides which way a step faces.
    """

    def __init__(
        self,
        num_attention_heads: int = 12,
        num_kernels: int = 5,
        *,
        shortest_view: float = 64.0,
        longest_view: float = 4096.0,
        num_agnostic_heads: int = 0,
        kernel_dropout: float = 0.0,
    ) -> None:
        super().__init__(num_attention_heads)
        if num_kernels < 0:
            raise ValueError(f"TISAv2: num_kernels must be 0 or more, got {num_kernels}")
        if not 0 < shortest_view <= longest_view:
            raise ValueError(
                "TISAv2: views must satisfy 0 < shortest_view ≤ longest_view, "
                f"got {shortest_view} and {longest_view}"
            )
        if not 0 <= num_agnostic_heads <= num_attention_heads:
            raise ValueError(
                f"TISAv2: num_agnostic_heads must lie in 0 … {num_attention_heads}, "
                f"got {num_agnostic_heads}"
            )
        if not 0 <= kernel_dropout < 1:
            raise ValueError(f"TISAv2: kernel_dropout must lie in [0, 1), got {kernel_dropout}")
        self.num_kernels = num_kernels
        self.shortest_view = shortest_view
        self.longest_view = longest_view
        self.num_agnostic_heads = num_agnostic_heads
        self.kernel_dropout = kernel_dropout
        self.step_amplitudes = head_parameter(num_attention_heads, num_kernels)
        self.step_offsets = head_parameter(num_attention_heads, num_kernels)
        self.step_widths = head_parameter(num_attention_heads, num_kernels)
        self.floors = head_parameter(num_attention_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new initial values."""
        with torch.no_grad():
            self.step_amplitudes.normal_(0.0, 0.01)
            self.step_offsets.normal_(0.0, 15.0)
            self.step_widths.fill_(5.0)
            self.floors.fill_(1.0)

    def read_reference(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take the weights of the author's module; its views are arguments, not weights."""
        names = {
            "step_amplitudes": "amplitudes",
            "step_offsets": "offsets",
            "step_widths": "sharpness",
        }
        group = only(groups("TISAv2", state_dict, (*names.values(), "bias")), "TISAv2")
        # (1, kernels, heads, 1, 1)
        values = {own: group[name][0, :, :, 0, 0].T for own, name in names.items()}
        values["floors"] = group["bias"][0, :, 0, 0]
        fill(self, values, "give its num_kernels and heads")

    def slopes(self) -> Float[Tensor, " heads"]:
        """Return m of each head."""
        positional = self.num_attention_heads - self.num_agnostic_heads
        head = torch.arange(self.num_attention_heads, device=self._place.device, dtype=self._dtype)
        ratio = math.log(self.longest_view / self.shortest_view) / max(1, positional - 1)
        slopes = -math.log(1e-8) / (self.shortest_view * torch.exp(head * ratio) / 2)
        return torch.where(head < positional, slopes, 0.0)

    def scores(self, offsets: Int[Tensor, "*shape"]) -> Float[Tensor, "heads *shape"]:
        """Return f(k) of each offset for each head."""
        D = -self._distances(offsets).reshape(-1)
        a = self.step_amplitudes.to(D.dtype)
        weights = a.abs()
        if self.training and self.kernel_dropout:
            kept = torch.rand_like(weights) >= self.kernel_dropout
            weights = weights * kept / (1 - self.kernel_dropout)
        w = self._widths().to(D.dtype).unsqueeze(-1)
        o = self.step_offsets.to(D.dtype).unsqueeze(-1)
        steps = weights.unsqueeze(-1) * torch.sigmoid(a.sign().unsqueeze(-1) * (D - o) / w)
        floor = self.floors.to(D.dtype).abs().unsqueeze(-1)
        near = torch.log(steps.sum(1) + floor + 1e-8)
        slopes = self.slopes().unsqueeze(-1)
        positional = slopes > 0
        scores = torch.where(positional, near, 0.0) - slopes * D.abs()
        return scores.reshape(self.num_attention_heads, *offsets.shape)

    def support(self, eps: float) -> None:
        """Return None: the tail falls for ever."""
        return None

    def _widths(self) -> Float[Tensor, "heads kernels"]:
        # A width that training drives to 0 would make 0/0 at D = o.
        w = self.step_widths.to(self._dtype)
        return torch.where(w < 0, w.clamp_max(-1e-3), w.clamp_min(1e-3))

    def parabola_support(self, eps: float, reach: int) -> Int32[Tensor, "heads 2"]:
        """Return how far out the soft steps still bend the curve.

        With y = |D − o|/|w| all derivatives of a step are below e^−y / |w|ⁿ. So with G ≥ |β| + 1e-8
        the sum in the logarithm, and ω = Σ max(1, |a|)·(1 + y)·e^−y / G ≤ ½, the third derivatives
        of the score and of its derivatives by every parameter are below

            11·max(1, 1/G)·ω / min(1, |w|)⁴.

        Each step may have its share of that. y − ln(1 + y) is convex: where a tangent's meets the
        level is never below the place where it does.
        """
        if self.num_kernels == 0:
            return torch.zeros(
                self.num_attention_heads, 2, dtype=torch.int32, device=self._place.device
            )
        with torch.no_grad():
            dtype, limit = self._dtype, eps / bend(reach)
            w, o = self._widths().abs(), self.step_offsets.to(dtype)
            a = self.step_amplitudes.to(dtype).abs() / (1 - self.kernel_dropout)
            floor = (self.floors.to(dtype).abs() + 1e-8).unsqueeze(-1)
            # NaN and infinity make every sum below one.
            strange = (a + o + w).sum(-1, keepdim=True) * 0
            least = w.amin(-1, keepdim=True).clamp_max(1.0)
            share = 4 * least.log() + floor.clamp_max(1.0).log() + math.log(limit / 11)
            share = share.clamp_max(math.log(0.5)) + floor.log() - math.log(self.num_kernels)
            level = (a.clamp_min(1.0).log() - share).clamp_min(1.0)
            y = 2 * (level + 2)
            for _ in range(3):
                y = (level + y.log1p() - y / (1 + y)) * (1 + y) / y
            width = (w * y + strange).nan_to_num(nan=torch.inf, posinf=torch.inf)
            o = o.nan_to_num(0.0, 0.0, 0.0)
            # The slope has its corner at the query; heads without positions have nothing.
            low = (-o - width).amin(-1).clamp_max(0)
            high = (-o + width).amax(-1).clamp_min(0)
            positional = self.slopes() > 0
            return self._bands(
                torch.where(positional, low, 0.0), torch.where(positional, high, 0.0)
            )

    def extra_repr(self) -> str:
        """Return what `print(module)` shows."""
        return (
            f"{super().extra_repr()}, num_kernels={self.num_kernels}, "
            f"views=({self.shortest_view:g}, {self.longest_view:g}), "
            f"num_agnostic_heads={self.num_agnostic_heads}, kernel_dropout={self.kernel_dropout}"
        )
