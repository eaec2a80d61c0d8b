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
_remembered: dict[Hashable, list[_Again]] = {}
# Plans are small; forgetting all of them at once is simpler than forgetting the oldest.
_MOST = 1024


def launch(call: Hashable, plan: Callable[[], list[Launch]], device: torch.device) -> None:
    """Launch what `plan` returns; the same `call` again does not ask for it again.

    `call` must tell everything that the plan depends on, addresses included.
    """
    with on(device):
        found = _remembered.get(call)
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
        known = [again for again in repeats if again is not None]
        if len(known) == len(launches):
            if len(_remembered) >= _MOST:
                _remembered.clear()
            _remembered[call] = known


def _watched() -> bool:
    """Whether a profiler wants to be told of every launch."""
    hook = triton.knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


def identity(*tensors: Tensor | None) -> tuple[Hashable, ...]:
    """Return what tells tensors apart: where they lie, and how."""
    return tuple(
        None if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors
    )


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
