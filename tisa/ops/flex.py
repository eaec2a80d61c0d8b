"""PyTorch's FlexAttention, compiled; the score vector is gathered inside its kernel.

One gather of one vector: FlexAttention refuses in the backward pass to index a tensor that needs a
gradient twice. Its gradient of the vector is summed by atomics: not deterministic on a GPU.
"""

import shutil
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from tisa.offsets import Window, entry_of, offset_of
from tisa.ops.call import Call, hiding, needs_gradient, transformed
from tisa.shapes import Float, Tensor

# With a captured vector the default tiles need more shared memory than an H100 or H200 has.
_GPU_TILES = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_stages": 2, "bwd_num_stages": 1}


def refuses(call: Call) -> str | None:
    """Return why this backend cannot do the call, or None."""
    device = call.query.device.type
    if call.dropout_p > 0:
        return "FlexAttention has no dropout"
    if call.always is not None:
        return "it has no keys that a window does not hide"
    if call.query.dtype == torch.float64:
        return "FlexAttention's kernels do not compute in float64"
    if transformed():
        return "torch.func and forward-mode derivatives cannot look into it"
    if needs_gradient(call.attn_mask):
        return "it computes no gradient for attn_mask"
    if device == "cpu":
        if needs_gradient(call.query, call.key, call.value, call.scores, call.key_scores):
            return "FlexAttention computes no gradients on the CPU"
        if call.return_lse:
            return "FlexAttention returns no log-sum-exp on the CPU"
        if not torch.compiler.is_compiling() and not _has_compiler():
            return "on the CPU it needs a C++ compiler"
    elif device not in ("cuda", "xpu"):
        return f"it is not tried on the device {device!r}"
    elif min(call.query.shape[-1], call.value.shape[-1]) < 16:
        return "on a GPU FlexAttention needs heads at least 16 wide"
    return None


def attend(
    call: Call,
) -> tuple[
    Float[Tensor, "*batch_heads queries value_dim"], Float[Tensor, "*batch_heads queries"] | None
]:
    """Return the attention output in the query's dtype and, if asked for, the log-sum-exp."""
    query, key, value = call.query, call.key, call.value
    on_gpu = query.device.type != "cpu"
    flex = _compiled(on_gpu)
    if not on_gpu:
        # It refuses parameters on the CPU even where nobody asks for their gradient.
        query, key, value = query.detach(), key.detach(), value.detach()
    if call.packed:
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    result: Any = flex(
        query,
        key,
        value,
        score_mod=_score_mod(call),
        block_mask=_block_mask(call, query.shape[-2], key.shape[-2]),
        scale=call.scale,
        enable_gqa=call.grouped,
        kernel_options=_options(call) if on_gpu else None,
        return_aux=AuxRequest(lse=True) if call.return_lse else None,
    )
    output, lse = (result[0], result[1].lse) if call.return_lse else (result, None)
    if call.packed:
        return output[0].transpose(0, 1), None if lse is None else lse[0].transpose(0, 1)
    return output, lse


def _options(call: Call) -> dict[str, Any]:
    """Return what its kernels on a GPU are told."""
    # Its kernel for few queries finds no tiles for a short pack with grouped heads (torch 2.11).
    return _GPU_TILES | {"FORCE_USE_FLEX_ATTENTION": True} if call.packed else _GPU_TILES


@cache
def _has_compiler() -> bool:
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))


def _compiled(on_gpu: bool) -> Callable[..., Any]:
    """Return FlexAttention, compiled; inside somebody's torch.compile as a part of their graph."""
    if torch.compiler.is_compiling():
        return flex_attention
    # The CPU's kernels do not compile for dynamic shapes, so every shape is a graph of its own.
    compiled = _compile(None if on_gpu else False)

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=4096):
            return compiled(*args, **kwargs)

    return run


@cache
def _compile(dynamic: bool | None) -> Callable[..., Any]:
    # fullgraph: where dynamo would give up and run it eagerly, with n² memory, it raises instead.
    return torch.compile(flex_attention, fullgraph=True, dynamic=dynamic)


def _score_mod(call: Call) -> Callable[..., Tensor] | None:
    vector, mask = call.offset_logits(), call.attn_mask
    columns = call.key_scores
    if vector is None and mask is None and columns is None:
        return None
    if vector is not None:
        vector = vector.expand(call.heads[0], -1).contiguous()
    if mask is not None:
        # A mask of another dtype than the logits comes out as NaN on the CPU.
        mask = mask if mask.dtype == torch.bool else hiding(mask, call.dtype)
        mask = mask.expand(
            call.query.shape[0], call.heads[0], call.query.shape[2], call.key.shape[2]
        )
    if columns is not None:
        columns = columns.T.unsqueeze(0) if call.packed else columns
        columns = columns.to(call.dtype).contiguous()
    queries: Any = call.lengths[0]
    if call.packed:
        queries, last = (_known(n, call.query.device) for n in (queries, 2 * queries - 2))

    def score_mod(logit: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if vector is not None:
            entry = entry_of(i, j, queries)
            if call.packed:
                entry = torch.where(entry < 0, 0, torch.where(entry > last, last, entry))
            logit = logit + vector[h, entry]
        if columns is not None:
            logit = logit + columns[b, h, j]
        if mask is not None:
            seen = mask[b, h, i, j]
            if mask.dtype == torch.bool:
                logit = torch.where(seen, logit, -torch.inf)
            else:
                logit = logit + seen
        return logit

    return score_mod


def _block_mask(call: Call, queries: int, keys: int) -> BlockMask | None:
    """Return which blocks to skip: those that distance or another sequence hides altogether."""
    device = call.query.device
    if call.packed:
        return _new_block_mask(queries, keys, 0, call.reach, call.sequence_of_token(), device)
    # A start that only the device knows: the −inf in the vector hides keys, no block is skipped.
    if isinstance(call.query_start, Tensor) or call.reach == (None, None):
        return None
    create = _new_block_mask if torch.compiler.is_compiling() else _known_block_mask
    return create(queries, keys, call.query_start, call.reach, None, device)


def _new_block_mask(
    queries: int,
    keys: int,
    query_start: int,
    reach: Window,
    sequence: Tensor | None,
    device: torch.device,
) -> BlockMask:
    left, right = (None if side is None else _known(side, device) for side in reach)
    start = _known(query_start, device)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = j >= 0
        if left is not None:
            seen = seen & (offset_of(i, j, start) >= -left)
        if right is not None:
            seen = seen & (offset_of(i, j, start) <= right)
        if sequence is not None:
            seen = seen & (sequence[i] == sequence[j]) & (sequence[i] >= 0)
        return seen

    # Eager, it writes a queries × keys mask once.
    compile_it = device.type != "cpu" and not torch.compiler.is_compiling()
    create = _compiled_create() if compile_it else create_block_mask
    return create(mask_mod, None, None, queries, keys, device=device)


def _known(number: int, device: torch.device) -> Any:
    """Return a number that is no size of a tensor as FlexAttention's functions are to know it.

    One in Python becomes a symbol of the graph when it changes, which its kernels cannot read
    ("'ShapeAsConstantBuffer' object has no attribute 'dtype'", torch 2.11).
    """
    if torch.compiler.is_compiling():
        return number
    return torch.full((), number, dtype=torch.int32, device=device)


# What depends on distance alone is the same in every layer and step.
_known_block_mask = lru_cache(maxsize=64)(_new_block_mask)


@cache
def _compiled_create() -> Callable[..., BlockMask]:
    return torch.compile(create_block_mask)
