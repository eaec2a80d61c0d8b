"""PyTorch's scaled_dot_product_attention with the scores as a dense bias.

The fastest there is when there are no scores. With scores it writes the whole bias, heads · n², and
rounds it to the query's dtype, which in half precision costs digits of scores far below a row's
top.
Made of PyTorch operators alone, so what is exported from it runs without this package.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from tisa.offsets import visible_keys
from tisa.ops.call import Call, transformed
from tisa.shapes import Float, Tensor


def refuses(call: Call) -> str | None:
    """Return why this backend cannot do the call, or None."""
    if call.return_lse:
        return "PyTorch's scaled_dot_product_attention returns no log-sum-exp"
    if call.scale <= 0:
        if call.is_causal and not (is_dense(call) or _sees_everything(call)):
            return "PyTorch's causal attention with a scale of 0 or less is NaN (on a CPU)"
        if call.query.device.type != "cpu" and is_dense(call):
            return "PyTorch's gradient beside a bias with a scale of 0 or less is NaN (on a GPU)"
    if transformed():
        return "torch.func and forward-mode derivatives do not go with PyTorch's fast kernels"
    return None


def is_dense(call: Call) -> bool:
    """Whether the call makes this backend write a bias of queries × keys."""
    # In this order: asking how lengths compare would tie an exported graph to the answer.
    return call.biased or not (_sees_everything(call) or _causal_from_top_left(call))


def dense_elements(call: Call) -> int:
    """Return the number of elements of that bias, 0 when there is none."""
    if not is_dense(call):
        return 0
    queries, keys = (call.query.shape[0],) * 2 if call.packed else call.lengths
    # The scores of keys are each sequence's own.
    batch = 1 if call.packed or call.key_scores is None else call.query.shape[0]
    return batch * call.heads[0] * queries * keys


def attend(call: Call) -> tuple[Float[Tensor, "*batch_heads queries value_dim"], None]:
    """Return the attention output in the query's dtype."""
    query, key, value = call.query, call.key, call.value
    if call.packed:
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    bias = blind = None
    if is_dense(call):
        bias = _dense_bias(call, query.shape[-2], key.shape[-2])
        # SDPA's kernels disagree on rows that are −inf throughout: give them something to look at
        # and put the zeros in afterwards.
        blind = (bias == -torch.inf).all(-1, keepdim=True)
        bias = bias.masked_fill(blind, 0.0)
    if query.is_cuda and not torch.compiler.is_compiling():
        query, key, value = map(_aligned, (query, key, value))
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=bias,
        dropout_p=call.dropout_p,
        is_causal=bias is None and call.is_causal and not _sees_everything(call),
        scale=call.scale,
        enable_gqa=call.grouped,
    )
    if blind is not None:
        output = output.masked_fill(blind, 0.0)
    return (output[0].transpose(0, 1) if call.packed else output), None


def _aligned(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the tensor with rows that begin at multiples of 16 bytes, each its own.

    Beside a mask, PyTorch's kernels are chosen as if they did: a slice gave other numbers in half
    precision, and no kernel at all in float32; and cuDNN's output has no order of axes where the
    query's rows are one (H200, torch 2.11).
    """
    places = (x.storage_offset(), *x.stride()[:-1])
    own = all(stride or size == 1 for stride, size in zip(x.stride(), x.shape, strict=True))
    if own and all(p * x.itemsize % 16 == 0 for p in places):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _sees_everything(call: Call) -> bool:
    """Whether the causal mask hides nothing: decoding, one query at the end of a cache."""
    if not call.is_causal:
        return True
    if isinstance(call.query_start, Tensor):
        return False
    keys = call.key.shape[-2]
    return visible_keys((0, 1), keys, call.query_start, (None, 0)) == (0, keys)


def _causal_from_top_left(call: Call) -> bool:
    """Whether the causal mask is the one that PyTorch means by is_causal."""
    return call.is_causal and not isinstance(call.query_start, Tensor) and call.query_start == 0


def _dense_bias(call: Call, queries: int, keys: int) -> Float[Tensor, "b h q k"]:
    bias = call.dense_logits()
    assert bias is not None
    bias = bias.expand(*bias.shape[:2], queries, keys)
    # A constant in a row does not change its softmax. Relative to the row's highest score, the
    # scores that count are small numbers, of which half precision keeps the most digits; and so
    # does the log-sum-exp, from which PyTorch's backward pass computes the weights again.
    top = bias.detach().amax(-1, keepdim=True)
    bias = bias - top.masked_fill(top == -torch.inf, 0.0)
    if call.query.dtype == call.dtype:
        return bias
    lowest = torch.finfo(call.query.dtype).min
    return torch.where(bias == -torch.inf, bias, bias.clamp_min(lowest)).to(call.query.dtype)
