"""What a stack of models has in place of linear maps, norms, embeddings and attention.

Each has a leading axis for the models; `put` gives one of them the values of a single model's
module. Rows come as (models · rows, …), those of a model beside each other.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tisa.hf.core import Folded
from tisa.ops import attention
from tisa.shapes import Float, Int, Tensor


class Pass:
    """What the modules of a stack have to know of the pass that is being made."""

    def __init__(self, models: int) -> None:
        self.models = models
        self.rows = 0
        self.mask: Tensor | None = None
        # Scores of each attention in the order in which they are called, (models · heads, span).
        self.scores: list[Tensor] | None = None
        self.calls = 0


class StackedLinear(nn.Module):
    """A linear map for each model, as one batched matrix product."""

    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, models: int) -> None:
        super().__init__()
        self.weight = _room(models, linear.in_features, linear.out_features, like=linear.weight)
        self.bias = None
        if linear.bias is not None:
            self.bias = _room(models, linear.out_features, like=linear.bias)

    def put(self, model: int, linear: nn.Linear) -> None:
        """Take the values of a single map."""
        self.weight[model].copy_(linear.weight.T)
        if self.bias is not None:
            self.bias[model].copy_(linear.bias)

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows other_width"]:
        """Return each model's map of its rows."""
        models, width, other = self.weight.shape
        rows = x.reshape(models, -1, width)
        if self.bias is None:
            made = torch.bmm(rows, self.weight)
        else:
            made = torch.baddbmm(self.bias.unsqueeze(1), rows, self.weight)
        return made.view(*x.shape[:-1], other)


class StackedLayerNorm(nn.Module):
    """A norm for each model."""

    bias: nn.Parameter | None

    def __init__(self, norm: nn.LayerNorm, models: int) -> None:
        super().__init__()
        self.eps = norm.eps
        (width,) = norm.normalized_shape
        self.weight = _room(models, width, like=norm.weight)
        self.bias = None if norm.bias is None else _room(models, width, like=norm.bias)

    def put(self, model: int, norm: nn.LayerNorm) -> None:
        """Take the values of a single norm."""
        self.weight[model].copy_(norm.weight)
        if self.bias is not None:
            self.bias[model].copy_(norm.bias)

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """Return the rows as each model's norm has them."""
        models, width = self.weight.shape
        normal = F.layer_norm(x, (width,), eps=self.eps).view(models, -1, width)
        weight = self.weight.unsqueeze(1)
        if self.bias is None:
            return (normal * weight).view(x.shape)
        return torch.addcmul(self.bias.unsqueeze(1), normal, weight).view(x.shape)


class StackedEmbedding(nn.Module):
    """Tables beside each other; `kept` are the only rows that anybody will ask for.

    Padding needs no care: nothing looks at it, so that its row gets no gradient in any case.
    """

    index: Tensor | None
    first: Tensor

    def __init__(
        self, table: nn.Embedding, models: int, now: Pass, kept: Tensor | None = None
    ) -> None:
        super().__init__()
        self.now = now
        self.kept = kept
        size = table.num_embeddings if kept is None else len(kept)
        index = None
        if kept is not None:
            index = torch.zeros(table.num_embeddings, dtype=torch.long, device=kept.device)
            index[kept] = torch.arange(size, device=kept.device)
        self.register_buffer("index", index, persistent=False)
        self.weight = _room(models, size, table.embedding_dim, like=table.weight)
        first = size * torch.arange(models, device=table.weight.device)
        self.register_buffer("first", first.view(-1, 1, 1), persistent=False)

    def put(self, model: int, table: nn.Embedding) -> None:
        """Take the values of a single table."""
        self.weight[model].copy_(table.weight if self.kept is None else table.weight[self.kept])

    def forward(self, ids: Int[Tensor, "rows length"]) -> Float[Tensor, "all_rows length width"]:
        """Return the vectors of the ids, each from its model's table."""
        if self.index is not None:
            ids = self.index[ids]
        # Positions may come once for all rows.
        ids = ids.expand(self.now.models * self.now.rows, -1)
        places = ids.view(self.now.models, self.now.rows, -1) + self.first
        return F.embedding(places.view(ids.shape), self.weight.flatten(0, 1))


class StackedFoldedEmbedding(StackedEmbedding):
    """Word embeddings with the three vectors of `modules.Folded`; zero where a model has none."""

    ends: Tensor
    folded: Tensor

    def __init__(
        self, table: nn.Embedding, models: int, now: Pass, kept: Tensor | None = None
    ) -> None:
        super().__init__(table, models, now, kept)
        self.fold = _room(models, 3, table.embedding_dim, like=table.weight)
        device = table.weight.device
        ends = torch.full((2, models, 1, 1), -1, device=device)
        self.register_buffer("ends", ends, persistent=False)
        self.register_buffer("folded", torch.zeros(models, 1, 1, device=device), persistent=False)

    def put(self, model: int, table: nn.Embedding) -> None:
        """Take the values of a single table."""
        super().put(model, table)
        if isinstance(table, Folded):
            self.fold[model].copy_(table.fold)
            self.folded[model] = 1.0
            self.ends[0, model], self.ends[1, model] = table.first_token_id, table.last_token_id

    def forward(self, ids: Int[Tensor, "rows length"]) -> Float[Tensor, "rows length width"]:
        """Return the vectors of the ids with what is folded into them."""
        apart = ids.view(self.now.models, self.now.rows, -1)
        first, last = self.ends
        kind = ((apart == last).long() + 2 * (apart == first).long()).clamp(max=2)
        kind = kind + 3 * (self.first // self.weight.shape[1])
        return super().forward(ids) + F.embedding(kind.view(ids.shape), self.fold.flatten(0, 1))


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return what transformers' attention interface asks for: all models attend in one call."""
    now: Pass = module.stack
    heads = query.shape[1]

    def beside(x: Tensor) -> Tensor:
        return x.unflatten(0, (now.models, now.rows)).transpose(0, 1).flatten(1, 2)

    output = attention(
        beside(query), beside(key), beside(value),
        None if now.scores is None else now.scores[now.calls],
        attn_mask=now.mask, dropout_p=dropout, scale=scaling,
    )  # fmt: skip
    assert isinstance(output, Tensor)
    now.calls += 1
    apart = output.unflatten(1, (now.models, heads)).permute(1, 0, 3, 2, 4)
    return apart.flatten(0, 1).contiguous(), None


def _room(*shape: int, like: Tensor) -> nn.Parameter:
    made = torch.zeros(shape, dtype=like.dtype, device=like.device)
    return nn.Parameter(made, requires_grad=like.requires_grad)
