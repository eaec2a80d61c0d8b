"""Attention in blocks of queries: PyTorch only, any device, never an n × n tensor.

A block holds some queries of some heads against all the keys they may see. The backward pass
computes each block again from the saved log-sum-exp. Forward and backward are operators of their
own (`torch.library`), so a compiled or exported graph holds one node for any length.

Unusual: queries run backwards inside a block, last one first. Upside down, the block of the
Toeplitz matrix is a view of the score vector (`offsets.block_view`), and its gradient is a sum over
the rows of a sheared view (`offsets.add_block_diagonals`): neither is ever written out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tisa.attention.call import Call
from tisa.attention.dropout import dropout_seed, kept, kept_scale
from tisa.offsets import add_block_diagonals, block_view

# (logits, queries) of a block. Enough for fast matrix products; on a CPU few enough for its cache,
# on an accelerator enough to outweigh the launches (docs/log.md).
_CPU_BLOCK = (2**21, 128)
_ACCELERATOR_BLOCK = (2**25, 256)


def refuses(call: Call) -> str | None:
    """Return why this backend cannot do the call, or None."""
    if call.needs_gradient("attn_mask"):
        return "it computes no gradient for attn_mask"
    return None


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """Return the attention output in the query's dtype and the log-sum-exp of the logits."""
    output, lse, _ = _forward(
        call.query,
        call.key,
        call.value,
        call.offset_logits(),
        call.attn_mask,
        dropout_seed(call.query) if call.dropout_p > 0 else None,
        call.cu_seqlens,
        call.max_seqlen,
        # A start that only the device knows cannot narrow the keys of a block; the −inf in the
        # vector hides them all the same.
        None if isinstance(call.query_start, Tensor) else call.query_start,
        *call.reach,
        call.scale,
        call.dropout_p,
    )
    return output, lse


