"""Many models of one architecture as one batched model, to be trained side by side.

Every linear map, norm and embedding gets a leading axis for the models, so that a batched matrix
product does the work of many small ones. Hidden states are (models · rows, length, width); in the
attention the models lie beside each other in the head axis, so that one call of `tisa.attention`
has the scores of all. No number of one model meets one of another: a model that diverges leaves
the others as they are.

Models may have positions or none, folded vectors or none, and different numbers of kernels: what
a model lacks is zero and gets no gradient.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from tisa.hf import families
from tisa.hf.core import Folded
from tisa.ops import attention
from tisa.parameters import weight_groups
from tisa.scoring import TISA
from tisa.shapes import Bool, Float, Int, Tensor

STACKABLE = ["albert", "bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta"]
IMPLEMENTATION = "tisa|stack"


def reason_against_stacking(config: Any) -> str | None:
    """Return why models of this config cannot be stacked, or None where they can."""
    if config.model_type not in STACKABLE:
        return f"it is a {config.model_type}, and these are known: {', '.join(STACKABLE)}"
    if getattr(config, "is_decoder", False):
        return "it is set up as a decoder"
    return None


class Stack(nn.Module):
    """Models of one architecture, side by side; give them their weights with `put`.

    Args:
        template: a stock model with a classification head, on its device; it stays as it was.
        models: how many.
        num_kernels: the largest S among them.
        fold: whether any of them has folded vectors.
        kept: token ids that occur; the other rows of the word embeddings are left out. They could
            only decay, and nobody would see it.
    """

    def __init__(
        self,
        template: PreTrainedModel,
        models: int,
        *,
        num_kernels: int,
        fold: bool,
        kept: Int[Tensor, " tokens"] | None = None,
    ) -> None:
        super().__init__()
        self._trained: Tensor
        self._placed: Tensor
        reason = reason_against_stacking(template.config)
        if reason is not None:
            raise ValueError(f"Stack: models like this cannot be trained side by side: {reason}")
        self.models = models
        self._decay = _decayed(template)
        self._now = Pass(models)
        self._heads = families.num_heads(families.attention_modules(template)[0], template.config)
        # In the order of the calls: ALBERT passes many times through one module, with own scores.
        names = {id(module): name for name, module in template.named_modules()}
        calls = families.attention_calls(template)
        self._calls = [(names[id(module)], number) for module, number in calls]
        self.scoring = None
        if num_kernels > 0:
            self.scoring = TISA(models * len(self._calls) * self._heads, num_kernels, init="zero")
            self.scoring.to(template.device)
            for p in self.scoring.parameters():
                nn.init.zeros_(p)
            trained = torch.zeros_like(self.scoring.kernel_amplitudes)
            self.register_buffer("_trained", trained, persistent=False)
        self.inner = copy.deepcopy(template)
        table = families.position_table(self.inner)
        words = self.inner.get_input_embeddings()
        for parent in list(self.inner.modules()):
            for name, module in list(parent.named_children()):
                made = self._stacked(module, words, fold, kept)
                if made is not None:
                    setattr(parent, name, made)
        for module in families.attention_modules(self.inner):
            module.stack = self._now
        self._table = None if table is None else getattr(table.parent, table.name)
        placed = torch.zeros(models, 1, 1, device=template.device)
        self.register_buffer("_placed", placed, persistent=False)
        self._held = self._partly_trained()
        self.inner.config._attn_implementation = IMPLEMENTATION
        AttentionInterface.register(IMPLEMENTATION, attend)

    def _stacked(self, module: Any, words: Any, fold: bool, kept: Tensor | None) -> Any:
        if type(module) is nn.Linear:
            return StackedLinear(module, self.models)
        if type(module) is nn.LayerNorm and module.weight is not None:
            return StackedLayerNorm(module, self.models)
        if type(module) is nn.Embedding and module.max_norm is None:
            if module is not words:
                return StackedEmbedding(module, self.models, self._now)
            kind = StackedFoldedEmbedding if fold else StackedEmbedding
            return kind(module, self.models, self._now, kept)
        if next(module.parameters(recurse=False), None) is not None:
            raise ValueError(
                "Stack: models like this cannot be trained side by side: a "
                f"{type(module).__name__} has parameters, and only Linear, LayerNorm and Embedding "
                "are known"
            )
        return None

    @torch.no_grad()
    def put(self, index: int, model: PreTrainedModel) -> None:
        """Give the model of that number its weights: those of a stock or of a converted model."""
        for name, module in self.inner.named_modules():
            if module is self._table and self._table is not None:
                table = families.position_table(model)
                if table is not None:
                    self._table.put(index, table.embedding)
                    self._placed[index] = 1.0
            elif isinstance(module, StackedLinear | StackedLayerNorm | StackedEmbedding):
                module.put(index, model.get_submodule(name))
        if self.scoring is None or not hasattr(model.config, "tisa"):
            return
        shape = (self.models, len(self._calls), self._heads, -1)
        trained = self._trained.view(shape)[index]
        for call, (name, number) in enumerate(self._calls):
            scoring = model.get_submodule(name).offset_scores[number]
            for kind in ("kernel_amplitudes", "kernel_sharpness", "kernel_offsets"):
                given = getattr(scoring, kind)
                mine = getattr(self.scoring, kind).view(shape)[index, call]
                mine[:, : given.shape[1]].copy_(given)
                trained[call, :, : given.shape[1]] = float(given.requires_grad)

    def forward(
        self,
        input_ids: Int[Tensor, "either rows length"],
        mask: Bool[Tensor, "either rows length"] | None = None,
        **more: Int[Tensor, "either rows length"],
    ) -> Float[Tensor, "models rows labels"]:
        """Return the logits of every model.

        `either` is the number of models, or 1 where all are given the same rows. `mask`: what is
        no padding; None where there is none.
        """
        now = self._now
        _, now.rows, length = input_ids.shape
        now.mask = None if mask is None else self._mask(mask)
        now.calls, now.scores = 0, None
        if self.scoring is not None:
            shape = (self.models, len(self._calls), -1, 2 * length - 1)
            vectors = self.scoring(length).view(shape)
            now.scores = [part.flatten(0, 1) for part in vectors.unbind(1)]
        flat = {
            name: ids.expand(self.models, -1, -1).reshape(self.models * now.rows, length)
            for name, ids in {"input_ids": input_ids, **more}.items()
        }
        logits: Tensor = self.inner(**flat).logits
        assert now.calls == len(self._calls)
        return logits.view(self.models, now.rows, -1)

    def _mask(self, mask: Tensor) -> Tensor:
        """Return the mask as the attention takes it: models beside each other in the head axis."""
        if mask.shape[0] == 1:
            return mask[0, :, None, None, :]
        beside = mask.transpose(0, 1).unsqueeze(2).expand(-1, -1, self._heads, -1)
        return beside.flatten(1, 2).unsqueeze(2)

    def groups(
        self, *, lr: float, scores_lr: float | None = None, weight_decay: float = 0.0
    ) -> list[dict[str, Any]]:
        """Return groups for an optimiser: those of `tisa.hf.parameter_groups` for each model."""
        decayed: list[nn.Parameter] = []
        undecayed: list[nn.Parameter] = []
        scores: list[nn.Parameter] = list(self.scoring.parameters()) if self.scoring else []
        for name, parameter in self.inner.named_parameters():
            if name.endswith(".fold"):
                scores.append(parameter)
            elif parameter.requires_grad:
                (decayed if name in self._decay else undecayed).append(parameter)
        own = 10 * lr if scores_lr is None else scores_lr
        groups = ((decayed, lr, weight_decay), (undecayed, lr, 0.0), (scores, own, 0.0))
        return [{"params": p, "lr": rate, "weight_decay": w} for p, rate, w in groups if p]

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> Float[Tensor, " models"]:
        """Return the norm of each model's gradient, which is then at most `max_norm`.

        The gradient of what a model does not have, or does not train, becomes 0 before.
        """
        for parameter, mask in self._held:
            if parameter.grad is not None:
                parameter.grad.mul_(mask)
        grads = [
            # The scores have models and heads in one axis.
            p.grad.unflatten(0, (self.models, -1))
            for p in self.parameters()
            if p.grad is not None
        ]
        norms = [torch.linalg.vector_norm(g, dim=tuple(range(1, g.ndim))) for g in grads]
        total = torch.linalg.vector_norm(torch.stack(norms), dim=0)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, [factor.view(-1, *[1] * (g.ndim - 1)) for g in grads])
        return total

    def _partly_trained(self) -> list[tuple[Any, Tensor]]:
        """Return the parameters that not all models have or train, and what is 1 where they do."""
        held: list[tuple[Any, Tensor]] = []
        if self.scoring is not None:
            held += [(p, self._trained) for p in self.scoring.parameters()]
        if self._table is not None:
            held.append((self._table.weight, self._placed))
        folds = (m for m in self.modules() if isinstance(m, StackedFoldedEmbedding))
        return held + [(m.fold, m.folded) for m in folds]


def _decayed(model: PreTrainedModel) -> set[str]:
    """Return the names of the parameters that decay in a single model."""
    names = {id(p): name for name, p in model.named_parameters()}
    groups = weight_groups(model, lr=1.0, weight_decay=1.0)
    return {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}


@dataclass
class Pass:
    """What the modules of a stack have to know of the pass that is being made."""

    models: int
    rows: int = 0
    mask: Tensor | None = None
    # Scores of each attention in the order in which they are called, (models · heads, span).
    scores: list[Tensor] | None = None
    calls: int = 0


class StackedLinear(nn.Module):
    """A linear map for each model, as one batched matrix product."""

    def __init__(self, linear: nn.Linear, models: int) -> None:
        super().__init__()
        self.weight = _room(models, linear.in_features, linear.out_features, like=linear.weight)
        self.bias = _room_for_bias(models, linear)

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
            return torch.bmm(rows, self.weight).view(*x.shape[:-1], other)
        made = torch.baddbmm(self.bias.unsqueeze(1), rows, self.weight)
        return made.view(*x.shape[:-1], other)


class StackedLayerNorm(nn.Module):
    """A norm for each model."""

    def __init__(self, norm: nn.LayerNorm, models: int) -> None:
        super().__init__()
        self.eps = norm.eps
        (width,) = norm.normalized_shape
        self.weight = _room(models, width, like=norm.weight)
        self.bias = _room_for_bias(models, norm)

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
            index = kept.new_zeros(table.num_embeddings)
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
    """Word embeddings with the three vectors of `Folded`; zero where a model has none."""

    ends: Tensor
    folded: Tensor

    def __init__(
        self, table: nn.Embedding, models: int, now: Pass, kept: Tensor | None = None
    ) -> None:
        super().__init__(table, models, now, kept)
        self.fold = _room(models, 3, table.embedding_dim, like=table.weight)
        ends = torch.full((2, models, 1, 1), -1, device=table.weight.device)
        self.register_buffer("ends", ends, persistent=False)
        self.register_buffer("folded", self.fold.new_zeros(models, 1, 1), persistent=False)

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


def _room_for_bias(models: int, module: Any) -> nn.Parameter | None:
    return None if module.bias is None else _room(models, len(module.bias), like=module.bias)
