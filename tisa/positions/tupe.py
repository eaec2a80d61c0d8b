"""TUPE: positions untied from content, and [CLS] from positions (Ke et al., ICLR 2021)."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn

from tisa.offsets import to_matrix
from tisa.positions.base import Places, Position, PositionConfig, Prepared, check_variant
from tisa.scoring import T5Buckets
from tisa.scoring.published import fill, groups, only
from tisa.shapes import Float, Hidden, Logits, Queries, Scores, Tensor


class Tupe(Position):
    """Logits q·k/√(2d) + reset((p_i U_Q)·(p_j U_K)/√(2d) + b_{j − i}), the second once for all.

    p = LayerNorm(`table`): one row more than positions, rows from 1 on for positions from 0. b is
    T5's bias in TUPE-R (`relative`), 0 in TUPE-A. With `untie_cls` (by default in encoders, where
    the first token is [CLS]) `reset` replaces the row of [CLS] by one number per head, and its
    column by another: the score of table row 0 with itself, and that of row 1 with itself. A longer
    input is an error.

    variant of TUPE-R:
        "paper": `reset` replaces b too.
        "author": the code's: two numbers more per head, `cls_scores`, in the place of b.
        "before": b added to [CLS] as to any other token. This package computed it until 2026-11-19.

    Parameters: `table` (N(0, 0.02)), `norm`, `to_query` U_Q and `to_key` U_K with biases, in TUPE-R
    `scoring`, and with the author's variant `cls_scores` (2, heads): of [CLS], to [CLS].
    """

    dense = True

    def __init__(
        self,
        config: PositionConfig,
        *,
        relative: bool = False,
        variant: Literal["paper", "author", "before"] = "paper",
        untie_cls: bool | None = None,
    ) -> None:
        super().__init__(config, layers="shared")
        check_variant("Tupe", variant, "before")
        self.max_length = config.max_position_embeddings
        self.untie_cls = not config.is_causal if untie_cls is None else untie_cls
        self.variant = variant
        width, heads = config.hidden_size, config.num_attention_heads
        self.table = nn.Embedding(config.max_position_embeddings + 1, width)
        self.norm = nn.LayerNorm(width)
        self.to_query = nn.Linear(width, width)
        self.to_key = nn.Linear(width, width)
        self.scoring = T5Buckets(heads, bidirectional=not config.is_causal) if relative else None
        has_own = relative and variant == "author" and self.untie_cls
        self.cls_scores = nn.Parameter(torch.empty(2, heads)) if has_own else None
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
        if self.cls_scores is not None:
            nn.init.normal_(self.cls_scores, std=0.02)

    def read_reference(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take the weights of the author's encoder: of TUPE-R where the method is."""
        parts = {"table": "pos", "norm": "pos_ln", "to_query": "pos_q_linear"}
        parts["to_key"] = "pos_k_linear"
        names = {f"{own}.weight": f"{name}.weight" for own, name in parts.items()}
        names |= {f"{own}.bias": f"{name}.bias" for own, name in parts.items() if own != "table"}
        buckets = "relative_attention_bias.weight"
        wanted = (*names.values(), *([buckets] if self.scoring else []))
        group = only(groups("Tupe", state_dict, wanted), "Tupe")
        values = {own: group[name] for own, name in names.items()}
        if self.scoring is not None:
            if self.cls_scores is None:
                raise ValueError(
                    'Tupe.from_reference: variant must be "author", with untie_cls, got '
                    f"{self.variant!r} and {self.untie_cls}"
                )
            # Two rows are [CLS]'s: one that no offset has a use for, and one after all others.
            last, unused = len(group[buckets]) - 1, len(group[buckets]) // 2
            values["scoring.bucket_scores"] = group[buckets][:last].T
            values["cls_scores"] = group[buckets][[unused, last]]
        fill(self, values, "give the config the sizes of that model")

    def shared(self, places: Places) -> tuple[Logits, Scores | None]:
        """Return the positional logits and, where no token is untied, TUPE-R's score vector."""
        heads = (-1, self.config.num_attention_heads, self.config.head_size)
        rows = self.norm(self.table.weight[: places.keys + 1])
        queries = self.to_query(rows).view(heads).transpose(0, 1)
        keys = self.to_key(rows).view(heads).transpose(0, 1)
        scale = (2 * self.config.head_size) ** -0.5
        first = places.query_start + 1
        some = queries[:, first : first + places.queries]
        logits = some @ keys[:, 1:].transpose(-1, -2) * scale
        scores = None
        if self.scoring is not None:
            scores = self.scoring(places.queries, places.keys, query_start=places.query_start)
        if not self.untie_cls or places.keys == 0:
            return logits.unsqueeze(0), scores
        # Of [CLS], to [CLS].
        numbers = (queries[:, :2] * keys[:, :2]).sum(-1).t() * scale
        if self.cls_scores is not None:
            numbers = numbers + self.cls_scores.to(numbers.dtype)
        after = None
        if scores is not None:
            relative = to_matrix(scores, places.queries, places.keys)
            if self.variant == "before":
                after = relative
            else:
                logits = logits + relative
        logits = _reset(logits, numbers, places)
        return (logits if after is None else logits + after).unsqueeze(0), None

    def content(self, layer: int, query: Queries) -> Queries:
        """Return the queries with the content's half of the variance: 1/√(2d) after scaling."""
        return query * 2**-0.5

    def dense_logits(
        self, layer: int, query: Queries | None, hidden: Hidden, prepared: Prepared
    ) -> Logits:
        """Return the positional logits, the same in all layers."""
        return prepared.shared[0]

    def offset_scores(self, layer: int, prepared: Prepared) -> Scores | None:
        """Return TUPE-R's bias, where it is not among the logits."""
        return prepared.shared[1]

    def vectors(self) -> Tensor:
        """Return the table without its first row, which is [CLS]'s own."""
        return self.table.weight[1:]

    def extra_repr(self) -> str:
        """Return what `print(module)` shows."""
        form = f"relative={self.scoring is not None}, variant={self.variant!r}"
        return f"{form}, untie_cls={self.untie_cls}"


def _reset(
    logits: Float[Tensor, "heads queries keys"], numbers: Float[Tensor, "two heads"], places: Places
) -> Float[Tensor, "heads queries keys"]:
    """Return the logits with [CLS]'s row as the first of the numbers, its column as the second."""
    of_row, of_column = numbers[:, :, None, None].to(logits.dtype)
    positions = torch.arange(places.keys, device=logits.device)
    here = positions[places.query_start :][: places.queries]
    logits = torch.where(positions == 0, of_column, logits)
    return torch.where((here == 0).unsqueeze(-1), of_row, logits)
