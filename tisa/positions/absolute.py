"""Learned absolute position embeddings (Devlin et al., NAACL 2019)."""

from collections.abc import Mapping

from torch import nn

from tisa.positions.base import Position, PositionConfig, Prepared
from tisa.scoring.published import fill, groups, only
from tisa.shapes import Embeddings, Tensor


class Absolute(Position):
    """One learned vector per position, added once at the input; a longer input is an error.

    Parameter: `table` (max_position_embeddings, width of the input embeddings), N(0, 0.02).
    """

    def __init__(self, config: PositionConfig) -> None:
        super().__init__(config)
        self.max_length = config.max_position_embeddings
        self.table = nn.Embedding(config.max_position_embeddings, config.embedding_width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new initial values."""
        nn.init.normal_(self.table.weight, std=0.02)

    def embed(self, embeddings: Embeddings, prepared: Prepared) -> Embeddings:
        """Return embeddings + table[position]."""
        return embeddings + self.table(prepared.places.positions)

    def read_reference(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take BERT's `position_embeddings` (`….weight` in transformers)."""
        name = "position_embeddings"
        name += ".weight" if any(key.endswith(f"{name}.weight") for key in state_dict) else ""
        table = only(groups("Absolute", state_dict, (name,)), "Absolute")[name]
        fill(self, {"table.weight": table}, "give its max_position_embeddings")

    def vectors(self) -> Tensor:
        """Return the table."""
        return self.table.weight
