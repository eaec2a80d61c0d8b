"""Near and far: TISA's kernels with a decay that holds distant tokens down. Our own."""

import torch
from torch.nn.functional import softplus

from tisa.scoring.base import Init, ScoringFunction, head_parameter
from tisa.scoring.kerple import inverse_softplus
from tisa.scoring.parabolas import bend
from tisa.scoring.tisa import TISA
from tisa.shapes import Float, Int, Int32, Tensor


class NearFar(ScoringFunction):
    """Ours: TISA's free kernels near, a learned logarithmic decay far, on each side its own.

    f(k) = Σ_s a_s·exp(−|b_s|(k − c_s)²) − ½·r·log(1 + (ρ·k)²),  r = r₋ for k < 0 and r₊ for k > 0.

    A sum of bounded kernels goes to 0 far away, so nothing holds distant tokens down when the input
    is longer than in training. The second term does. This decay is flat at the query, so that the
    kernels alone shape the curve there. From a distance of about 1/ρ on the decay falls like
    −r·log(ρ|k|), KERPLE's logarithm. Parameters: `near`, a `TISA`; `raw_strengths` (heads, 2) with
    r₋, r₊ = softplus(·); `raw_rates` (heads) with ρ = softplus(·).

    At step 0:
        init="reference": kernels as in `TISA`; r ~ U(0, 2), the same on both sides, ρ ~ U(0, 1).
        init="zero": amplitudes 0; the decay, which cannot be 0, is all there is.
    """

    def __init__(
        self, num_attention_heads: int = 12, num_kernels: int = 5, *, init: Init = "reference"
    ) -> None:
        super().__init__(num_attention_heads)
        self.near = TISA(num_attention_heads, num_kernels, init=init)
        self.raw_strengths = head_parameter(num_attention_heads, 2)
        self.raw_rates = head_parameter(num_attention_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new initial values."""
        self.near.reset_parameters()
        with torch.no_grad():
            strengths = torch.rand_like(self.raw_rates).unsqueeze(-1) * 2
            self.raw_strengths.copy_(inverse_softplus(strengths.expand_as(self.raw_strengths)))
            self.raw_rates.copy_(inverse_softplus(torch.rand_like(self.raw_rates)))

    def scores(self, offsets: Int[Tensor, "*shape"]) -> Float[Tensor, "heads *shape"]:
        """Return f(k) of each offset for each head."""
        k = self._distances(offsets).reshape(-1)
        before, after = softplus(self.raw_strengths.to(k.dtype)).unsqueeze(-1).unbind(1)
        rates = softplus(self.raw_rates.to(k.dtype)).unsqueeze(-1)
        decay = torch.where(k < 0, before, after) * torch.log1p((rates * k) ** 2) / 2
        return self.near.scores(offsets) - decay.reshape(self.num_attention_heads, *offsets.shape)

    def support(self, eps: float) -> None:
        """Return None: the tail falls for ever."""
        return None

    def parabola_support(self, eps: float, reach: int) -> Int32[Tensor, "heads 2"]:
        """Return how far out the third derivatives of kernels or decay are too large.

        Each may have half of `eps`. With z = ρk the decay's is at most 2r/k³ and 1.4·rρ³, that of
        its derivative by ρ at most 24r/(ρ³k⁵) and 4.7·rρ²; by `raw_rates` that times 1 − e^−ρ, by
        `raw_strengths` no more than the decay's.
        """
        with torch.no_grad():
            near = self.near.parabola_support(eps / 2, reach)
            limit = eps / 2 / bend(reach)
            r = softplus(self.raw_strengths.to(self._dtype))
            rho = softplus(self.raw_rates.to(self._dtype)).unsqueeze(-1).clamp_min(1e-6)
            chain = -torch.expm1(-rho)
            decay = torch.where(1.4 * r * rho**3 <= limit, 0.0, (2 * r / limit) ** (1 / 3))
            rate = (24 * r * chain / limit) ** 0.2 / rho**0.6
            rate = torch.where(4.7 * r * rho**2 * chain <= limit, 0.0, rate)
            far = torch.maximum(decay, rate).nan_to_num(nan=torch.inf, posinf=torch.inf)
            far = self._bands(-far[:, 0], far[:, 1])
            return torch.stack(
                (torch.minimum(near[:, 0], far[:, 0]), torch.maximum(near[:, 1], far[:, 1])), dim=-1
            )
