"""Near, far and forgotten: a curve of the offset with a gate of the tokens. Our own."""

import torch
from torch import nn

from tisa.positions.base import Layers, Places, Position, PositionConfig, Prepared
from tisa.positions.fox import Fox
from tisa.positions.from_scoring import FromScoring
from tisa.scoring import ALiBi, NearFar
from tisa.scoring.base import Init
from tisa.scoring.kerple import inverse_softplus
from tisa.shapes import Float, Int32, Scores, Tensor

# What is left of the curve's decay at step 0: softplus cannot be 0, and its slope must not be.
STRENGTH = 0.01


class NearFarFox(Position):
    """Ours: logits + f(j − i) + Σ_{j < l ≤ i} log f_l, `NearFar`'s curve with the gate of `Fox`.

    The kernels of the curve say what a place near the query is worth, the gate what a text has put
    behind itself. Both can hold distant tokens down, and one of them is enough: a curve falls for
    every text alike, a gate where the text says so. So the gate begins as the decay, and the curve
    need not fall.

    Parameters: `curve`, with options of `NearFar` (`num_kernels`, `init`), and `gate`. At step 0:
    the curve's strengths r are 0.01, next to no decay; the gate's biases are b = −log(e^m − 1) with
    ALiBi's slopes m, so that a token with w·x = 0 costs m: long memory in some heads, short in
    others. Everything else is as in `NearFar` and `Fox`.
    """

    scores_keys = True
    causal_only = Fox.causal_only

    def __init__(
        self,
        config: PositionConfig,
        *,
        num_kernels: int = 5,
        init: Init = "reference",
        layers: Layers = "each",
    ) -> None:
        super().__init__(config, layers=layers)
        self.curve = FromScoring(
            config, function=NearFar, layers=layers, num_kernels=num_kernels, init=init
        )
        self.gate = Fox(config, layers=layers)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new initial values."""
        slopes = ALiBi(self.config.num_attention_heads).slopes()
        self.gate.reset_parameters()
        with torch.no_grad():
            for gate in self.gate.gates:
                assert isinstance(gate, nn.Linear)
                gate.bias.copy_(-slopes.expm1().log())
            for scoring in self.curve.scoring:
                assert isinstance(scoring, NearFar)
                scoring.reset_parameters()
                strengths = torch.full_like(scoring.raw_strengths, STRENGTH)
                scoring.raw_strengths.copy_(inverse_softplus(strengths))

    def shared(self, places: Places) -> list[Scores]:
        """Return the score vector of every curve."""
        return self.curve.shared(places)

    def offset_scores(self, layer: int, prepared: Prepared) -> Scores | None:
        """Return the score vector of the layer."""
        return self.curve.offset_scores(layer, prepared)

    def band(self, layer: int, dtype: torch.dtype) -> Int32[Tensor, "heads 2"] | None:
        """Return the band of the layer's curve."""
        return self.curve.band(layer, dtype)

    def bands(self, dtype: torch.dtype) -> list[Int32[Tensor, "heads 2"] | None]:
        """Return the band of every layer's curve, made for all of them together."""
        return self.curve.bands(dtype)

    def key_scores(
        self,
        layer: int,
        hidden: Float[Tensor, "*batch tokens hidden"],
        before: Float[Tensor, "batch heads 1"] | None,
        prepared: Prepared,
    ) -> Float[Tensor, "*batch heads tokens"] | None:
        """Return the gate's sum at every new token."""
        return self.gate.key_scores(layer, hidden, before, prepared)
