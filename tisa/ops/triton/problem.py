"""The inputs of a call as the kernels read them.

Queries, keys, values and what belongs to them are read through tensor descriptors (on Hopper its
copy engine), which take any strides that are multiples of 16 bytes; other tensors are copied first.
"""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tisa.ops.dropout import kept_scale
from tisa.ops.triton.arguments import (
    Dropout,
    Fixed,
    Mask,
    Rules,
    Statistics,
    Strided,
    StridedKeys,
)
from tisa.ops.triton.configs import TALLEST_TILE, Config, config
from tisa.ops.triton.tiles import LOG2E, ROW_PADDING

# So many keys at least make decoding worth its second kernel.
LONG_CACHE = 512


# So many of the inputs, the first, may have gradients.
TRAINED = 5


class Inputs(NamedTuple):
    """The inputs of a call, in the order of the operators: ten tensors, six numbers."""

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor | None
    key_scores: Tensor | None
    band: Tensor | None
    mask: Tensor | None
    seed: Tensor | None
    cu_seqlens: Tensor | None
    start_pointer: Tensor | None
    max_seqlen: int
    start: int
    left: int | None
    right: int | None
    scale: float
    dropout_p: float

    @property
    def trained(self) -> tuple[Tensor | None, ...]:
        """Those that may have gradients."""
        return self[:5]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Those that are tensors, or None."""
        return self[:10]

    @property
    def numbers(self) -> tuple[int | float | None, ...]:
        """The others."""
        return self[10:]


class Problem:
    """The inputs, read by the kernels' rules: (batch, heads, length, dim), widths padded."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        query, key, value = inputs.query, inputs.key, inputs.value
        self.packed = inputs.cu_seqlens is not None
        if inputs.cu_seqlens is not None:
            query, key, value = map(batched, (query, key, value))
            self.sequences = inputs.cu_seqlens.shape[0] - 1
            self.queries = self.keys = inputs.max_seqlen
        else:
            self.sequences, _, self.queries, _ = query.shape
            self.keys = key.shape[2]
        self.query, self.key, self.value = query, key, value
        key_scores = inputs.key_scores
        if key_scores is not None and self.packed:
            key_scores = key_scores.t().unsqueeze(0)
        # (batch, heads, keys), a packed batch being one sequence.
        self.key_scores = key_scores
        self.heads, self.key_heads = query.shape[1], key.shape[1]
        self.group = self.heads // self.key_heads
        self.width, self.value_width = query.shape[3], value.shape[3]
        self.dim, self.value_dim = padded_width(self.width), padded_width(self.value_width)
        self.half = query.element_size() == 2
        widest = max(self.dim, self.value_dim)
        causal = inputs.right is not None
        self.copy_engine = has_copy_engine(query.device)
        self.tiles: Config = config(
            widest, query.element_size(), self.keys, causal=causal, copy_engine=self.copy_engine
        )

    @property
    def rules(self) -> Rules:
        """How products of queries and keys become weights, with the caller's scale."""
        inputs = self.inputs
        mask, dropout = None, None
        if inputs.mask is not None:
            strides = (
                0 if size == 1 else stride
                for size, stride in zip(inputs.mask.shape, inputs.mask.stride(), strict=True)
            )
            is_bool = inputs.mask.dtype == torch.bool
            mask = Mask(inputs.mask.view(torch.uint8) if is_bool else inputs.mask, *strides)
        if inputs.seed is not None:
            threshold = min(int(inputs.dropout_p * 2**31), 2**31 - 1)
            dropout = Dropout(inputs.seed, threshold, kept_scale(inputs.dropout_p))
        return Rules(
            inputs.scores, inputs.band, mask, dropout, inputs.cu_seqlens, inputs.start_pointer,
            inputs.left, inputs.right, inputs.scale,
        )  # fmt: skip

    @property
    def unit(self) -> float:
        """What a logit is multiplied by in the kernels: `tiles.in_units`."""
        return float(LOG2E.value) if self.half else 1.0

    @property
    def lengths(self) -> dict[str, int]:
        """The numbers of a call that change from call to call."""
        return {"queries": self.queries, "keys": self.keys, "start": self.inputs.start}

    def fixed(self, block_m: int, block_n: int, **others: Any) -> Fixed:
        """Return what the compiler is to know of a kernel with such tiles."""
        mask = self.inputs.mask
        return Fixed(
            block_m, block_n, self.dim, self.value_dim, self.width, self.value_width, self.group,
            not self.half, precision(self.query.dtype, max(self.dim, self.value_dim)),
            mask is not None and mask.shape[2] == 1, **others,
        )  # fmt: skip

    def read(self, name: str, rows: int) -> TensorDescriptor:
        """Return a descriptor of query, key or value in tiles of that many rows."""
        return descriptor(
            getattr(self, name), rows, self.value_dim if name == "value" else self.dim
        )

    def count(self, block: int, *, keys: bool = False) -> int:
        """Return how many tiles a sequence has."""
        return triton.cdiv(self.keys if keys else self.queries, block)

    def ragged(self, block: int) -> bool:
        """Whether a tile may hold keys that are not there."""
        return self.packed or self.keys % block != 0

    @property
    def decodes(self) -> bool:
        """Whether so few queries meet so many keys that the keys are better cut into parts."""
        few = self.queries * self.group <= 64 and self.keys >= LONG_CACHE
        return few and not self.packed and self.inputs.seed is None

    @property
    def small(self) -> bool:
        """Whether whole sequences fit one tile and its kernel."""
        short = max(self.queries, self.keys) <= 128 and self.copy_engine
        return short and max(self.dim, self.value_dim) <= 64 and self.group == 1 and self.half


