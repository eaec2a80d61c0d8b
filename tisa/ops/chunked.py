"""Attention in blocks of queries: PyTorch only, any device, never an n × n tensor.

The backward pass computes each block again from what the forward pass kept of each query. Both are
operators of their own (`torch.library`), so a compiled or exported graph holds one node for any
length. A packed batch is taken one sequence at a time, for which the host must read `cu_seqlens`:
on an accelerator that is a synchronisation, and no CUDA graph can hold it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor

from tisa.offsets import Window, recentred
from tisa.ops.blocks import Blocks
from tisa.ops.call import Call
from tisa.ops.context import needs_gradient, transformed, without_autocast
from tisa.ops.dropout import dropout_seed


def refuses(call: Call) -> str | None:
    """Return why this backend cannot do the call, or None."""
    if needs_gradient(call.attn_mask):
        return "it computes no gradient for attn_mask"
    if transformed():
        # Not left to PyTorch: an operator without a jvp drops the tangent and says nothing.
        return "torch.func and forward-mode derivatives cannot look into it"
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
    with without_autocast(query.device):
        for part in _sequences(cu_seqlens, max_seqlen, query_start):
            blocks = part.blocks(
                query, key, value, vector, mask, seed, (left, right), scale, dropout_p
            )
            blocks.forward(part.cut(output), part.cut(lse), part.cut(norms))
    return output, lse, norms


@torch.library.custom_op("tisa::chunked_backward", mutates_args=())
def _backward(
    grad_output: Tensor,
    grad_lse: Tensor,
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
    with without_autocast(query.device):
        # The log-sum-exp of a blind query is −inf: whatever comes back through it goes nowhere.
        grad_lse = grad_lse.masked_fill(norms[..., 1] == 0, 0.0)
        for part in _sequences(cu_seqlens, max_seqlen, query_start):
            blocks = part.blocks(
                query, key, value, vector, mask, seed, (left, right), scale, dropout_p
            )
            wanted = [
                (part.cut_vector if i == 3 else part.cut)(gradient) if need else None
                for i, (gradient, need) in enumerate(zip(gradients, needs, strict=True))
            ]
            blocks.backward(part.cut(grad_output), part.cut(grad_lse), part.cut(norms), *wanted)
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
    grad_output: Tensor, grad_lse: Tensor, norms: Tensor, query: Tensor, key: Tensor,
    value: Tensor, vector: Tensor | None, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _new_gradients(query, key, value, vector, rest[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, max_seqlen, query_start, left, right, scale, dropout_p = inputs
    ctx.save_for_backward(output[2], *tensors)
    ctx.rest = (max_seqlen, query_start, left, right, scale, dropout_p)


def _differentiate(
    ctx: Any, grad_output: Tensor, grad_lse: Tensor, _: Tensor
) -> tuple[Tensor | None, ...]:
    needs = [bool(need) for need in ctx.needs_input_grad[:4]]
    gradients = _backward(grad_output, grad_lse, *ctx.saved_tensors, *ctx.rest, needs)
    wanted = [g if need else None for g, need in zip(gradients, needs, strict=True)]
    return (*wanted, *[None] * 9)


_forward.register_autograd(_differentiate, setup_context=_save)


def _no_second_derivative(ctx: Any, *gradients: Tensor) -> NoReturn:
    raise RuntimeError(
        'tisa.attention: backend "chunked" has no second derivative; take backend="reference"'
    )


_backward.register_autograd(_no_second_derivative)


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
        """Return this part of a vector of the longest sequence's offsets: a view."""
        if vector is None or self.length is None:
            return vector
        return recentred(vector, self.max_seqlen, self.length)

    def blocks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        vector: Tensor | None,
        mask: Tensor | None,
        seed: Tensor | None,
        window: Window,
        scale: float,
        dropout_p: float,
    ) -> Blocks:
        """Return the blocks of this part."""
        return Blocks(
            query=self.cut(query),
            key=self.cut(key),
            value=self.cut(value),
            vector=self.cut_vector(vector),
            mask=mask,
            seed=seed,
            first_token=self.first_token,
            query_start=self.query_start,
            window=window,
            scale=scale,
            dropout_p=dropout_p,
        )


def _sequences(
    cu_seqlens: Tensor | None, max_seqlen: int, query_start: int | None
) -> Iterator[_Part]:
    if cu_seqlens is None:
        yield _Part(0, None, max_seqlen, query_start)
        return
    # The one place where the host waits for the device: a loop needs to know where it ends.
    ends = cu_seqlens.tolist()
    for first, last in pairwise(ends):
        if last > first:
            yield _Part(first, last - first, max_seqlen, 0)
