"""A scoring function asked in C++ (native.cpp) for its scores and its band, from eager code.

Whether the kernels of `tisa.scoring.triton` know a function takes Python longer to find out than
they take. So what was found out is kept, for as long as nothing about the module has changed: its
attributes, its parameters, its parts, what is hooked into it.
"""

from collections.abc import Hashable, Sequence
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tisa.offsets import default_query_start, span
from tisa.ops import repeats
from tisa.ops.triton import native
from tisa.ops.triton.launching import Template, UnexpectedError, on, template_of
from tisa.scoring.layers import HOOKS, kernels_of, kind_of
from tisa.scoring.tisa import TISA
from tisa.scoring.triton import launches
from tisa.scoring.triton.launches import Plan


class Asked:
    """What is known of a module, and what asks it in C++, by the kind of call."""

    def __init__(self, module: nn.Module) -> None:
        # None where it must be looked at each time.
        self.usable = kind_of(module) is not None and kernels_of(module) is launches
        # Not the module itself, which would live as long as what is known of it.
        self.parts = list(module.modules())[1:]
        self.stamps = [stamp(part) for part in (module, *self.parts)]
        self.parameters = list(module.parameters())
        self.scorers: dict[Hashable, Any] = {}

    def fits(self, module: nn.Module) -> bool:
        """Return whether the module is what it was."""
        for part, before in zip((module, *self.parts), self.stamps, strict=True):
            now = stamp(part)
            if len(now) != len(before) or not all(map(is_, now, before)):
                return False
        return True


_asked: WeakKeyDictionary[nn.Module, Asked] = WeakKeyDictionary()


def stamp(part: nn.Module) -> list[object]:
    """Return all that `kind_of` and the kernels look at, but numbers; compared by identity."""
    return [
        *vars(part).values(), *part._parameters.values(), *part._buffers.values(),
        *part._modules.values(), *(len(getattr(part, name)) for name in HOOKS),
    ]  # fmt: skip


def ask(
    module: nn.Module, queries: int, keys: int, query_start: object, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None] | None:
    """Return scores, and the band for that dtype if there is one; None where Python has to ask."""
    if query_start is not None and type(query_start) is not int:
        return None
    known = _asked.get(module)
    if known is None or not known.fits(module):
        known = _asked[module] = Asked(module)
    if not known.usable:
        return None
    kind = (queries, keys, query_start, dtype)
    if kind not in known.scorers:
        if captured(known.parameters[0]):
            return None
        known.scorers[kind] = _recorded(module, known.parameters, queries, keys, query_start, dtype)
    scorer, constant = known.scorers[kind]
    found = None if scorer is None else repeats.native.score(scorer, known.parameters)
    return found if found is None or constant is None else (found[0], constant)


def captured(tensor: Tensor) -> bool:
    """Return whether a CUDA graph is captured, in whose memory nothing is to be that is kept."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _recorded(
    module: Any,
    parameters: Sequence[Tensor],
    queries: int,
    keys: int,
    query_start: int | None,
    dtype: torch.dtype | None,
) -> tuple[Any, Tensor | None]:
    """Return what asks the module in C++ for calls of this kind (None if it cannot), and a band.

    The band, if it never changes: of most functions no parameter moves it.
    """
    length, heads, constant = span(queries, keys), module.num_attention_heads, None
    if not length:
        return None, None
    start = default_query_start(queries, keys) if query_start is None else query_start
    with torch.no_grad(), on(parameters[0].device):
        numbers, table, fixed = launches.read([module], length)
        found = numbers.new_empty(heads, length)
        blocks = -(-length // fixed.BLOCK)
        sums = numbers.new_empty(blocks, numbers.numel())
        first = -(queries - 1) - start
        forward = [launches.scores_plan(numbers, table, found, None, first, fixed)]
        made = [found]
        if dtype is not None and not isinstance(module, TISA):
            constant = module.band(dtype)
        elif dtype is not None:
            band = torch.empty(heads, 2, dtype=torch.int32, device=numbers.device)
            made.append(band)
            eps = torch.finfo(dtype).eps / 16
            forward.append(launches.bands_plan(numbers, band, heads, eps, module.num_kernels))
        gradient = torch.zeros_like(found)
        backward = [launches.gradients_plan(numbers, table, gradient, sums, None, first, fixed)]
        try:
            given = (numbers, table)
            passes = [
                native.pass_of(_templates(forward, (*given, *made)), made),
                native.pass_of(_templates(backward, (*given, gradient, sums)), [sums]),
            ]
        except UnexpectedError:
            return None, None
    if None in passes:
        return None, None
    return repeats.native.scorer_of(*passes, table, parameters), constant


def _templates(plans: list[Plan], tensors: tuple[Tensor | None, ...]) -> list[Template]:
    """Launch plans once, and return how to do it again for other tensors."""
    return [
        template_of(launches.launch(plan), plan.kernel, plan.grid[0], plan.arguments, tensors)
        ._replace(rows=plan.grid[1])
        for plan in plans
    ]  # fmt: skip
