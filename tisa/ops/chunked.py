"""Attention in blocks of queries: PyTorch only, any device, never an n × n tensor.

The backward pass computes each block again from what the forward pass kept of each query. Both are
operators of their own (`torch.library`), so a compiled or exported graph holds one node for any
length. A packed batch is taken one sequence at a time, for which the host must read `cu_seqlens`:
on an accelerator that is a synchronisation, and no CUDA graph can hold it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tisa.offsets import recentred
from tisa.ops.always import joined
from tisa.ops.blocks import Blocks
from tisa.ops.call import Call, transformed, without_autocast
from tisa.ops.dropout import dropout_seed
from tisa.ops.schema import refuse_second_derivative, schema_of


def refuses(call: Call) -> str | None:
    """Return why this backend cannot do the call, or None."""
    if transformed():
        # Not left to PyTorch: an operator without a jvp drops the tangent and says nothing.
        return "torch.func and forward-mode derivatives cannot look into it"
    return None


# How many of the inputs below are tensors, and to how many of these a gradient may come back.
TENSORS, GRADIENTS = 8, 6


class _Inputs(NamedTuple):
    """The inputs of the operators: tensors, then numbers."""

    query: Tensor
    key: Tensor
    value: Tensor
    vector: Tensor | None
    mask: Tensor | None
    key_scores: Tensor | None
    seed: Tensor | None
    cu_seqlens: Tensor | None
    max_seqlen: int
    query_start: int | None
    left: int | None
    right: int | None
    scale: float
    dropout_p: float


class _Upstream(NamedTuple):
    """What the backward pass is given besides the inputs."""

    grad_output: Tensor
    grad_lse: Tensor
    norms: Tensor


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """Return the attention output in the query's dtype and the log-sum-exp of the logits."""
    inputs = _Inputs(
        call.query,
        call.key,
        call.value,
        call.offset_logits(),
        call.attn_mask,
        None if call.key_scores is None else call.key_scores.to(call.dtype),
        dropout_seed(call.query) if call.dropout_p > 0 else None,
        call.cu_seqlens,
        call.max_seqlen,
        None if isinstance(call.query_start, Tensor) else call.query_start,
        *call.reach,
        call.scale,
        call.dropout_p,
    )
    output, lse, _ = _forward(*inputs)
    return (output, lse) if call.always is None else joined(call, output, lse)


@torch.library.custom_op("tisa::chunked_forward", mutates_args=(), schema=schema_of(3, _Inputs))
def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs = _Inputs(*arguments)
    output, lse, norms = _new_outputs(inputs.query, inputs.value)
    with without_autocast(inputs.query.device):
        for part in _sequences(inputs):
            part.blocks(inputs).forward(part.cut(output), part.cut(lse), part.cut(norms))
    return output, lse, norms


@torch.library.custom_op(
    "tisa::chunked_backward",
    mutates_args=(),
    schema=schema_of(GRADIENTS, _Upstream, _Inputs, needs=list[bool]),
)
def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    (grad_output, grad_lse, norms), inputs = _Upstream(*arguments[:3]), _Inputs(*arguments[3:-1])
    needs = arguments[-1]
    gradients = _new_gradients(inputs, needs)
    with without_autocast(inputs.query.device):
        # The log-sum-exp of a blind query is −inf: whatever comes back through it goes nowhere.
        grad_lse = grad_lse.masked_fill(norms[..., 1] == 0, 0.0)
        for part in _sequences(inputs):
            cuts = (part.cut, part.cut, part.cut, part.cut_vector, _whole, part.cut)
            wanted = [
                cut(gradient) if need else None
                for cut, gradient, need in zip(cuts, gradients, needs, strict=True)
            ]
            upstream = (part.cut(grad_output), part.cut(grad_lse), part.cut(norms))
            part.blocks(inputs).backward(*upstream, *wanted)
    return gradients


def _whole(mask: Tensor) -> Tensor:
    return mask


def _new_outputs(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(query.dtype, torch.float32)
    output = query.new_zeros(*query.shape[:-1], value.shape[-1])
    lse = query.new_full(query.shape[:-1], -torch.inf, dtype=dtype)
    # For each query the largest logit and the sum of exp(logit − largest). Their sum, the
    # log-sum-exp, would do for the backward pass, but rounds away digits when logits are large.
    norms = query.new_zeros(*query.shape[:-1], 2, dtype=dtype)
    return output, lse, norms


def _new_gradients(inputs: _Inputs, needs: list[bool]) -> tuple[Tensor, ...]:
    def zeros(like: Tensor | None, need: bool) -> Tensor:
        # An operator cannot return "no tensor"; an empty one stands for it.
        if like is None or not need:
            return inputs.query.new_zeros(0)
        # A mask's are sums over heads and queries: added up in float32, whatever its dtype.
        dtype = (
            torch.promote_types(like.dtype, torch.float32) if like is inputs.mask else like.dtype
        )
        return like.new_zeros(like.shape, dtype=dtype)

    given = (inputs.query, inputs.key, inputs.value, inputs.vector, inputs.mask, inputs.key_scores)
    return tuple(map(zeros, given, needs))


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs = _Inputs(*arguments)
    return _new_outputs(inputs.query, inputs.value)


@_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return _new_gradients(_Inputs(*arguments[3:-1]), arguments[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[2], *inputs[:TENSORS])
    ctx.rest = inputs[TENSORS:]


def _differentiate(
    ctx: Any, grad_output: Tensor, grad_lse: Tensor, _: Tensor
) -> tuple[Tensor | None, ...]:
    needs = [bool(need) for need in ctx.needs_input_grad[:GRADIENTS]]
    gradients = _backward(grad_output, grad_lse, *ctx.saved_tensors, *ctx.rest, needs)
    if needs[4]:
        gradients = (*gradients[:4], gradients[4].to(ctx.saved_tensors[5].dtype), *gradients[5:])
    wanted = [g if need else None for g, need in zip(gradients, needs, strict=True)]
    return (*wanted, *[None] * (len(_Inputs._fields) - GRADIENTS))


_forward.register_autograd(_differentiate, setup_context=_save)


refuse_second_derivative(_backward, "chunked")


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

    def blocks(self, inputs: _Inputs) -> Blocks:
        """Return the blocks of this part."""
        return Blocks(
            query=self.cut(inputs.query),
            key=self.cut(inputs.key),
            value=self.cut(inputs.value),
            vector=self.cut_vector(inputs.vector),
            mask=inputs.mask,
            key_scores=None if inputs.key_scores is None else self.cut(inputs.key_scores),
            seed=inputs.seed,
            first_token=self.first_token,
            query_start=self.query_start,
            window=(inputs.left, inputs.right),
            scale=inputs.scale,
            dropout_p=inputs.dropout_p,
        )


def _sequences(inputs: _Inputs) -> Iterator[_Part]:
    if inputs.cu_seqlens is None:
        yield _Part(0, None, inputs.max_seqlen, inputs.query_start)
        return
    # The one place where the host waits for the device: a loop needs to know where it ends.
    for first, last in pairwise(inputs.cu_seqlens.tolist()):
        if last > first:
            yield _Part(first, last - first, inputs.max_seqlen, 0)
