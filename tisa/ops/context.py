"""What goes on around a call: gradients wanted, transforms that look into it, autocast."""

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext

import torch

from tisa.shapes import Tensor

PLAIN = (torch.Tensor, torch.nn.Parameter, type(None))


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd will ask for the gradient of one of these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def forward_mode() -> bool:
    """Whether forward-mode derivatives (jvp) are being taken."""
    return torch.autograd.forward_ad._current_level >= 0


def transformed() -> bool:
    """Whether torch.func or forward-mode derivatives look into the call."""
    # Not `is not None`: torch.compile wraps what it finds, and finds something where there is None.
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return forward_mode() or isinstance(interpreter, torch._C._functorch.CInterpreter)


def plain(*tensors: object) -> bool:
    """Whether these are ordinary tensors (or None) in eager code that nothing looks into."""
    return (
        not torch.compiler.is_compiling()
        and all(type(t) in PLAIN for t in tensors)
        and torch._C._len_torch_dispatch_stack() == 0
        and not transformed()
    )


def identity(*tensors: Tensor | None) -> tuple[Hashable, ...]:
    """Return what tells tensors apart: where they lie, and how."""
    return tuple(
        None if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors
    )


def exporting() -> bool:
    """Whether the graph is made for torch.export, to be run without this package."""
    # Not torch.compiler.is_exporting(): up to PyTorch 2.11 a graph for torch.compile is told "yes".
    return torch.compiler._is_exporting_flag


def autocast_enabled(device: torch.device) -> bool:
    """Whether autocast is on for that device; asking for "meta" is an error."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which dtypes are left as they are.

    One that does nothing where autocast is off: an exported graph would keep the other one as a
    graph of its own.
    """
    if autocast_enabled(device):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
