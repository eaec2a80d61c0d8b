"""A plan is launched, and remembered, so that launching it again is quick (docs/log.md).

Triton looks at every argument of every launch, which for short sequences takes far longer than the
kernels do. So what its launcher was given is kept, twice. Under the shapes of a call, as a
`Template`: addresses are filled in, and descriptors made of them, when it is launched for other
tensors. And under the addresses as well, since a training loop often calls with the same ones again
(PyTorch's allocator hands out the same memory): then nothing is left to do. Where Triton's launcher
is not as expected (another version, another vendor) nothing is kept, and every launch goes the long
way.
"""

import inspect
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tisa.ops.triton.plan import Launch

_Again = Callable[[int], None]
# Forgetting all at once is simpler than forgetting the oldest.
_MOST_SHAPES, _MOST_CALLS, _MOST_PLACES = 1024, 1024, 64


class Shape:
    """What is remembered of the calls with inputs of certain shapes: scratch memory, launches."""

    __slots__ = ("sizes", "templates")

    def __init__(self) -> None:
        # In numbers, by what is computed.
        self.sizes: dict[Hashable, int] = {}
        # None where a launch cannot be repeated.
        self.templates: dict[Hashable, list[Template] | None] = {}


class Known:
    """What is remembered of the calls with certain inputs."""

    __slots__ = ("launches", "shape")

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        # By what is computed and the addresses of everything else that is read or written.
        self.launches: dict[Hashable, list[_Again]] = {}


_shapes: dict[Hashable, Shape] = {}
_known: dict[Hashable, Known] = {}


def known(tensors: Sequence[Tensor | None], *numbers: Hashable) -> Known:
    """Return what is remembered of a call; a plan may depend on these numbers and on no others."""
    places = tuple(None if t is None else t.data_ptr() for t in tensors)
    shape = (tuple(map(layout, tensors)), numbers)
    found = _known.get((places, shape))
    if found is None:
        kind = (shape, _alignment(places))
        if len(_known) >= _MOST_CALLS:
            _known.clear()
        if len(_shapes) >= _MOST_SHAPES:
            _shapes.clear()
        found = _known[places, shape] = Known(_shapes.setdefault(kind, Shape()))
    return found


def layout(tensor: Tensor | None) -> Hashable:
    """Return how a tensor lies, wherever that is."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)


def launch(
    call: Known,
    what: Hashable,
    inputs: Sequence[Tensor | None],
    others: Sequence[Tensor | None],
    plan: Callable[[], list[Launch]],
    device: torch.device,
) -> None:
    """Launch what `plan` returns for these tensors; of a plan that is known it is not asked.

    Beside the call's numbers and how its inputs lie, a plan may depend on `what` alone.
    """
    places = tuple(None if t is None else t.data_ptr() for t in others)
    with on(device):
        if device.type != "cuda" or _watched():
            for kernel, programs, arguments in plan():
                kernel[(programs,)](**arguments)
            return
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        found = call.launches.get((what, places))
        if found is not None:
            for again in found:
                again(stream)
            return
        here = (*(None if t is None else t.data_ptr() for t in inputs), *places)
        kind = (what, _alignment(here))
        templates = call.shape.templates.get(kind)
        if templates is None:
            made = []
            for kernel, programs, arguments in plan():
                compiled = kernel[(programs,)](**arguments)
                made.append(_template(compiled, kernel, programs, arguments, (*inputs, *others)))
            complete = [template for template in made if template is not None]
            call.shape.templates[kind] = complete if len(complete) == len(made) else None
            return
        repeats = [template.among(here) for template in templates]
        for again in repeats:
            again(stream)
        if len(call.launches) >= _MOST_PLACES:
            call.launches.clear()
        call.launches[what, places] = repeats


def _alignment(places: Sequence[int | None]) -> tuple[Hashable, ...]:
    """Return what a compiled kernel knows of addresses, and which of them are the same."""
    return tuple(
        None if place is None else (place % 16 == 0, places.index(place)) for place in places
    )


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

    place: Place
    shape: Sequence[int]
    strides: Sequence[int]
    padding: str
    metadata: Any

    def among(self, places: Sequence[int | None]) -> list[Any]:
        """Return what Triton's launcher takes for it."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        base = _Base(self.place.among(places))
        filled = SimpleNamespace(
            base=base, shape=self.shape, strides=self.strides, padding=self.padding
        )
        return [
            base.address if x is base else x for x in make_tensordesc_arg(filled, self.metadata)
        ]


class Group(tuple[Any, ...]):
    """A group of arguments with addresses among them."""

    __slots__ = ()

    def among(self, places: Sequence[int | None]) -> tuple[Any, ...]:
        """Return the group for tensors that begin at these addresses."""
        return tuple([x.among(places) if type(x) in _OPEN else x for x in self])


_OPEN = (Place, Group)


class _Base(NamedTuple):
    """What is asked for the address of a descriptor's tensor."""

    address: int

    def data_ptr(self) -> int:
        return self.address


class Template(NamedTuple):
    """A launch whose addresses are left open."""

    enter: Callable[..., None]
    head: tuple[Any, ...]
    middle: tuple[Any, ...]
    # Numbers as they are, a Place, a Described, or a Group of such.
    arguments: list[Any]

    def among(self, places: Sequence[int | None]) -> _Again:
        """Return what launches it on a stream for tensors that begin at these addresses."""
        flat: list[Any] = []
        for value in self.arguments:
            if type(value) is Described:
                flat += value.among(places)
            else:
                flat.append(value.among(places) if type(value) in _OPEN else value)
        enter, head, tail = self.enter, self.head, (*self.middle, *flat)
        return lambda stream: enter(*head, stream, *tail)


def _template(
    compiled: Any,
    kernel: Any,
    programs: int,
    arguments: dict[str, Any],
    tensors: Sequence[Tensor | None],
) -> Template | None:
    """Return the launch with its addresses left open; None if it cannot be had."""
    try:
        launcher = compiled.run
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return None
        enter, metadata, found = launcher.launch, [], inspect.unwrap(launcher.launch)
        if inspect.isfunction(found):
            # With descriptors among the arguments a Python function stands before the launcher.
            inner = inspect.getclosurevars(found).nonlocals
            enter, metadata = inner["launcher"], list(inner["tensordesc_meta"])
        given = [_left_open(arguments[name], tensors, metadata) for name in kernel.arg_names]
        middle = (
            compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None,
            compiled.packed_metadata, None, None, None,
        )  # fmt: skip
    except (AttributeError, KeyError, IndexError, ImportError, TypeError):
        return None
    return Template(enter, (programs, 1, 1), middle, given)


def _left_open(value: Any, tensors: Sequence[Tensor | None], metadata: list[Any]) -> Any:
    """Return an argument with its addresses left open; metadata: of the descriptors to come."""
    if isinstance(value, Tensor):
        return _place(value, tensors)
    if isinstance(value, TensorDescriptor):
        about = (value.shape, value.strides, value.padding, metadata.pop(0))
        return Described(_place(value.base, tensors), *about)
    if isinstance(value, tuple):
        group = Group(_left_open(x, tensors, metadata) for x in value)
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
    raise KeyError("a tensor of the plan is none of the call's")