@torch.library.custom_op("tisa::chunked_forward", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    vector: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    query_start: int | None,
    left: int | None,
    right: int | None,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    output, lse, norms = _new_outputs(query, value)
    with torch.autocast(query.device.type, enabled=False):
        for part in _sequences(cu_seqlens, max_seqlen, query_start):
            dense = _Dense(
                part.cut(query), part.cut(key), part.cut(value), part.cut_vector(vector), mask,
                seed, part.first_token, part.query_start, left, right, scale, dropout_p,
            )  # fmt: skip
            dense.forward(part.cut(output), part.cut(lse), part.cut(norms))
    return output, lse, norms


@torch.library.custom_op("tisa::chunked_backward", mutates_args=())
def _backward(
    grad_output: Tensor,
    grad_lse: Tensor,
    output: Tensor,
    norms: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    vector: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    query_start: int | None,
    left: int | None,
    right: int | None,
    scale: float,
    dropout_p: float,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gradients = _new_gradients(query, key, value, vector, needs)
    with torch.autocast(query.device.type, enabled=False):
        # For each query: Σ_j P_ij · dP_ij, from the output alone.
        delta = (grad_output.to(norms.dtype) * output.to(norms.dtype)).sum(-1) - grad_lse
        for part in _sequences(cu_seqlens, max_seqlen, query_start):
            dense = _Dense(
                part.cut(query), part.cut(key), part.cut(value), part.cut_vector(vector), mask,
                seed, part.first_token, part.query_start, left, right, scale, dropout_p,
            )  # fmt: skip
            wanted = [
                (part.cut_vector if i == 3 else part.cut)(gradient) if need else None
                for i, (gradient, need) in enumerate(zip(gradients, needs, strict=True))
            ]
            dense.backward(part.cut(grad_output), part.cut(norms), part.cut(delta), *wanted)
    return gradients


def _new_outputs(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(query.dtype, torch.float32)
    output = query.new_zeros(*query.shape[:-1], value.shape[-1])
    lse = query.new_full(query.shape[:-1], -torch.inf, dtype=dtype)
    # For each query the largest logit and the sum of exp(logit − largest). Their sum, the
    # log-sum-exp, would do for the backward pass, but rounds away digits when logits are large.
    norms = query.new_zeros(*query.shape[:-1], 2, dtype=dtype)
    return output, lse, norms


def _new_gradients(
    query: Tensor, key: Tensor, value: Tensor, vector: Tensor | None, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def zeros(like: Tensor | None, need: bool) -> Tensor:
        # An operator cannot return "no tensor"; an empty one stands for it.
        if like is None or not need:
            return query.new_zeros(0)
        return like.new_zeros(like.shape)

    query_need, key_need, value_need, vector_need = needs
    return (
        zeros(query, query_need),
        zeros(key, key_need),
        zeros(value, value_need),
        zeros(vector, vector_need),
    )


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _new_outputs(query, value)


@_backward.register_fake
def _(
    grad_output: Tensor, grad_lse: Tensor, output: Tensor, norms: Tensor, query: Tensor,
    key: Tensor, value: Tensor, vector: Tensor | None, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _new_gradients(query, key, value, vector, rest[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, max_seqlen, query_start, left, right, scale, dropout_p = inputs
    ctx.save_for_backward(output[0], output[2], *tensors)
    ctx.rest = (max_seqlen, query_start, left, right, scale, dropout_p)


def _differentiate(
    ctx: Any, grad_output: Tensor, grad_lse: Tensor, _: Tensor
) -> tuple[Tensor | None, ...]:
    needs = [bool(need) for need in ctx.needs_input_grad[:4]]
    gradients = _backward(grad_output, grad_lse, *ctx.saved_tensors, *ctx.rest, needs)
    wanted = [g if need else None for g, need in zip(gradients, needs, strict=True)]
    return (*wanted, *[None] * 9)


_forward.register_autograd(_differentiate, setup_context=_save)


@dataclass
class _Part:
    """One sequence of a packed batch, or a whole batch of equally long sequences."""

    first_token: int
    length: int | None
    max_seqlen: int
    query_start: int | None

    def cut(self, tensor: Tensor) -> Tensor:
        """Return this part of a tensor as (batch, heads, length, …): a view."""
        if self.length is None:
            return tensor
        return tensor.narrow(0, self.first_token, self.length).transpose(0, 1).unsqueeze(0)

    def cut_vector(self, vector: Tensor | None) -> Tensor | None:
        if vector is None or self.length is None:
            return vector
        return vector.narrow(1, self.max_seqlen - self.length, 2 * self.length - 1)


def _sequences(
    cu_seqlens: Tensor | None, max_seqlen: int, query_start: int | None
) -> Iterator[_Part]:
    if cu_seqlens is None:
        yield _Part(0, None, max_seqlen, query_start)
        return
    ends = cu_seqlens.tolist()
    for first, last in pairwise(ends):
        if last > first:
            yield _Part(first, last - first, max_seqlen, 0)


@dataclass
class _Block:
    """Queries [i0, i1) of heads [h0, h1) in batch [b0, b1), against keys [j0, j1)."""

    b0: int
    b1: int
    h0: int
    h1: int
    i0: int
    i1: int
    j0: int
    j1: int


@dataclass
class _Dense:
    """Equally long sequences: (batch, heads, length, dim)."""

    query: Tensor
    key: Tensor
    value: Tensor
    vector: Tensor | None
    mask: Tensor | None
    seed: Tensor | None
    first_token: int
    query_start: int | None
    left: int | None
    right: int | None
    scale: float
    dropout_p: float

    def __post_init__(self) -> None:
        self.dtype = torch.promote_types(self.query.dtype, torch.float32)
        self.batch, heads, self.queries, _ = self.query.shape
        self.key_heads, self.keys = self.key.shape[1:3]
        self.group = heads // max(1, self.key_heads)
        # A lane is one key head of one sequence; a block takes consecutive lanes.
        self.key_lanes = self.key.to(self.dtype).flatten(0, 1)
        self.value_lanes = self.value.to(self.dtype).flatten(0, 1)
        self.scratch: dict[str, Tensor] = {}

    def blocks(self) -> Iterator[_Block]:
        on_cpu = self.query.device.type == "cpu"
        elements, rows = _CPU_BLOCK if on_cpu else _ACCELERATOR_BLOCK
        rows = min(self.queries, rows)
        width = self.keys
        if self.query_start is not None and self.left is not None and self.right is not None:
            width = min(width, max(1, rows + self.left + self.right))
        lanes = max(1, elements // max(1, rows * self.group * width))
        head_step = min(lanes, self.key_heads)
        batch_step = max(1, lanes // max(1, self.key_heads))
        for b0 in range(0, self.batch, batch_step):
            for h0 in range(0, self.key_heads, head_step):
                for i0 in range(0, self.queries, rows):
                    i1 = min(i0 + rows, self.queries)
                    j0, j1 = 0, self.keys
                    if self.query_start is not None and self.left is not None:
                        j0 = max(0, i0 + self.query_start - self.left)
                    if self.query_start is not None and self.right is not None:
                        j1 = min(self.keys, i1 + self.query_start + self.right)
                    if j0 < j1:
                        yield _Block(
                            b0,
                            min(b0 + batch_step, self.batch),
                            h0,
                            min(h0 + head_step, self.key_heads),
                            i0, i1, j0, j1,
                        )  # fmt: skip

    def space(self, name: str, *shape: int) -> Tensor:
        """Return uninitialised memory that the next block uses again."""
        needed = torch.Size(shape).numel()
        if name not in self.scratch or self.scratch[name].numel() < needed:
            self.scratch[name] = torch.empty(needed, dtype=self.dtype, device=self.query.device)
        return self.scratch[name][:needed].view(shape)

    def rows(self, tensor: Tensor, block: _Block) -> Tensor:
        """Return a block's rows of a (batch, heads, queries, …) tensor, last row first."""
        heads = slice(block.h0 * self.group, block.h1 * self.group)
        part = tensor[block.b0 : block.b1, heads, block.i0 : block.i1]
        return part.flip(2).to(self.dtype)

    def lanes(self, part: Tensor) -> Tensor:
        """Return (batch, heads, rows, dim) as (lanes, group · rows, dim)."""
        return part.reshape(-1, self.group * part.shape[2], part.shape[-1])

    def keys_of(self, lanes: Tensor, block: _Block) -> Tensor:
        first = block.b0 * self.key_heads + block.h0
        count = (block.b1 - block.b0) * (block.h1 - block.h0)
        return lanes[first : first + count, block.j0 : block.j1]

    def heads_of(self, vector: Tensor, block: _Block) -> Tensor:
        if vector.shape[0] == 1:
            return vector
        return vector[block.h0 * self.group : block.h1 * self.group]

    def logits(self, block: _Block, query: Tensor) -> Tensor:
        """Return the logits of a block, (batch, heads, rows, keys), last row first."""
        rows, keys = block.i1 - block.i0, block.j1 - block.j0
        lanes = self.space("logits", query.shape[0], query.shape[1], keys)
        torch.bmm(query, self.keys_of(self.key_lanes, block).transpose(1, 2), out=lanes)
        logits = lanes.view(block.b1 - block.b0, -1, rows, keys)
        if self.vector is not None:
            logits += block_view(
                self.heads_of(self.vector, block),
                self.queries,
                (block.i0, block.i1),
                (block.j0, block.j1),
            )
        if self.mask is not None:
            part = self.mask
            heads = (block.h0 * self.group, block.h1 * self.group)
            cuts = ((block.b0, block.b1), heads, (block.i0, block.i1), (block.j0, block.j1))
            for axis, (first, last) in enumerate(cuts):
                if part.shape[axis] != 1:
                    part = part.narrow(axis, first, last - first)
            part = part.flip(2)
            if part.dtype == torch.bool:
                logits.masked_fill_(~part, -torch.inf)
            else:
                logits += part
        return logits

    def dropped(self, block: _Block) -> Tensor:
        """Return which weights of a block dropout sets to 0."""
        assert self.seed is not None

        def index(first: int, last: int) -> Tensor:
            return torch.arange(first, last, device=self.query.device)

        return ~kept(
            self.seed,
            self.dropout_p,
            batch=index(block.b0, block.b1),
            head=index(block.h0 * self.group, block.h1 * self.group),
            query=index(block.i0, block.i1).flip(0) + self.first_token,
            key=index(block.j0, block.j1) + self.first_token,
        )

    def forward(self, output: Tensor, lse: Tensor, norms: Tensor) -> None:
        """Fill the results; those of queries that see nothing are left as they are."""
        for block in self.blocks():
            query = self.lanes(self.rows(self.query, block)) * self.scale
            logits = self.logits(block, query)
            peak = logits.amax(-1, keepdim=True)
            peak.masked_fill_(peak == -torch.inf, 0.0)
            weights = logits.sub_(peak).exp_()
            total = weights.sum(-1, keepdim=True)
            if self.seed is not None:
                weights.masked_fill_(self.dropped(block), 0.0)
            lanes = weights.view(*query.shape[:2], -1)
            mixed = torch.bmm(lanes, self.keys_of(self.value_lanes, block))
            mixed = mixed.view(*weights.shape[:3], -1)
            # A blind query has total 0 and, so, mixed 0.
            mixed *= kept_scale(self.dropout_p) / total.masked_fill(total == 0, 1.0)
            self._store(output, block, mixed)
            self._store(lse, block, (peak + total.log()).squeeze(-1))
            self._store(norms, block, torch.cat((peak, total), dim=-1))

    def backward(
        self,
        grad_output: Tensor,
        norms: Tensor,
        delta: Tensor,
        grad_query: Tensor | None,
        grad_key: Tensor | None,
        grad_value: Tensor | None,
        grad_vector: Tensor | None,
    ) -> None:
        """Fill those gradients that are not None."""
        key_total = torch.zeros_like(self.key_lanes) if grad_key is not None else None
        value_total = torch.zeros_like(self.value_lanes) if grad_value is not None else None
        logits_wanted = any(g is not None for g in (grad_query, grad_key, grad_vector))
        for block in self.blocks():
            query = self.lanes(self.rows(self.query, block)) * self.scale
            peak, total = self.rows(norms, block).split(1, dim=-1)
            # Weights are left unnormalised; what they are multiplied by is divided instead, which
            # is a row and not a block. A blind query has weights 0 and total 0.
            total = total.masked_fill(total == 0, 1.0)
            upstream = self.lanes(self.rows(grad_output, block) / total)
            weights = self.logits(block, query).sub_(peak).exp_()
            rows, keys = weights.shape[2:]
            dropped = self.dropped(block) if self.seed is not None else None
            if value_total is not None:
                used = weights
                if dropped is not None:
                    used = weights.masked_fill(dropped, 0.0).mul_(kept_scale(self.dropout_p))
                used_lanes = used.view(*query.shape[:2], keys)
                self.keys_of(value_total, block).baddbmm_(used_lanes.transpose(1, 2), upstream)
            if not logits_wanted:
                continue
            by_weight = self.space("by_weight", *query.shape[:2], keys)
            values = self.keys_of(self.value_lanes, block)
            torch.bmm(upstream, values.transpose(1, 2), out=by_weight)
            by_weight = by_weight.view(weights.shape)
            if dropped is not None:
                by_weight.masked_fill_(dropped, 0.0).mul_(kept_scale(self.dropout_p))
            by_weight -= self.rows(delta, block).unsqueeze(-1) / total
            # Rows of zeros on the right let the diagonals be summed without another copy.
            padded = self.space("by_logit", *weights.shape[:3], keys + rows)
            padded[..., keys:].zero_()
            torch.mul(weights, by_weight, out=padded[..., :keys])
            by_logit = padded.view(*query.shape[:2], keys + rows)[..., :keys]
            if key_total is not None:
                self.keys_of(key_total, block).baddbmm_(by_logit.transpose(1, 2), query)
            if grad_query is not None:
                found = torch.bmm(by_logit, self.keys_of(self.key_lanes, block)) * self.scale
                self._store(grad_query, block, found.view(*weights.shape[:3], -1))
            if grad_vector is not None:
                add_block_diagonals(
                    self.heads_of(grad_vector, block),
                    padded,
                    self.queries,
                    (block.i0, block.i1),
                    (block.j0, block.j1),
                )
        if grad_key is not None and key_total is not None:
            grad_key.copy_(key_total.view(grad_key.shape))
        if grad_value is not None and value_total is not None:
            grad_value.copy_(value_total.view(grad_value.shape))

    def _store(self, target: Tensor, block: _Block, rows: Tensor) -> None:
        heads = slice(block.h0 * self.group, block.h1 * self.group)
        target[block.b0 : block.b1, heads, block.i0 : block.i1] = rows.flip(2)
