"""Arguments of the operator in, a `Call` or an error out.

An error names the argument, what was expected, what came, and what to do. Values that live on an
accelerator are checked there, asynchronously: the host never waits for them.
"""

import math
from typing import NoReturn

import torch

from tisa.offsets import Window, default_query_start, span
from tisa.ops.call import Call, autocast_enabled
from tisa.scoring.base import check_flags
from tisa.shapes import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def checked_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offset_scores: Tensor | None,
    *,
    attn_mask: Tensor | None,
    key_scores: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    query_start: int | Tensor | None,
    window: int | Window | None,
    always: Tensor | None,
    band: Tensor | None,
    return_lse: bool,
) -> Call:
    """Return the call with every default filled in, or raise a ValueError or TypeError."""
    packed = cu_seqlens is not None
    check_flags("tisa.attention", is_causal=is_causal, enable_gqa=enable_gqa, return_lse=return_lse)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _check_tensor(name, tensor, "convert it with torch.as_tensor")
    tensors = {"attn_mask": attn_mask, "key_scores": key_scores, "cu_seqlens": cu_seqlens,
               "always": always, "band": band}  # fmt: skip
    for name, optional in tensors.items():
        if optional is not None:
            _check_tensor(name, optional, "convert it with torch.as_tensor")
    if offset_scores is not None:
        _check_tensor(
            "offset_scores",
            offset_scores,
            "pass a scoring function, or what scoring(queries, keys) returns",
        )
    if autocast_enabled(query.device):
        query, key, value = (autocast(x) for x in (query, key, value))
    _check_sequences(query, key, value, packed=packed, enable_gqa=enable_gqa)
    _check_number("dropout_p", dropout_p, "0 switches dropout off")
    if scale is not None:
        _check_number("scale", scale, "a trained scale is multiplied into the query")
        if isinstance(scale, float) and not math.isfinite(scale):
            refuse("scale", "finite", scale, "None is 1/√dim")
    if max_seqlen is not None and not is_int(max_seqlen):
        refuse("max_seqlen", "an int", repr(max_seqlen), "the longest sequence's length", TypeError)
    if not 0 <= dropout_p <= 1:
        refuse("dropout_p", "a number from 0 to 1", dropout_p, "0 switches dropout off")
    if packed:
        start: int | Tensor = 0
        longest = _check_packing(query, key, cu_seqlens, max_seqlen, query_start, attn_mask)
    else:
        if max_seqlen is not None:
            refuse("max_seqlen", "None without cu_seqlens", max_seqlen, "pass both or neither")
        longest = 0
        start = _checked_start(query_start, query, key)
    call = Call(
        query=query,
        key=key,
        value=value,
        scores=offset_scores,
        band=band,
        attn_mask=None if attn_mask is None else _checked_mask(attn_mask, query, key),
        key_scores=key_scores,
        dropout_p=float(dropout_p),
        is_causal=is_causal,
        window=_checked_window(window),
        scale=1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        query_start=start,
        cu_seqlens=cu_seqlens,
        max_seqlen=longest,
        return_lse=return_lse,
        always=always,
    )
    _check_always(always, call)
    if offset_scores is not None:
        _check_scores(offset_scores, call)
    if band is not None:
        _check_band(band, call)
    if key_scores is not None:
        _check_key_scores(key_scores, call)
    return call


def refuse(
    argument: str, expected: str, got: object, remedy: str, error: type[Exception] = ValueError
) -> NoReturn:
    """Raise what a caller is told: the argument, what was expected, what came, what to do."""
    raise error(f"tisa.attention: {argument} must be {expected}, got {got}; {remedy}")


def _check_tensor(argument: str, value: object, remedy: str) -> None:
    if not isinstance(value, Tensor):
        refuse(argument, "a tensor", type(value).__name__, remedy, TypeError)


