"""FIRE: a learned function of distances measured against the query's place (Li et al., ICLR 2024).

"Functional Interpolation for Relative Positions Improves Long Context Transformers", with the code
of its appendix where the formula leaves something open.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from tisa.offsets import offset_range
from tisa.ops.call import plain
from tisa.positions.base import Layers, Places, Position, PositionConfig, Prepared
from tisa.scoring.base import at_least_float32
from tisa.scoring.published import fill, groups
from tisa.shapes import Float, Hidden, Logits, Queries, Scores, Tensor

# Of the code in the paper's appendix.
FIRST_RATE, EPS = 0.1, 1e-6
# Numbers of the inner layer that are made at a time where no gradient is wanted.
AT_ONCE = 1 << 24


class Placed(NamedTuple):
    """A pass: the scores of every layer whose positions all lie below its threshold, else None."""

    scores: list[Float[Tensor, "heads span"] | None]


class Fire(Position):
    """Scores f(ψ(|i − j|) / ψ(max(L, i))) of query i and key j, ψ(x) = log(|c|·x + 1).

    f is a map from one number to one for each head, with a layer of `units` ReLUs between. Up to
    the threshold L, a function of the offset alone: a score vector, which goes through
    `tisa.attention` as any other. An input with a position past L has a scale of its own for each
    query there, and logits of every pair: exact, at queries × keys of memory for each head (with
    gradients `units` times that), and not in a ring. Which of the two it is, each layer is asked
    in every pass, by the length alone: one look at L, for which a GPU has to be waited for.
    Where nobody can look at L (compiled and exported graphs, torch.func) it is always the second.

    The paper has FIRE in decoders; in an encoder the distance is |i − j|, as its code has it.

    Parameters for each layer (`layers="shared"`: FIRE-S), at step 0 as in the paper's code:
    `inner_weights` and `inner_biases` (units), `outer_weights` (heads, units), `outer_biases`
    (heads), uniform as torch's linear maps have them; `rates` c, 0.1; `multipliers`, 1: L is
    |multiplier|·`initial_length`. Past the training length, a decoder that began with L above it
    reads on with the known values of f.
    """

    dense = True

    def __init__(
        self,
        config: PositionConfig,
        *,
        units: int = 32,
        initial_length: float = 512.0,
        layers: Layers = "each",
    ) -> None:
        super().__init__(config, layers=layers)
        if units < 1:
            raise ValueError(f"Fire: units must be at least 1, got {units}")
        if not 0 < initial_length < math.inf:
            raise ValueError(f"Fire: initial_length must be above 0, got {initial_length}")
        self.units = units
        self.initial_length = initial_length
        copies, heads = self.copies, config.num_attention_heads
        self.inner_weights = nn.Parameter(torch.empty(copies, units))
        self.inner_biases = nn.Parameter(torch.empty(copies, units))
        self.outer_weights = nn.Parameter(torch.empty(copies, heads, units))
        self.outer_biases = nn.Parameter(torch.empty(copies, heads))
        self.rates = nn.Parameter(torch.empty(copies))
        self.multipliers = nn.Parameter(torch.empty(copies))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new initial values."""
        for inner in (self.inner_weights, self.inner_biases):
            nn.init.uniform_(inner, -1, 1)
        bound = self.units**-0.5
        for outer in (self.outer_weights, self.outer_biases):
            nn.init.uniform_(outer, -bound, bound)
        nn.init.constant_(self.rates, FIRST_RATE)
        nn.init.ones_(self.multipliers)

    def read_reference(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take the weights of the module in the paper's appendix, one for each of ours."""
        read: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
            "mlp.0.weight": ("inner_weights", lambda t: t[:, 0]),
            "mlp.0.bias": ("inner_biases", lambda t: t),
            "mlp.2.weight": ("outer_weights", lambda t: t),
            "mlp.2.bias": ("outer_biases", lambda t: t),
            "c": ("rates", lambda t: t),
            "L_multiplier": ("multipliers", lambda t: t),
        }
        layers = self.of_layers(state_dict, *read)
        if any(name.endswith("init_L") for name in state_dict):
            for group in groups("Fire", state_dict, ["init_L"]):
                if float(group["init_L"]) != self.initial_length:
                    raise ValueError(
                        f"Fire.from_reference: initial_length must be {float(group['init_L'])}, "
                        f"the checkpoint's init_L, got {self.initial_length}"
                    )
        values = {
            own: torch.stack([turn(layer[name]) for layer in layers])
            for name, (own, turn) in read.items()
        }
        fill(self, values, "give the config its number of heads, and units")

    def shared(self, places: Places) -> Placed:
        """Return the score vectors of the layers that have one at this length."""
        thresholds: list[float] = [-1.0] * self.copies
        if plain(self.multipliers) and not self.multipliers.is_meta and not _capturing(places):
            thresholds = self._thresholds().tolist()
        fits = [places.keys - 1 <= threshold for threshold in thresholds]
        if not any(fits):
            return Placed([None] * self.copies)
        offsets = offset_range(
            places.queries,
            places.keys,
            query_start=places.query_start,
            device=self.multipliers.device,
        )
        below = self._thresholds()
        return Placed(
            [
                self._of(copy, offsets.abs(), below[copy]) if fit else None
                for copy, fit in enumerate(fits)
            ]
        )

    def is_dense(self, layer: int, prepared: Prepared) -> bool:
        """Return whether the layer has no score vector at this length."""
        copy = self.copy_of(layer)
        return copy is not None and prepared.shared.scores[copy] is None

    def offset_scores(self, layer: int, prepared: Prepared) -> Scores | None:
        """Return the score vector of the layer, where it has one."""
        copy = self.copy_of(layer)
        return None if copy is None else prepared.shared.scores[copy]

    def dense_logits(
        self, layer: int, query: Queries | None, hidden: Hidden, prepared: Prepared
    ) -> Logits | None:
        """Return the scores of every pair, where a query stands past the threshold."""
        copy = self.copy_of(layer)
        if copy is None or prepared.shared.scores[copy] is not None:
            return None
        places, device = prepared.places, self.multipliers.device
        first = places.query_start
        stands = torch.arange(first, first + places.queries, device=device)
        keys = torch.arange(places.keys, device=device)
        threshold = self._thresholds()[copy]
        if torch.is_grad_enabled() or not plain(self.multipliers):
            return self._of_pairs(copy, stands, keys, threshold).unsqueeze(0)
        some = max(1, AT_ONCE // max(1, places.keys * self.units))
        parts = [self._of_pairs(copy, part, keys, threshold) for part in stands.split(some)]
        return torch.cat(parts, dim=1).unsqueeze(0)

    def _of_pairs(
        self, copy: int, stands: Tensor, keys: Tensor, threshold: Float[Tensor, ""]
    ) -> Float[Tensor, "heads queries keys"]:
        at = stands.to(threshold.dtype)
        # Not `maximum`, which at L itself would take half of its gradient.
        longest = torch.where(at > threshold, at, threshold).unsqueeze(-1)
        return self._of(copy, (stands.unsqueeze(-1) - keys).abs(), longest)

    def _thresholds(self) -> Float[Tensor, " copies"]:
        dtype = torch.promote_types(self.multipliers.dtype, torch.float32)
        return (self.multipliers.to(dtype) * self.initial_length).abs()

    def _of(self, copy: int, distances: Tensor, longest: Tensor) -> Float[Tensor, "heads *pairs"]:
        """Return f(ψ(distance) / ψ(longest)), in float32 or better."""
        dtype = longest.dtype
        rate = self.rates[copy].to(dtype).abs()
        share = (rate * distances.to(dtype)).log1p() / ((rate * longest).log1p() + EPS)
        inner = (
            share.unsqueeze(-1) * self.inner_weights[copy].to(dtype)
            + self.inner_biases[copy].to(dtype)
        ).relu()
        outer = inner @ self.outer_weights[copy].to(dtype).t() + self.outer_biases[copy].to(dtype)
        return outer.movedim(-1, 0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Fire":
        return super()._apply(at_least_float32(fn), recurse)

    def extra_repr(self) -> str:
        """Return what `print(module)` shows."""
        made = f"units={self.units}, initial_length={self.initial_length:g}"
        return f"{super().extra_repr()}, {made}"


def _capturing(places: Places) -> bool:
    """Whether a CUDA graph is being recorded, in which nobody may wait for the GPU."""
    return places.positions.is_cuda and torch.cuda.is_current_stream_capturing()
