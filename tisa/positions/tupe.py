"""TUPE: positions untied from content, and [CLS] from positions (Ke et al., ICLR 2021)."""

import torch
from torch import nn

from tisa.positions.base import Places, Position, PositionConfig, Prepared
from tisa.scoring import T5Buckets
from tisa.shapes import Hidden, Logits, Queries, Scores, Tensor


class Tupe(Position):
    """Logits q·k/√(2d) + (p_i U_Q)·(p_j U_K)/√(2d), the second term the same in all layers.

    p = LayerNorm(`table`): one row more than positions, rows from 1 on for positions from 0. With
    `untie_cls` (by default in encoders, where the first token is [CLS]) its row of the second term
    is the score of table row 0 with itself, its column that of row 1 with itself, as in the
    author's code. `relative` is TUPE-R: T5's bias is added afterwards, to [CLS] as to any other
    token (the author's code has two more scores for its row and column). A longer input is an
    error.

    Parameters: `table` (N(0, 0.02)), `norm`, `to_query` U_Q and `to_key` U_K with biases, and in
    TUPE-R `scoring`.
    """

    dense = True

    def __init__(
        self, config: PositionConfig, *, relative: bool = False, untie_cls: bool | None = None
    ) -> None:
        super().__init__(config, layers="shared")
        self.max_length = config.max_position_embeddings
        self.untie_cls = not config.is_causal if untie_cls is None else untie_cls
        width = config.hidden_size
        self.table = nn.Embedding(config.max_position_embeddings + 1, width)
        self.norm = nn.LayerNorm(width)
        self.to_query = nn.Linear(width, width)
        self.to_key = nn.Linear(width, width)
        self.scoring = (
            T5Buckets(config.num_attention_heads, bidirectional=not config.is_causal)
            if relative
            else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new initial values."""
        for layer in (self.table, self.to_query, self.to_key):
            nn.init.normal_(layer.weight, std=0.02)
        nn.init.zeros_(self.to_query.bias)
        nn.init.zeros_(self.to_key.bias)
        self.norm.reset_parameters()
        if self.scoring is not None:
            self.scoring.reset_parameters()

    def shared(self, places: Places) -> tuple[Logits, Scores | None]:
        """Return the positional logits and, in TUPE-R, the score vector: once for all layers."""
        heads = (-1, self.config.num_attention_heads, self.config.head_size)
        rows = self.norm(self.table.weight[: places.keys + 1])
        queries = self.to_query(rows).view(heads).transpose(0, 1)
        keys = self.to_key(rows).view(heads).transpose(0, 1)
        scale = (2 * self.config.head_size) ** -0.5
        first = places.query_start + 1
        some = queries[:, first : first + places.queries]
        logits = some @ keys[:, 1:].transpose(-1, -2) * scale
        if self.untie_cls and places.keys > 0:
            itself = (queries[:, :2] * keys[:, :2]).sum(-1) * scale
            of_row, of_column = itself[:, 0, None, None], itself[:, 1, None, None]
            positions = torch.arange(places.keys, device=logits.device)
            here = positions[places.query_start :][: places.queries]
            logits = torch.where(positions == 0, of_column, logits)
            logits = torch.where((here == 0).unsqueeze(-1), of_row, logits)
        scores = None
        if self.scoring is not None:
            scores = self.scoring(places.queries, places.keys, query_start=places.query_start)
        return logits.unsqueeze(0), scores

    def content(self, layer: int, query: Queries) -> Queries:
        """Return the queries with the content's half of the variance: 1/√(2d) after scaling."""
        return query * 2**-0.5

    def dense_logits(
        self, layer: int, query: Queries | None, hidden: Hidden, prepared: Prepared
    ) -> Logits:
        """Return the positional logits, the same in all layers."""
        return prepared.shared[0]

    def offset_scores(self, layer: int, prepared: Prepared) -> Scores | None:
        """Return TUPE-R's bias."""
        return prepared.shared[1]

    def vectors(self) -> Tensor:
        """Return the table without its first row, which is [CLS]'s own."""
        return self.table.weight[1:]

    def extra_repr(self) -> str:
        """Return what `print(module)` shows."""
        return f"relative={self.scoring is not None}, untie_cls={self.untie_cls}"