def is_int(value: object) -> bool:
    """Return whether it is a whole number, known or a compiled program's."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _check_number(argument: str, value: object, remedy: str) -> None:
    if isinstance(value, (bool, Tensor)) or not isinstance(
        value, (int, float, torch.SymInt, torch.SymFloat)
    ):
        refuse(argument, "a number", repr(value), remedy, TypeError)


def autocast(tensor: Tensor) -> Tensor:
    """Return the tensor in autocast's dtype, as PyTorch's own attention takes it."""
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _check_sequences(
    query: Tensor, key: Tensor, value: Tensor, *, packed: bool, enable_gqa: bool
) -> None:
    named = {"query": query, "key": key, "value": value}
    layout = "(total, heads, dim)" if packed else "(batch, heads, length, dim)"
    for name, tensor in named.items():
        if tensor.ndim != (3 if packed else 4):
            remedy = "a packed batch has no batch axis" if packed else "add the missing axes"
            refuse(name, layout, f"shape {tuple(tensor.shape)}", remedy)
        if tensor.dtype not in DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            refuse(name, f"of a floating point dtype ({names})", tensor.dtype, "cast it")
        if tensor.dtype != query.dtype:
            refuse(name, f"of the query's dtype {query.dtype}", tensor.dtype, "cast one of them")
        if tensor.device != query.device:
            refuse(name, f"on the query's device {query.device}", tensor.device, "move one")
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    _check_sizes(query, key, value, shapes, packed=packed)
    _check_heads(query.shape[1], key.shape[1], value.shape[1], shapes, enable_gqa=enable_gqa)


def _check_sizes(query: Tensor, key: Tensor, value: Tensor, shapes: str, *, packed: bool) -> None:
    length_axis = 0 if packed else 2
    if query.shape[-1] != key.shape[-1] or query.shape[-1] == 0:
        refuse("key", "as wide as the query, and at least 1", shapes, "project both alike")
    if value.shape[-1] == 0:
        refuse("value", "at least 1 wide", shapes, "project it to the width that you want back")
    if key.shape[length_axis] != value.shape[length_axis]:
        refuse("value", "as long as the key", shapes, "each key needs one value")
    if packed and query.shape[0] != key.shape[0]:
        refuse(
            "key",
            "as long as the query in a packed batch",
            shapes,
            "for attention to other tokens pass a padded batch",
        )
    if not packed and not query.shape[0] == key.shape[0] == value.shape[0]:
        refuse("key and value", "of the query's batch size", shapes, "expand them")


def _check_heads(
    heads: int, key_heads: int, value_heads: int, shapes: str, *, enable_gqa: bool
) -> None:
    if heads == 0:
        refuse("query", "of at least one head", shapes, "the heads are axis 1")
    if key_heads != value_heads:
        refuse("value", "of as many heads as the key", shapes, "the heads are axis 1")
    if heads == key_heads:
        return
    if not enable_gqa:
        refuse(
            "key", "of as many heads as the query", shapes, "pass enable_gqa=True for grouped heads"
        )
    if key_heads == 0 or heads % key_heads:
        refuse(
            "key", "of a number of heads that divides the query's", shapes, "repeat the key heads"
        )


def _checked_start(query_start: int | Tensor | None, query: Tensor, key: Tensor) -> int | Tensor:
    if query_start is None:
        return default_query_start(query.shape[2], key.shape[2])
    if not isinstance(query_start, Tensor) and not is_int(query_start):
        refuse(
            "query_start", "an int or a tensor with one integer", repr(query_start), "round it",
            TypeError,
        )  # fmt: skip
    if isinstance(query_start, Tensor):
        if query_start.ndim != 0 or query_start.dtype not in (torch.int32, torch.int64):
            refuse(
                "query_start",
                "an int or a tensor with one integer",
                f"{query_start.dtype} {tuple(query_start.shape)}",
                "pass the position of the first query, for example cache_position[0]",
            )
        if query_start.device != query.device:
            refuse(
                "query_start",
                f"on the query's device {query.device}",
                query_start.device,
                "move it",
            )
    return query_start


def _checked_window(window: int | Window | None) -> Window:
    if window is None:
        return None, None
    sides = (window, window) if isinstance(window, int) else window
    pair = isinstance(sides, (tuple, list)) and len(sides) == 2
    if not pair or not all(side is None or is_int(side) for side in sides):
        refuse(
            "window", "an int, or a pair (left, right) of ints or None", repr(window),
            "None means without limit", TypeError,
        )  # fmt: skip
    left, right = sides
    if any(side is not None and side < 0 for side in (left, right)):
        refuse(
            "window",
            "the distance that may be seen to the left and to the right, 0 or more",
            window,
            "None means without limit",
        )
    # Farther than any sequence is without limit; kernels count places in 32 bits.
    left, right = (None if side is None or side >= 2**30 else side for side in (left, right))
    return left, right


def _checked_mask(attn_mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    full = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    shape = tuple(attn_mask.shape)
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        refuse(
            "attn_mask",
            "boolean (True: may be seen) or floating point (added to the logits)",
            attn_mask.dtype,
            "an integer mask of 0 and 1 becomes boolean with .bool()",
        )
    if attn_mask.device != query.device:
        refuse("attn_mask", f"on the query's device {query.device}", attn_mask.device, "move it")
    if not 2 <= attn_mask.ndim <= 4:
        refuse(
            "attn_mask",
            f"of 2 to 4 axes that broadcast to (batch, heads, queries, keys) = {full}",
            f"shape {shape}",
            "a padding mask (batch, keys) is passed as mask[:, None, None, :]",
        )
    expanded = attn_mask[(None,) * (4 - attn_mask.ndim)]
    if any(have not in (1, want) for have, want in zip(expanded.shape, full, strict=True)):
        refuse(
            "attn_mask",
            f"broadcastable to (batch, heads, queries, keys) = {full}",
            f"shape {shape}",
            "a padding mask (batch, keys) is passed as mask[:, None, None, :]",
        )
    return expanded


def _check_packing(
    query: Tensor,
    key: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    query_start: int | Tensor | None,
    attn_mask: Tensor | None,
) -> int:
    assert cu_seqlens is not None
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
        refuse(
            "cu_seqlens",
            "an int32 tensor of one axis, the ends of the sequences after a leading 0",
            f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}",
            "lengths become ends with pad(lengths.cumsum(0), (1, 0)).int()",
        )
    if cu_seqlens.device != query.device:
        refuse("cu_seqlens", f"on the query's device {query.device}", cu_seqlens.device, "move it")
    if max_seqlen is None or max_seqlen < 0:
        refuse("max_seqlen", "the length of the longest sequence", max_seqlen, "pass it too")
    if query_start is not None:
        refuse("query_start", "None with cu_seqlens", query_start, "each sequence starts at 0")
    if attn_mask is not None:
        refuse(
            "attn_mask",
            "None with cu_seqlens",
            f"shape {tuple(attn_mask.shape)}",
            "leave the padding out of the packed batch, or pass a padded batch",
        )
    total = query.shape[0]
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    ordered = (cu_seqlens[0] == 0) & (lengths >= 0).all() & (cu_seqlens[-1] <= total)
    fits = (lengths <= max_seqlen).all()
    if query.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(ordered, "tisa.attention: cu_seqlens must rise from 0 to at most total")
        torch._assert_async(fits, "tisa.attention: a sequence is longer than max_seqlen")
    else:
        if not ordered:
            refuse(
                "cu_seqlens",
                f"rising from 0 to at most {total} tokens",
                cu_seqlens.tolist(),
                "they are the ends of the sequences, after a leading 0",
            )
        if not fits:
            refuse(
                "max_seqlen",
                f"at least the longest sequence, {int(lengths.max())}",
                max_seqlen,
                "and the scores must span 2·max_seqlen − 1 offsets",
            )
    return max_seqlen


def _check_scores(scores: Tensor, call: Call) -> None:
    queries, keys = call.lengths
    expected = (call.heads[0], span(queries, keys))
    remedy = "scoring functions give float32 whatever the model's dtype; do not cast their scores"
    _check_exact("offset_scores", scores, call, remedy)
    if tuple(scores.shape) != expected:
        lengths = f"max_seqlen {queries}" if call.packed else f"{queries} queries, {keys} keys"
        refuse(
            "offset_scores",
            f"of shape (heads, queries + keys − 1) = {expected} for {lengths}",
            tuple(scores.shape),
            f"compute them with scoring({queries}, {keys})",
        )
    _check_device("offset_scores", scores, call)


def _check_key_scores(key_scores: Tensor, call: Call) -> None:
    remedy = "take it out of autocast: differences of sums over a sequence need its digits"
    _check_exact("key_scores", key_scores, call, remedy)
    layout, expected = "(total, heads)", tuple(call.query.shape[:2])
    if not call.packed:
        layout, expected = "(batch, heads, keys)", (*expected, call.key.shape[2])
    if tuple(key_scores.shape) != expected:
        refuse(
            "key_scores",
            f"of shape {layout} = {expected}, with the query's heads",
            tuple(key_scores.shape),
            "expand what is the same for several, key_scores.expand(…)",
        )
    _check_device("key_scores", key_scores, call)


def _check_always(always: Tensor | None, call: Call) -> None:
    if always is None:
        return
    sequences = call.query.shape[0]
    if call.packed:
        assert call.cu_seqlens is not None
        sequences = call.cu_seqlens.shape[0] - 1
    shape, wanted = tuple(always.shape), (torch.int32, torch.int64)
    if always.dtype not in wanted or always.ndim != 2 or shape[0] != sequences:
        refuse(
            "always", f"integers of shape (sequences, places) = ({sequences}, any number)",
            f"{always.dtype} {shape}", "a sequence that has fewer places is filled up with -1",
        )  # fmt: skip
    _check_device("always", always, call)


def _check_exact(argument: str, scores: Tensor, call: Call, remedy: str) -> None:
    if scores.dtype not in (torch.float32, call.dtype):
        wanted = "float32" if call.dtype == torch.float32 else "float32 or float64"
        refuse(argument, wanted, scores.dtype, remedy)


def _check_device(argument: str, tensor: Tensor, call: Call) -> None:
    if tensor.device != call.query.device:
        refuse(argument, f"on the query's device {call.query.device}", tensor.device, "move it")


def _check_band(band: Tensor, call: Call) -> None:
    if call.scores is None:
        refuse("band", "None without offset_scores", f"shape {tuple(band.shape)}", "pass both")
    expected = (call.heads[0], 2)
    if band.dtype != torch.int32 or tuple(band.shape) != expected:
        refuse(
            "band",
            f"int32 of shape (heads, 2) = {expected}",
            f"{band.dtype} {tuple(band.shape)}",
            "take it from scoring.support(eps)",
        )
    _check_device("band", band, call)
