"""The scores of all layers at once: one evaluation in place of one for each layer.

Every layer of a transformer has a scoring function of its own, and each is a dozen small operations
on heads · span numbers, which take longer to launch than to do. Functions of one class with the
same settings differ in their parameters alone. So those are stacked, and one function is evaluated
over the stack (`torch.func.vmap`): no formula stands twice, and the numbers are those of each
function by itself. Gradients are autograd's.

On a GPU, from eager code, one kernel makes all scores and another all gradients (`triton/`): the
formulas stand there a second time, with their derivatives, tested against the modules.

A function that is not one of this package's is asked by itself. So is one whose parameters are not
here (FSDP gathers a layer's when its turn comes), that draws at random, or that somebody has hooked
into.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from importlib.util import find_spec
from inspect import signature
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vmap

from tisa.scoring.alibi import ALiBi
from tisa.scoring.kerple import KerpleLog, KerplePower
from tisa.scoring.near_far import NearFar
from tisa.scoring.t5 import T5Buckets
from tisa.scoring.tisa import TISA
from tisa.scoring.tisa_v2 import TISAv2
from tisa.shapes import Float, Int, Int32, Tensor

OURS = (ALiBi, KerpleLog, KerplePower, NearFar, T5Buckets, TISA, TISAv2)
HAS_TRITON = find_spec("triton") is not None
GPUS = ("cuda",)
# What makes two functions of a class two: the arguments that they were made with.
SETTINGS = {kind: ("training", *list(signature(kind).parameters)) for kind in OURS}
# What code around a module leaves in it that wants to be called with it.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def scores_of(
    functions: "Iterable[Callable[..., Tensor]] | Grouped",
    query_length: int,
    key_length: int | None = None,
    *,
    query_start: int | Int[Tensor, ""] | None = None,
) -> list[Float[Tensor, "heads span"]]:
    """Return the score vector of each function: `function(query_length, key_length, …)`."""
    lengths, told = (query_length, key_length), {"query_start": query_start}

    def of_one(function: Callable[..., Tensor]) -> Tensor:
        return function(*lengths, **told)

    def of_many(alike: Sequence[Any]) -> Sequence[Tensor]:
        launches = kernels_of(alike[0], query_start)
        if launches is not None:
            made: Sequence[Tensor] = launches.scores(alike, *lengths, query_start)
            return made
        first, values = _stacked(alike)
        if not values:
            return [_made_once(first, *lengths, query_start)] * len(alike)
        if len(alike) == 1:
            return [of_one(first)]
        return vmap(lambda each: functional_call(first, each, lengths, told))(values).unbind(0)

    return _grouped(functions).each(of_one, of_many)


# Of functions that nothing changes, for the lengths of a few calls.
_MOST = 16
_made: dict[Hashable, Tensor] = {}


def _made_once(function: Any, queries: int, keys: int | None, query_start: Any) -> Tensor:
    """Return the scores of a function without parameters; on a GPU those of the call before.

    There a dozen small operations take the host longer than an attention call.
    """
    told = {"query_start": query_start}
    tensors = list(function.buffers())
    if (
        isinstance(query_start, Tensor)
        or not _eager(tensors)
        or any(t.device.type not in GPUS for t in tensors)
        or (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return function(queries, keys, **told)
    kind = kind_of(function), queries, keys, query_start
    if kind not in _made:
        if len(_made) >= _MOST:
            _made.clear()
        # Made here, they may be needed in training later.
        with torch.inference_mode(False), torch.no_grad():
            _made[kind] = function(queries, keys, **told)
    return _made[kind]


def bands_of(
    functions: "Iterable[Callable[..., Tensor]] | Grouped", dtype: torch.dtype
) -> list[Int32[Tensor, "heads 2"] | None]:
    """Return the band of each function, `function.band(dtype)`; None where it has none."""

    def of_one(function: Any) -> Tensor | None:
        return function.band(dtype) if hasattr(function, "band") else None

    def of_many(alike: Sequence[Any]) -> Sequence[Tensor | None]:
        if not isinstance(alike[0], TISA):
            # Of no other function do parameters move the band.
            return [of_one(alike[0])] * len(alike)
        launches = kernels_of(alike[0])
        if launches is not None:
            made: Sequence[Tensor] = launches.bands(alike, dtype)
            return made
        if len(alike) == 1:
            return [of_one(alike[0])]
        values = _stacked(alike)[1]
        asked = _Band(alike[0], dtype)
        with torch.no_grad():
            of_all = vmap(lambda each: functional_call(asked, each, ()))
            return of_all({f"of.{name}": value for name, value in values.items()}).unbind(0)

    return _grouped(functions).each(of_one, of_many)


def at_hand(parameter: Tensor) -> bool:
    """Return whether this process holds all of it: FSDP gathers a layer when its turn comes."""
    if type(parameter) is not nn.Parameter and hasattr(parameter, "device_mesh"):
        return False
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(parameter):
        return True
    # The first FSDP leaves the shape and takes the memory away; what has memory has an address.
    return parameter.data_ptr() != 0 or parameter.numel() == 0


def kind_of(function: object) -> Hashable | None:
    """Return what functions that can be evaluated together have in common; None if none can.

    Every layer's function is asked in every forward pass, so this goes by what modules keep their
    parts in: asking them by name takes the host five times as long.
    """
    if type(function) not in OURS:
        return None
    assert isinstance(function, nn.Module)
    parts: list[Any] = [function]
    settings: list[Any] = []
    places = set()
    for part in parts:
        kept = vars(part)
        # accelerate puts a function of its own in place of the class's.
        if any(kept[name] for name in HOOKS) or "forward" in kept:
            return None
        parts += kept["_modules"].values()
        # Dynamo of torch 2.11 cannot go through all that a module keeps.
        settings += [getattr(part, name, None) for name in SETTINGS.get(type(part), ())]
        for parameter in kept["_parameters"].values():
            if not at_hand(parameter):
                return None
            places.add((parameter.device, parameter.dtype))
        for buffer in kept["_buffers"].values():
            places.add((buffer.device, buffer.dtype))
    if isinstance(function, TISAv2) and function.training and function.kernel_dropout:
        return None
    return type(function), tuple(settings), frozenset(places)


class Grouped:
    """Functions, and which of them are asked together: worth keeping for one forward pass."""

    def __init__(self, functions: Iterable[Any]) -> None:
        self.functions = list(functions)
        self.groups: dict[Hashable, dict[int, Any]] = {}
        for function in self.functions:
            kind = kind_of(function)
            # By itself under a name that nothing else has.
            key = ("alone", id(function)) if kind is None else kind
            self.groups.setdefault(key, {})[id(function)] = function

    def at_hand(self) -> "Grouped":
        """Return those that can be evaluated with others, here and now."""
        found = Grouped(())
        found.groups = {k: v for k, v in self.groups.items() if not _is_alone(k)}
        found.functions = [f for group in found.groups.values() for f in group.values()]
        return found

    def each(
        self, of_one: Callable[[Any], Any], of_many: Callable[[Sequence[Any]], Sequence[Any]]
    ) -> list[Any]:
        """Return something of each function, asked of those that are alike together."""
        found: dict[int, Any] = {}
        for kind, group in self.groups.items():
            alike = list(group.values())
            answers = [of_one(alike[0])] if _is_alone(kind) else of_many(alike)
            found |= dict(zip(group, answers, strict=True))
        return [found[id(function)] for function in self.functions]


def _is_alone(kind: Hashable) -> bool:
    return isinstance(kind, tuple) and kind[0] == "alone"


def _grouped(functions: Iterable[Any] | Grouped) -> Grouped:
    return functions if isinstance(functions, Grouped) else Grouped(functions)


def kernels_of(function: nn.Module, query_start: object = None) -> ModuleType | None:
    """Return what launches GPU kernels for such functions, or None where nothing does."""
    tensors = [*function.parameters(), *function.buffers()]
    if isinstance(query_start, Tensor):
        tensors.append(query_start)
    if not HAS_TRITON or any(t.device.type not in GPUS for t in tensors) or not _eager(tensors):
        return None
    # Here: a machine without a GPU may have no Triton, and importing it takes a while.
    from tisa.scoring.triton import launches

    return launches if launches.takes(function) else None


def _eager(tensors: list[Tensor]) -> bool:
    """Return whether these are ordinary tensors in eager code that nothing looks into."""
    return (
        not torch.compiler.is_compiling()
        and all(type(t) in (Tensor, nn.Parameter) for t in tensors)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch.autograd.forward_ad._current_level < 0
    )


def _stacked(alike: Sequence[Any]) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return one of the functions, and every parameter of all, (functions, heads, …)."""
    first = alike[0]
    names = [name for name, _ in first.named_parameters()]
    # Not `get_parameter`, which torch.func's are none for.
    return first, {name: torch.stack([attrgetter(name)(f) for f in alike]) for name in names}


class _Band(nn.Module):
    """A function's band as a forward pass, for `functional_call`."""

    def __init__(self, of: TISA, dtype: torch.dtype) -> None:
        super().__init__()
        self.of, self.dtype = of, dtype

    def forward(self) -> Int32[Tensor, "heads 2"]:
        """Return the band."""
        band = self.of.band(self.dtype)
        assert band is not None
        return band
