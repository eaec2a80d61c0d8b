"""Rotary position embeddings (Su et al., 2021), also for inputs longer than the training."""

import math

import torch

from tisa.positions.angles import angles_of
from tisa.positions.base import Places, Position, PositionConfig, Prepared, Variant
from tisa.positions.rotary_scaling import Kind, Scaling
from tisa.shapes import Float, Heads, Tensor


class Rotary(Position):
    """Pairs of dimensions of q and k at position m rotated by the angles m·base^(−2i/d).

    d is the head's width. Values are untouched, and q·k depends on the offset of their positions
    only. Pair i is (x_i, x_{i + d/2}) as most models have it, or with `interleaved` (x_2i, x_2i+1)
    as in the paper. No parameters; any length.

    scaling:
        Other rates, for a model that reads more than the `original_length` tokens it was trained on
        (by default the config's max_position_embeddings): "linear", "ntk", "dynamic_ntk" or "yarn"
        (`rotary_scaling.py` has the formulas), for `factor` times as many. "dynamic_ntk" asks
        how long the longest input of the call is, padding included, and refuses a cache from
        original_length on, whose keys would have been turned by other rates.
    ramp: how YaRN's γ rises: with the number of turns ("paper"), or with the number of the pair, as
        in the authors' code and in transformers ("author").
    p: the share of the pairs that is turned, those of the highest rates (p-RoPE).
    """

    def __init__(
        self,
        config: PositionConfig,
        *,
        base: float = 10000.0,
        interleaved: bool = False,
        scaling: Kind = "none",
        factor: float | None = None,
        original_length: int | None = None,
        ramp: Variant = "paper",
        p: float = 1.0,
    ) -> None:
        super().__init__(config)
        if config.head_size % 2:
            raise ValueError(
                f"Rotary: heads must have an even width, got {config.head_size} (hidden_size / "
                "num_attention_heads)"
            )
        if not 0 < base < math.inf:
            raise ValueError(f"Rotary: base must be above 0, got {base}")
        if scaling == "none" and (factor is not None or original_length is not None):
            raise ValueError(
                "Rotary: factor and original_length must be None without scaling, got "
                f"{factor} and {original_length}; name one, as in scaling=yarn"
            )
        if factor is None and scaling in ("linear", "ntk", "yarn"):
            raise ValueError(
                f"Rotary: factor must be given with scaling={scaling!r}, got None; it is how many "
                "times longer than the training the inputs are to be"
            )
        self.interleaved = interleaved
        self.scaling = Scaling(
            kind=scaling,
            factor=1.0 if factor is None else factor,
            length=config.max_position_embeddings if original_length is None else original_length,
            ramp=ramp,
            p=p,
            base=base,
            width=config.head_size,
        )

    def check_length(self, places: Places) -> None:
        """Refuse a cache whose keys were turned by other rates."""
        super().check_length(places)
        limit = self.scaling.length
        if self.scaling.kind == "dynamic_ntk" and places.query_start and places.keys > limit:
            raise ValueError(
                'Rotary: with a cache, scaling="dynamic_ntk" reads at most '
                f"{limit} tokens (original_length), got {places.keys}: its rates change with the "
                'length, and keys in the cache keep theirs; take "ntk" or "yarn", or no cache'
            )

    def shared(self, places: Places) -> Float[Tensor, "tokens one pairs"]:
        """Return every position's angles."""
        rates = self.scaling.rates(places.keys, places.positions.device)
        return angles_of(places.positions, rates).unsqueeze(1)

    def rotate(self, heads: Heads, prepared: Prepared) -> Heads:
        """Return the queries or keys rotated, computed in float32 or better."""
        dtype = torch.promote_types(heads.dtype, torch.float32)
        angles = prepared.shared.to(dtype)
        cosines, sines = angles.cos(), angles.sin()
        if self.scaling.temperature != 1:
            cosines, sines = (x * self.scaling.temperature for x in (cosines, sines))
        inner = heads.to(dtype)
        if self.interleaved:
            first, second = inner[..., 0::2], inner[..., 1::2]
        else:
            first, second = inner.chunk(2, dim=-1)
        turned = (first * cosines - second * sines, first * sines + second * cosines)
        if self.interleaved:
            return torch.stack(turned, dim=-1).flatten(-2).to(heads.dtype)
        return torch.cat(turned, dim=-1).to(heads.dtype)

    def extra_repr(self) -> str:
        """Return what `print(module)` shows."""
        made = self.scaling
        more = f", p={made.p:g}" if made.p != 1 else ""
        if made.kind != "none":
            more += (
                f", scaling={made.kind!r}, factor={made.factor:g}, original_length={made.length}"
            )
        return f"base={made.base:g}, interleaved={self.interleaved}{more}"
