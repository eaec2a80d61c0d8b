"""A plan is launched, and remembered, so that launching it again is quick (docs/log.md).

Triton looks at every argument of every launch, which for short sequences takes far longer than the
kernels do. A training loop calls with the same addresses again and again, because PyTorch's
allocator hands out the same memory; so what Triton's launcher was given is kept under addresses,
shapes and numbers of the call. Where Triton's launcher is not as expected (another version, another
vendor) nothing is kept, and every launch goes the long way.
"""

import inspect
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tisa.attention.triton.plan import Launch

_Again = Callable[[int], None]
# Forgetting all at once is simpler than forgetting the oldest.
_MOST_CALLS, _MOST_PLACES = 1024, 64


class Known:
    """What is remembered of the calls with certain inputs: scratch memory, launches."""

    __slots__ = ("launches", "sizes")

    def __init__(self) -> None:
        # By the addresses of what is written, and of what else is read.
        self.launches: dict[Hashable, list[_Again]] = {}
        # In numbers, by what is computed.
        self.sizes: dict[Hashable, int] = {}


_known: dict[Hashable, Known] = {}


def known(call: Hashable) -> Known:
    """Return what is remembered of a call; it must tell all that a plan depends on."""
    found = _known.get(call)
    if found is None:
        if len(_known) >= _MOST_CALLS:
            _known.clear()
        found = _known[call] = Known()
    return found


def launch(
    call: Known, places: Hashable, plan: Callable[[], list[Launch]], device: torch.device
) -> None:
    """Launch what `plan` returns; for the same places again it is not asked again."""
    with on(device):
        found = call.launches.get(places)
        if found is not None and not _watched():
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            for again in found:
                again(stream)
            return
        launches = plan()
        repeats = []
        for kernel, programs, arguments in launches:
            compiled = kernel[(programs,)](**arguments)
            repeats.append(_repeatable(compiled, kernel, programs, arguments))
        complete = [again for again in repeats if again is not None]
        if len(complete) == len(launches):
            if len(call.launches) >= _MOST_PLACES:
                call.launches.clear()
            call.launches[places] = complete


def _watched() -> bool:
    """Whether a profiler wants to be told of every launch."""
    hook = triton.knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


def on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which kernels are launched on that device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _repeatable(
    compiled: Any, kernel: Any, programs: int, arguments: dict[str, Any]
) -> _Again | None:
    """Return a function that launches the kernel again on a stream; None if it cannot be had."""
    try:
        launcher = compiled.run
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return None
        enter, metadata, found = launcher.launch, [], inspect.unwrap(launcher.launch)
        if inspect.isfunction(found):
            # With descriptors among the arguments a Python function stands before the launcher.
            inner = inspect.getclosurevars(found).nonlocals
            enter, metadata = inner["launcher"], list(inner["tensordesc_meta"])
        flat: list[Any] = []
        for name in kernel.arg_names:
            value = arguments[name]
            if isinstance(value, TensorDescriptor):
                flat += _encoded(value, metadata.pop(0))
            else:
                flat.append(value.data_ptr() if isinstance(value, Tensor) else value)
        head = (programs, 1, 1)
        tail = (
            compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None,
            compiled.packed_metadata, None, None, None, *flat,
        )  # fmt: skip
    except (AttributeError, KeyError, IndexError, ImportError, TypeError):
        return None
    return lambda stream: enter(*head, stream, *tail)


def _encoded(value: TensorDescriptor, metadata: Any) -> list[Any]:
    from triton.backends.nvidia.driver import make_tensordesc_arg

    found = make_tensordesc_arg(value, metadata)
    return [x.data_ptr() if isinstance(x, Tensor) else x for x in found]
