"""A plan is launched, and remembered, so that launching it again is quick (docs/log.md).

Triton looks at every argument of every launch, which for short sequences takes far longer than the
kernels do. So what its launcher was given is kept under the shapes of a call, as a `Template`:
addresses are filled in when it is launched for other tensors. What is called is the launcher of a
compiled kernel (`CompiledKernel.run`), as Triton itself calls it. Where that is not as expected
(another version) nothing is kept, every launch goes the long way, and that is said: in a warning,
and by `tisa doctor` (`long_way`).
"""

import inspect
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tisa.ops.triton.plan import Launch

# Forgetting all at once is simpler than forgetting the oldest.
_MOST_SHAPES = 1024


class Shape:
    """What is remembered of the calls with inputs of certain shapes: scratch memory, launches."""

    __slots__ = ("sizes", "templates")

    def __init__(self) -> None:
        # In numbers, by what is computed.
        self.sizes: dict[Hashable, int] = {}
        self.templates: dict[Hashable, list[Template]] = {}


_shapes: dict[Hashable, Shape] = {}


def known(tensors: Sequence[Tensor | None], *numbers: Hashable) -> Shape:
    """Return what is remembered of a call; a plan may depend on these numbers and on no others."""
    shape = (*map(layout, tensors), numbers)
    found = _shapes.get(shape)
    if found is None:
        if len(_shapes) >= _MOST_SHAPES:
            _shapes.clear()
        found = _shapes[shape] = Shape()
    return found


def layout(tensor: Tensor | None) -> Hashable:
    """Return how a tensor lies, wherever that is."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)


def launch(
    call: Shape,
    what: Hashable,
    inputs: Sequence[Tensor | None],
    others: Sequence[Tensor | None],
    plan: Callable[[], list[Launch]],
    device: torch.device,
) -> None:
    """Launch what `plan` returns for these tensors; of a plan that is known it is not asked.

    Beside the call's numbers and how its inputs lie, a plan may depend on `what` alone.
    """
    with on(device):
        if not compiles(device) or _watched():
            for kernel, programs, arguments in plan():
                kernel[(programs,)](**arguments)
            return
        here = [None if t is None else t.data_ptr() for t in (*inputs, *others)]
        kind = (what, _alignment(here))
        templates = call.templates.get(kind)
        if templates is None:
            made = _launched(plan(), (*inputs, *others))
            if made is not None:
                call.templates[kind] = made
            return
        stream = current_stream(device.index)
        for template in templates:
            template.launch(here, stream)


def _launched(plan: Sequence[Launch], tensors: Sequence[Tensor | None]) -> list["Template"] | None:
    """Launch a plan by Triton's own means, and return how to do it again; None if it cannot be."""
    compiled = [(kernel[(n,)](**arguments), kernel, n, arguments) for kernel, n, arguments in plan]
    try:
        return [template_of(*launch, tensors) for launch in compiled]
    except UnexpectedError as reason:
        if str(reason) not in long_way:
            long_way.append(str(reason))
            warnings.warn(
                f"tisa: kernels are launched the long way, which costs short sequences time: "
                f"{reason} (Triton {triton.__version__})",
                stacklevel=2,
            )
        return None


class UnexpectedError(Exception):
    """Triton's launcher, or a plan, is not as this module knows it."""


# Why launches were not remembered in this process: each reason once.
long_way: list[str] = []
# What a launcher is called with before the kernel's arguments; some versions name the first alone.
_TAKES = (
    "gridX", "gridY", "gridZ", "stream", "function",
    "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook",
)  # fmt: skip


def _launcher(compiled: Any) -> tuple[Callable[..., None], Any, Any]:
    """Return the launcher of a compiled kernel, its function, and what the launcher knows of it."""
    try:
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    except AttributeError as missing:
        raise UnexpectedError(f"a compiled kernel has no {missing.name}") from missing
    *names, rest = inspect.signature(run).parameters.values()
    taken = tuple(parameter.name for parameter in names)
    if taken not in (_TAKES, _TAKES[:5]) or rest.kind != rest.VAR_POSITIONAL:
        raise UnexpectedError(
            f"its launcher takes {', '.join(taken)}, expected {', '.join(_TAKES)}"
        )
    return run, function, metadata


def _alignment(places: Sequence[int | None]) -> Hashable:
    """Return what a compiled kernel knows of addresses, and which of them are the same."""
    there = [place for place in places if place]
    if len(set(there)) == len(there) and not any(place % 16 for place in there):
        return ()
    return tuple([place and (place % 16 == 0, places.index(place)) for place in places])


