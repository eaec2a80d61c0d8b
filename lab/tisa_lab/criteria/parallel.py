"""Parallelizable: how the longest chain of operations grows with the length.

Counted, not timed: every operation that PyTorch dispatches in a forward and backward pass comes one
step after the latest of its inputs. What an operation does inside (a product, a softmax, the blocks
of the chunked attention) counts as one.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tisa.shapes import Tensor
from tisa.transformer import SelfAttention
from tisa_lab.criteria.draws import draw_parameters
from tisa_lab.criteria.measurement import Measurement
from tisa_lab.criteria.settings import Settings

# These overwrite their first argument without reading it.
WRITES = ("aten::copy_", "aten::fill_", "aten::zero_", "aten::normal_")


def measure(name: str, settings: Settings) -> Measurement:
    """Return the exponent with which the critical path grows from the first to the last length."""
    lengths = settings.path_lengths
    paths = [critical_path(name, length, settings) for length in lengths]
    growth = math.log(paths[-1] / paths[0]) / math.log(lengths[-1] / lengths[0])
    steps = ", ".join(f"{path:,}" for path in paths)
    at = ", ".join(map(str, lengths))
    return Measurement(
        growth, f"{steps} sequential operations at length {at}: grows like n^{growth:.2f}"
    )


def critical_path(name: str, length: int, settings: Settings) -> int:
    """Return the longest chain of operations in a forward and backward pass of one layer."""
    layer = SelfAttention(16, 2, position=name, max_position_embeddings=max(settings.path_lengths))
    draw_parameters(layer, settings.seed)
    layer.to(settings.device)
    hidden = torch.randn(1, length, 16, device=settings.device)
    with Depth() as depth:
        layer(hidden).sum().backward()
    return depth.longest


class Depth(TorchDispatchMode):
    """Follows the operations that are dispatched and remembers how late each memory is written."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0
        self._depths: dict[int, int] = {}
        # Kept alive, so that no memory is used for something else.
        self._alive: list[Any] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        """Run one operation and note its depth."""
        options = options or {}
        out = function(*arguments, **options)
        writes = str(function).replace(".", "::", 1).split(".")[0] in WRITES
        read = [*_tensors(arguments[1:] if writes else arguments), *_tensors(options)]
        memories = {self._memory(x) for x in read}
        before = max((self._depths.get(m, 0) for m in memories), default=0)
        written = [self._memory(x) for x in _tensors(out)]
        # A view is the same memory: nothing was computed.
        computed = writes or any(m not in memories for m in written) or "_." in str(function)
        depth = before + 1 if computed else before
        for memory in written:
            self._depths[memory] = max(self._depths.get(memory, 0), depth)
        self.longest = max(self.longest, depth)
        return out

    def _memory(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        return storage._cdata


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
