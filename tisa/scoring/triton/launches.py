"""Scores and bands of functions that are alike, each by one launch on a GPU, gradients by another.

Around the launches: one concatenation of all parameters, whose gradient is views, and for more than
BLOCK offsets the sum of what each block gave. Forgets nothing from call to call but T5's table,
which never changes. First derivatives alone; the modules have all of them.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from tisa.offsets import default_query_start, span
from tisa.scoring.base import FARTHEST, ScoringFunction
from tisa.scoring.near_far import NearFar
from tisa.scoring.t5 import T5Buckets
from tisa.scoring.tisa import TISA
from tisa.scoring.tisa_v2 import TISAv2
from tisa.scoring.triton.functions import Fixed, bands_kernel, gradients_kernel, scores_kernel
from tisa.shapes import Float, Int, Int32, Tensor

KINDS = ("KerpleLog", "KerplePower", "NearFar", "T5Buckets", "TISA", "TISAv2")
BLOCK = 1024


def takes(function: nn.Module) -> bool:
    """Return whether the kernels know the function: its class, its parameters' shapes."""
    # KERPLE as its authors keep its parameters positive is not what the kernels compute.
    if type(function).__name__ not in KINDS or getattr(function, "variant", "paper") != "paper":
        return False
    assert isinstance(function, ScoringFunction)
    parameters, heads = _parameters(function), function.num_attention_heads
    dtypes = {p.dtype for p in (*parameters, *function.buffers())}
    return dtypes in ({torch.float32}, {torch.float64}) and all(
        p.ndim and p.shape[0] == heads and p.numel() for p in parameters
    )


def scores(
    alike: Sequence[Any], queries: int, keys: int | None, query_start: int | Tensor | None
) -> Sequence[Float[Tensor, "heads span"]]:
    """Return the score vector of each function."""
    keys = queries if keys is None else keys
    length, late = span(queries, keys), isinstance(query_start, Tensor)
    start = default_query_start(queries, keys) if query_start is None else query_start
    heads = alike[0].num_attention_heads
    numbers, table, fixed = read(alike, length, late)
    found: Tensor = _Scores.apply(
        numbers, heads * len(alike), length, -(queries - 1) - (0 if late else start),
        start if late else None, table, fixed,
    )  # fmt: skip
    return found.view(len(alike), heads, length).unbind(0)


def bands(alike: Sequence[TISA], dtype: torch.dtype) -> Sequence[Int32[Tensor, "heads 2"]]:
    """Return the band of each of TISA's functions."""
    heads, eps = alike[0].num_attention_heads, torch.finfo(dtype).eps / 16
    with torch.no_grad():
        numbers = _numbers(alike)
        found = torch.empty(
            len(alike), heads, 2, dtype=torch.int32, device=numbers.device
        )  # fmt: skip
        count = heads * len(alike)
        with _device_of(numbers):
            launch(bands_plan(numbers, found, count, eps, alike[0].num_kernels))
    return found.unbind(0)


class Plan(NamedTuple):
    """A kernel, its programs, its arguments."""

    kernel: Any
    grid: tuple[int, int]
    arguments: dict[str, Any]


def launch(plan: Plan) -> Any:
    """Launch it where PyTorch launches, and return the compiled kernel."""
    return plan.kernel[plan.grid](**plan.arguments)