@cache
def has_copy_engine(device: torch.device) -> bool:
    """Whether descriptors are the hardware's (Hopper and later) and not taken apart."""
    if device.type == "cuda" and torch.version.hip is None:
        return torch.cuda.get_device_capability(device) >= (9, 0)
    # A CPU interprets, and a "meta" tensor is on its way to a GPU of this kind.
    return device.type in ("cpu", "meta")


def batched(tensor: Tensor) -> Tensor:
    """Return (total, heads, dim) as (1, heads, total, dim): a view."""
    return tensor.transpose(0, 1).unsqueeze(0)


def padded_width(width: int) -> int:
    """Return the width of a tile: a power of two that the matrix units take."""
    return max(16, triton.next_power_of_2(width))


def precision(dtype: torch.dtype, width: int) -> str:
    """Return how float32 is multiplied: as PyTorch's own products are set to.

    Three tf32 products are as exact as one in float32, but for sums over more than 128 numbers.
    """
    if dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        return "tf32x3" if width <= 128 else "ieee"
    return "tf32"


def describable(tensor: Tensor) -> bool:
    """Whether a descriptor can read and write the tensor as it lies."""
    if tensor.data_ptr() % 16:
        return False
    return _fits(tensor.shape, tensor.stride(), 16 // tensor.element_size())


@lru_cache(4096)
def _fits(shape: tuple[int, ...], strides: tuple[int, ...], unit: int) -> bool:
    return strides[-1] == 1 and all(
        (stride % unit == 0 and stride > 0) or size == 1
        for stride, size in zip(strides[:-1], shape, strict=False)
    )


def loadable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy of it where a descriptor cannot read it as it lies."""
    if describable(tensor):
        return tensor
    unit, width = 16 // tensor.element_size(), tensor.shape[-1]
    copy = tensor.new_empty(*tensor.shape[:-1], triton.cdiv(width, unit) * unit)[..., :width]
    return copy.copy_(tensor)


def loadable_keys(key_scores: Tensor, packed: bool) -> Tensor:
    """Return (batch, heads, keys), packed (total, heads), or a copy as kernels read them.

    Keys are neighbours, and rows begin at multiples of 16 bytes.
    """
    return loadable(key_scores.t()).t() if packed else loadable(key_scores)


def descriptor(tensor: Tensor, rows: int, width: int) -> TensorDescriptor:
    """Return how to read (batch, heads, length, dim) in tiles of rows × width."""
    # The stride of an axis of length 1 is never used, but must be a multiple of 16 bytes.
    strides = [
        stride if size > 1 else 128
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ]
    strides[-1] = 1
    return TensorDescriptor(tensor, list(tensor.shape), strides, [1, 1, rows, width])


def strided_keys(tensor: Tensor | None) -> StridedKeys | None:
    """Return (batch, heads, keys) as kernels read and write them."""
    if tensor is None:
        return None
    sizes = zip(tensor.shape[:2], tensor.stride()[:2], strict=True)
    return StridedKeys(tensor, *(0 if size == 1 else stride for size, stride in sizes))


def strided(tensor: Tensor) -> Strided:
    """Return (batch, heads, length, dim) as kernels read it without a descriptor."""
    return Strided(tensor, *tensor.stride()[:3])


def statistics_of(tensor: Tensor, gradient: Tensor | None = None) -> Statistics:
    """Return what the forward pass keeps of each query as kernels read it."""
    return Statistics(tensor, tensor.shape[2], tensor[0].numel(), gradient)


def row_descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Return how to read (rows, places) numbers, one for each query."""
    return TensorDescriptor(tensor, list(tensor.shape), [tensor.shape[1], 1], [1, rows])


def statistics_shape(query: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int, int]:
    """Return the shape of what the forward pass keeps of each query."""
    parts = 2 if query.dtype == torch.float32 else 1
    if cu_seqlens is not None:
        places = (query.shape[0] + 3) // 4 * 4 + (cu_seqlens.shape[0] - 1) * ROW_PADDING.value
        return parts, query.shape[1], places
    places = (query.shape[2] + TALLEST_TILE - 1) // TALLEST_TILE * TALLEST_TILE
    return parts, query.shape[0] * query.shape[1], places
