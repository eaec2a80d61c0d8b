"""The fused backend: attention with scores at the speed of attention without them.

docs/attention.md derives it. Every line imports only from lines above it:

    arguments.py       the arguments of the kernels, in groups that they share
    tiles.py           where a tile stands, what it adds to the logits
    columns.py         what each key adds to its logits
    forward.py         attention
    scores.py          the gradient of the score vector
    backward_query.py  the gradient of the query, and what the others need
    backward_key.py    the gradients of key and value
    small.py           the whole backward pass of short sequences
    decode.py          one query against many keys
    join.py            keys that the window does not hide
    configs.py         tile sizes
    problem.py         a call's inputs as the kernels read them
    plan.py            which kernels a forward pass launches
    plan_backward.py   which a backward pass launches: only what is needed
    plan_join.py       which add keys that the window does not hide
    launching.py       how they are launched, and remembered
    native.py          the same in C++ (native.cpp), without Python
    asking.py          a scoring function's scores and band in C++
    operators.py       what PyTorch sees of it
    joined.py          the same with keys that the window does not hide
"""

import math

import torch
from torch import Tensor

from tisa.ops import always
from tisa.ops.call import Call, needs_gradient, transformed
from tisa.ops.dropout import dropout_seed
from tisa.ops.repeats import Repeat
from tisa.ops.triton import joined, operators
from tisa.ops.triton.asking import ask as ask
from tisa.ops.triton.forward import forward_kernel
from tisa.ops.triton.problem import Inputs
from tisa.ops.triton.tiles import ROW_PADDING

DEVICES = ("cuda", "xpu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def refuses(call: Call) -> str | None:
    """Return why this backend cannot do the call, or None."""
    if call.query.device.type not in DEVICES and not interpreted():
        return "it needs a GPU (or TRITON_INTERPRET=1, to debug it)"
    if call.query.device.type == "cuda" and not _new_enough(call.query.device):
        return "it needs a GPU of compute capability 8.0 or higher"
    if call.query.dtype not in DTYPES:
        return f"it has no {str(call.query.dtype).removeprefix('torch.')}"
    if interpreted() and call.query.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 as integers"
    if max(call.query.shape[-1], call.value.shape[-1]) > 256:
        return "its heads are at most 256 wide"
    if min(call.query.shape[-1], call.value.shape[-1]) < 2:
        # Strides of 1 get lost in Triton 3.6: the query's gradient does not compile.
        return "its heads are at least 2 wide"
    if needs_gradient(call.attn_mask):
        return "it computes no gradient for attn_mask"
    if transformed():
        # Not left to PyTorch: an operator without a jvp drops the tangent and says nothing.
        return "torch.func and forward-mode derivatives cannot look into it"
    return None


# Asked once, here: a compiled graph cannot ask.
_INTERPRETED = not hasattr(forward_kernel, "device_caches")


def interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on any device."""
    return _INTERPRETED


def _new_enough(device: torch.device) -> bool:
    if torch.version.hip is not None or torch.compiler.is_compiling():
        return True
    return torch.cuda.get_device_capability(device) >= (8, 0)


def attend(call: Call) -> tuple[Tensor, Tensor | None]:
    """Return the attention output in the query's dtype and, if asked for, the log-sum-exp."""
    inference = not needs_gradient(call.query, call.key, call.value, call.scores, call.key_scores)
    inputs = _inputs(call, dropout_seed(call.query) if call.dropout_p > 0 else None)
    if call.always is None:
        output, statistics = operators.attend(inputs, inference=inference)
    elif joined.can_join(inputs, call.always):
        output, statistics = joined.attend(
            inputs, call.always, causal=call.is_causal, inference=inference
        )
    else:
        output, lse = attend(always.windowed(call))
        assert lse is not None
        return always.joined(call, output, lse)
    if not call.return_lse:
        return output, None
    return output, _log_sum_exp(call, statistics)


def repeat(call: Call) -> Repeat | None:
    """Return what does this call again with tensors that lie as these do; None if nothing.

    It takes query, key, value, scores, band and mask, and looks at none of them.
    """
    return operators.repeat(_inputs(call, _any_seed(call))) if _repeatable(call) else None


def record(call: Call, told: tuple[object, ...]) -> None:
    """Make this call known to C++ by what `attention` was told (`repeats.native`)."""
    if _repeatable(call):
        operators.record(_inputs(call, _any_seed(call)), told)


def _repeatable(call: Call) -> bool:
    settled = call.key_scores is None and not call.packed and isinstance(call.query_start, int)
    return settled and not call.return_lse and call.query.dtype != torch.float32


def _any_seed(call: Call) -> Tensor | None:
    """Return what lies as a seed does; drawing one would change what is drawn afterwards."""
    return call.query.new_empty((), dtype=torch.int32) if call.dropout_p > 0 else None


def _inputs(call: Call, seed: Tensor | None) -> Inputs:
    start = call.query_start
    return Inputs(
        call.query,
        call.key,
        call.value,
        call.scores,
        call.key_scores,
        call.band,
        call.attn_mask,
        seed,
        call.cu_seqlens,
        start if isinstance(start, Tensor) else None,
        call.max_seqlen,
        0 if isinstance(start, Tensor) else start,
        *call.reach,
        call.scale,
        call.dropout_p,
    )


def _log_sum_exp(call: Call, statistics: Tensor) -> Tensor:
    """Return the log-sum-exp of each query; plain PyTorch, so gradients flow back through it."""
    if statistics.shape[0] == 2:
        # The largest logit and one over the sum of weights; the kernels read the first's gradient.
        total = statistics[0] - statistics[1].detach().log()
    else:
        total = statistics[0] * math.log(2)
    total = torch.where(total == torch.inf, -torch.inf, total)
    if not call.packed:
        batch, heads, queries = call.query.shape[:3]
        return total.view(batch, heads, -1)[..., :queries]
    assert call.cu_seqlens is not None
    number = call.sequence_of_token()
    token = torch.arange(number.shape[0], device=number.device)
    # As `tiles.place` has it: sequences apart, each from a multiple of four.
    first = call.cu_seqlens[number.clamp_min(0)]
    place = token + (-first) % 4 + number.clamp_min(0) * ROW_PADDING.value
    rows = total[:, place.clamp_max(total.shape[1] - 1)].transpose(0, 1)
    return torch.where((number >= 0)[:, None], rows, -torch.inf)
