"""Relative position representations (Shaw et al., NAACL 2018), by skewing."""

from collections.abc import Mapping

import torch
from torch import nn

from tisa.offsets import offset_range, skew, unskew
from tisa.positions.base import (
    Layers,
    Places,
    Position,
    PositionConfig,
    Prepared,
    Variant,
    check_variant,
)
from tisa.scoring.published import fill
from tisa.shapes import Hidden, Int, Logits, Queries, Tensor, Weights


class Shaw(Position):
    """Learned vectors per clipped offset, added to keys and to values.

    e_ij = q_i·(k_j + a^K_ij)/√d,  z_i = Σ_j α_ij (v_j + a^V_ij),  a_ij = w[clip(j − i, −k, k)],
    k = `max_distance`. Parameters: `key_table` and `value_table`, (layers, heads, 2k + 1, d), as in
    the paper's base model; with `variant="author"` one pair of tables for all heads of a layer, as
    in tensor2tensor.

    q_i·a_ij is one product of queries with the vectors of all offsets, (queries, span), whose rows
    are then moved so that offsets become keys (`tisa.offsets.skew`): no tensor of queries × keys ×
    d. Values go the same way back. At step 0 vectors are N(0, 0.02).
    """

    dense = True
    needs_weights = True

    def __init__(
        self,
        config: PositionConfig,
        *,
        max_distance: int = 16,
        variant: Variant = "paper",
        layers: Layers = "each",
    ) -> None:
        super().__init__(config, layers=layers)
        check_variant("Shaw", variant)
        self.variant = variant
        if max_distance < 1:
            raise ValueError(f"Shaw: max_distance must be at least 1, got {max_distance}")
        self.max_distance = max_distance
        heads = 1 if variant == "author" else config.num_attention_heads
        shape = (self.copies, heads, 2 * max_distance + 1, config.head_size)
        self.key_table = nn.Parameter(torch.empty(shape))
        self.value_table = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new initial values."""
        nn.init.normal_(self.key_table, std=0.02)
        nn.init.normal_(self.value_table, std=0.02)

    def read_reference(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take tensor2tensor's two tables of each layer."""
        keys, values = (f"relative_positions_{kind}/embeddings" for kind in ("keys", "values"))
        layers = self.of_layers(state_dict, keys, values)
        if self.variant == "paper":
            raise ValueError('Shaw.from_reference: variant must be "author", got "paper"')
        tables = {
            own: torch.stack([layer[name] for layer in layers]).unsqueeze(1)
            for own, name in (("key_table", keys), ("value_table", values))
        }
        far = tables["key_table"].shape[2] // 2
        fill(self, tables, f"give max_distance={far} and its width of a head")

    def shared(self, places: Places) -> Int[Tensor, " span"]:
        """Return the row of the tables for every offset."""
        offsets = offset_range(
            places.queries,
            places.keys,
            query_start=places.query_start,
            device=places.positions.device,
        )
        return offsets.clamp(-self.max_distance, self.max_distance) + self.max_distance

    def dense_logits(
        self, layer: int, query: Queries | None, hidden: Hidden, prepared: Prepared
    ) -> Logits | None:
        """Return q_i·a^K_ij/√d."""
        copy = self.copy_of(layer)
        if copy is None:
            return None
        assert query is not None
        vectors = self.key_table[copy][:, prepared.shared].to(query.dtype)
        by_offset = query @ vectors.transpose(-1, -2) * query.shape[-1] ** -0.5
        return skew(by_offset, prepared.places.keys)

    def values(self, layer: int, weights: Weights, prepared: Prepared) -> Queries | None:
        """Return Σ_j α_ij a^V_ij."""
        copy = self.copy_of(layer)
        if copy is None:
            return None
        vectors = self.value_table[copy][:, prepared.shared].to(weights.dtype)
        return unskew(weights) @ vectors