def scores_plan(
    numbers: Tensor, table: Tensor | None, found: Tensor, start: Tensor | None, first: int,
    fixed: Fixed,
) -> Plan:  # fmt: skip
    """Return what fills (heads, offsets), the offsets beginning with `first`."""
    heads, length = found.shape
    arguments = dict(
        numbers=numbers, table=table, scores=found, start=start, heads=heads, span=length,
        first=first, FIXED=fixed,
    )  # fmt: skip
    return Plan(scores_kernel, (heads, -(-length // fixed.BLOCK)), arguments)


def gradients_plan(
    numbers: Tensor, table: Tensor | None, gradient: Tensor, sums: Tensor, start: Tensor | None,
    first: int, fixed: Fixed,
) -> Plan:  # fmt: skip
    """Return what fills (blocks, numbers): what each block of offsets gives to the parameters."""
    heads, length = gradient.shape
    arguments = dict(
        numbers=numbers, table=table, gradient=gradient, sums=sums, start=start,
        total=numbers.numel(), heads=heads, span=length, first=first, FIXED=fixed,
    )  # fmt: skip
    return Plan(gradients_kernel, (heads, sums.shape[0]), arguments)


def bands_plan(numbers: Tensor, found: Tensor, count: int, eps: float, kernels: int) -> Plan:
    """Return what fills the bands of so many heads."""
    arguments = dict(
        numbers=numbers, bands=found, heads=count, eps=eps, FARTHEST=FARTHEST, S=kernels, BLOCK=32
    )
    return Plan(bands_kernel, (-(-count // 32), 1), arguments)


def read(alike: Sequence[Any], length: int, late: bool = False) -> tuple[Tensor, Any, Fixed]:
    """Return the parameters in a row, T5's table or None, and what the compiler knows."""
    return _numbers(alike), _table(alike[0]), _fixed(alike[0], length, late)


def _numbers(alike: Sequence[nn.Module]) -> Tensor:
    """Return all parameters in a row: of each parameter that of every function."""
    rows = [p for of_one in zip(*map(_parameters, alike), strict=True) for p in of_one]
    shape = rows[0].shape[1:]
    if len(shape) == 1 and all(p.shape[1:] == shape for p in rows):
        # A view for each would take the host longer than all the rest.
        return torch.cat(rows).view(-1)
    return torch.cat([p.reshape(-1) for p in rows])


def _parameters(function: nn.Module) -> list[Any]:
    """Return the function's parameters, in the order of `named_parameters`, without its price."""
    found = list(function._parameters.values())
    for part in function._modules.values():
        assert part is not None
        found += _parameters(part)
    return found


def _fixed(function: Any, length: int, late: bool) -> Fixed:
    block = min(BLOCK, max(16, 1 << (length - 1).bit_length() if length else 16))
    fixed = Fixed(type(function).__name__, block, late)
    if isinstance(function, NearFar):
        return fixed._replace(KERNELS=function.near.num_kernels)
    if isinstance(function, TISA):
        return fixed._replace(KERNELS=function.num_kernels)
    if isinstance(function, TISAv2):
        heads = function.num_attention_heads
        positional = heads - function.num_agnostic_heads
        ratio = math.log(function.longest_view / function.shortest_view) / max(1, positional - 1)
        return fixed._replace(
            KERNELS=function.num_kernels, HEADS=heads, POSITIONAL=positional, RATIO=ratio,
            VIEW=-2 * math.log(1e-8) / function.shortest_view,
        )  # fmt: skip
    if isinstance(function, T5Buckets):
        return fixed._replace(
            BUCKETS=function.num_buckets, PER_SIDE=function.per_side, FARTHEST=function.farthest,
            BIDIRECTIONAL=function.bidirectional,
        )  # fmt: skip
    return fixed


def _table(function: Any) -> Int[Tensor, " distances"] | None:
    """Return T5's bucket of each distance, up to the one from which on the last holds all."""
    if not isinstance(function, T5Buckets):
        return None
    settings = (function.num_buckets, function.max_distance, function.bidirectional)
    device = function.bucket_scores.device
    # What is made while a CUDA graph is captured is in memory of that graph.
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return (_buckets.__wrapped__ if capturing else _buckets)(*settings, device)


@lru_cache(maxsize=32)
def _buckets(
    buckets: int, distance: int, bidirectional: bool, device: torch.device
) -> Int[Tensor, " distances"]:
    function = T5Buckets(1, buckets, distance, bidirectional=bidirectional, init="zero")
    offsets = -torch.arange(function.farthest + 1, device=device)
    return function.buckets(offsets).to(torch.int32)


def _device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which Triton launches where the tensor is."""
    device = tensor.device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


class _Scores(torch.autograd.Function):
    """From all parameters in a row to (heads of all functions, offsets)."""

    @staticmethod
    def forward(
        ctx: Any, numbers: Tensor, heads: int, length: int, first: int, start: Tensor | None,
        table: Tensor | None, fixed: Fixed,
    ) -> Tensor:  # fmt: skip
        found = numbers.new_empty(heads, length)
        ctx.save_for_backward(numbers, start, table)
        ctx.rest = length, first, fixed
        if length:
            with _device_of(numbers):
                launch(scores_plan(numbers, table, found, start, first, fixed))
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (numbers, start, table), (length, first, fixed) = ctx.saved_tensors, ctx.rest
        if not length:
            return torch.zeros_like(numbers), *[None] * 6
        blocks = -(-length // fixed.BLOCK)
        sums = numbers.new_empty(blocks, numbers.numel())
        with _device_of(numbers):
            plan = (numbers, table, gradient.contiguous(), sums, start, first, fixed)
            launch(gradients_plan(*plan))
        return sums[0] if blocks == 1 else sums.sum(0), *[None] * 6