def compiles(device: torch.device) -> bool:
    """Whether what Triton launches there is a compiled kernel of a launcher that is known here."""
    return device.type == "cuda"


def current_stream(device: int) -> int:
    """Return the address of the stream that PyTorch launches on."""
    return torch._C._cuda_getCurrentRawStream(device)


def _watched() -> bool:
    """Whether a profiler wants to be told of every launch."""
    hook = triton.knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


def on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which kernels are launched on that device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


class Place(NamedTuple):
    """An address: so many bytes after the beginning of one of the call's tensors."""

    tensor: int
    offset: int

    def among(self, places: Sequence[int | None]) -> int:
        """Return the address for tensors that begin at these."""
        begin = places[self.tensor]
        assert begin is not None
        return begin + self.offset


class Described(NamedTuple):
    """A descriptor whose address is left open; it keeps no tensor alive."""

    base: Place
    shape: Sequence[int]
    strides: Sequence[int]
    padding: str
    # What else a version of Triton has in a descriptor; its launcher asks for all of it.
    more: Mapping[str, Any] = MappingProxyType({})

    def among(self, places: Sequence[int | None]) -> SimpleNamespace:
        """Return what Triton's launcher takes for a descriptor of tensors that begin at these."""
        base = _Base(self.base.among(places))
        return SimpleNamespace(
            base=base, shape=self.shape, strides=self.strides, padding=self.padding, **self.more
        )


class Group(tuple[Any, ...]):
    """A group of arguments with addresses among them."""

    __slots__ = ()

    def among(self, places: Sequence[int | None]) -> tuple[Any, ...]:
        """Return the group for tensors that begin at these addresses."""
        return tuple([x.among(places) if type(x) in _OPEN else x for x in self])


_OPEN = (Place, Described, Group)
# The sizes of a tile are compiled into a kernel.
_DESCRIBED = ("base", "shape", "strides", "block_shape", "padding")


class _Base(NamedTuple):
    """What is asked for the address of a descriptor's tensor."""

    address: int

    def data_ptr(self) -> int:
        return self.address


class Template(NamedTuple):
    """A launch whose addresses are left open."""

    run: Callable[..., None]
    programs: int
    # The function, what the launcher knows of it, and no hooks.
    middle: tuple[Any, ...]
    # Numbers as they are, a Place, a Described, or a Group of such.
    arguments: Group
    # As Triton compiled it.
    compiled: Any
    # Programs along the grid's second axis.
    rows: int = 1

    def launch(self, places: Sequence[int | None], stream: int) -> None:
        """Launch it on a stream for tensors that begin at these addresses."""
        self.run(self.programs, self.rows, 1, stream, *self.middle, *self.arguments.among(places))


def template_of(
    compiled: Any,
    kernel: Any,
    programs: int,
    arguments: dict[str, Any],
    tensors: Sequence[Tensor | None],
) -> Template:
    """Return the launch with its addresses left open."""
    run, function, metadata = _launcher(compiled)
    given = Group(_left_open(arguments[name], tensors) for name in kernel.arg_names)
    return Template(run, programs, (function, metadata, None, None, None), given, compiled)


def _left_open(value: Any, tensors: Sequence[Tensor | None]) -> Any:
    """Return an argument with its addresses left open."""
    if isinstance(value, Tensor):
        return _place(value, tensors)
    if isinstance(value, TensorDescriptor):
        more = {f.name: getattr(value, f.name) for f in fields(value) if f.name not in _DESCRIBED}
        base = _place(value.base, tensors)
        return Described(base, value.shape, value.strides, value.padding, more)
    if isinstance(value, tuple):
        group = Group(_left_open(x, tensors) for x in value)
        return group if any(type(x) in _OPEN for x in group) else value
    return value


def _place(value: Tensor, tensors: Sequence[Tensor | None]) -> Place:
    """Return where a tensor lies: where one of the call's begins, or inside of one."""
    address = value.data_ptr()
    for number, tensor in enumerate(tensors):
        if tensor is not None and tensor.data_ptr() == address:
            return Place(number, 0)
    for number, tensor in enumerate(tensors):
        # Parts of what was allocated as one; keys and values may lie within each other's strides.
        if tensor is not None and tensor.is_contiguous():
            offset = address - tensor.data_ptr()
            if 0 <= offset < tensor.numel() * tensor.element_size():
                return Place(number, offset)
    raise UnexpectedError("a tensor of the plan is none of the call's")
