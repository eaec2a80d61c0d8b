"""What gates have in common: every token adds a step to a sum that all keys after it have.

The score of a pair is then a difference of two sums, c_j − c_i, of which c_i is the same for all
keys of a query: the softmax takes no notice of it, and c_j is one number per key.
"""

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import nn

from tisa.positions.base import Layers, Places, Position, PositionConfig, Prepared
from tisa.scoring.published import fill
from tisa.shapes import Float, Tensor


class Gated(Position):
    """A method whose score of key j is c_j = Σ_{l ≤ j} s_l: the steps s of all tokens up to it.

    Seen from query i that is −Σ_{j < l ≤ i} s_l, a decay where steps are positive. Sums are made in
    float64 where the device has it. Padding makes no step, and a packed sequence begins at its
    first token.

    Parameters: `gates`, a linear map of the layer's input to a number for each head, one for each
    layer (`layers="each"`), one for all ("shared"), or one for the first ("first").
    """

    scores_keys = True
    causal_only = (
        "what is forgotten between two tokens is a score of the key alone only where every key "
        "stands before the query"
    )

    def __init__(
        self, config: PositionConfig, *, layers: Layers = "each", has_bias: bool = True
    ) -> None:
        super().__init__(config, layers=layers)
        sizes = (config.hidden_size, config.num_attention_heads, has_bias)
        self.gates = nn.ModuleList(nn.Linear(*sizes) for _ in range(self.copies))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new initial values: weights from N(0, 0.02), biases 0."""
        for gate in self.gates:
            assert isinstance(gate, nn.Linear)
            nn.init.normal_(gate.weight, std=0.02)
            if gate.bias is not None:
                nn.init.zeros_(gate.bias)

    @abstractmethod
    def steps(
        self, gates: Float[Tensor, "*batch tokens heads"]
    ) -> Float[Tensor, "*batch tokens heads"]:
        """Return the step of each token, from what the linear map says of it."""

    def key_scores(
        self,
        layer: int,
        hidden: Float[Tensor, "*batch tokens hidden"],
        before: Float[Tensor, "batch heads 1"] | None,
        prepared: Prepared,
    ) -> Float[Tensor, "*batch heads tokens"] | None:
        """Return c of every new token."""
        copy = self.copy_of(layer)
        if copy is None:
            return None
        gates = self.gates[copy](hidden)
        steps = self.steps(gates.to(torch.promote_types(gates.dtype, torch.float32)))
        return summed(steps.transpose(-1, -2), before, prepared.places)

    def read_gates(self, state_dict: Mapping[str, Tensor], name: str) -> None:
        """Take the weights of each layer's linear map, which has that name in a checkpoint."""
        parts = ("weight", "bias")
        layers = self.of_layers(state_dict, *(f"{name}.{part}" for part in parts))
        values = {
            f"gates.{number}.{part}": layer[f"{name}.{part}"]
            for number, layer in enumerate(layers) for part in parts
        }  # fmt: skip
        fill(self, values, "give the config the sizes of that model")


def summed(
    steps: Float[Tensor, "*batch heads tokens"],
    before: Float[Tensor, "batch heads 1"] | None,
    places: Places,
) -> Float[Tensor, "*batch heads tokens"]:
    """Return the sum of all steps up to each token, those in the cache included."""
    if places.present is not None:
        steps = steps.masked_fill(~places.present.unsqueeze(-2), 0.0)
    # The device of Apple has no float64.
    exact = torch.float32 if steps.device.type == "mps" else torch.float64
    sums = steps.cumsum(-1, dtype=exact)
    if steps.ndim == 2:
        first = torch.arange(steps.shape[-1], device=steps.device) - places.positions
        return sums - sums[..., first]
    return sums if before is None else sums + before
