"""FLOATER's differential equation: Runge–Kutta of order 4 from position to position, and back.

`follow` returns the states at all positions. Three ways give the same numbers:

- An operator of its own, in eager code and in compiled graphs. Its gradient is the exact one of
  the steps that were made: the states at the positions are there anyhow, from each the few steps to
  the next are made again and gone through backwards. So nothing inside a position is kept in memory
  (512 positions of 36 states, 768 wide, would take some 5 GB), and a compiler sees one node.
- PyTorch's own operations, one after the other, where torch.func, forward-mode derivatives or what
  counts operations look into it; all that autograd can do works there, at the price of that memory.
- `scan` in an exported graph, which has one step in it, for any length, and needs no package.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.nn.functional import linear

from tisa.ops.call import exporting, transformed, without_autocast
from tisa.shapes import Float, Tensor


class Flow(nn.Module):
    """The parameters of h(t, p): two linear maps, each given the time beside its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width + 1, width)
        self.second = nn.Linear(width + 1, width)


class Grid(NamedTuple):
    """Where steps are made: from `start` on, each `wide`, `substeps` from position to position."""

    start: float
    wide: float
    positions: int
    substeps: int


def derivative(
    time: Float[Tensor, "*states_1"],
    state: Float[Tensor, "states width"],
    parameters: Sequence[Tensor],
) -> Float[Tensor, "states width"]:
    """Return h(t, p) = linear(relu(linear(p, t)), t), in the dtype of the state.

    The time is one for all states, or has a line for each.
    """
    weight, bias, second_weight, second_bias = (p.to(state.dtype) for p in parameters)
    now = time.to(state.dtype).expand(state.shape[0], 1)
    with without_autocast(state.device):
        inner = linear(torch.cat((state, now), dim=-1), weight, bias).relu()
        return linear(torch.cat((inner, now), dim=-1), second_weight, second_bias)


def follow(
    state: Float[Tensor, "states width"], grid: Grid, parameters: Sequence[Tensor]
) -> Float[Tensor, "positions states width"]:
    """Return the states at every position of a grid, the first being `state`."""
    own = [p.to(state.dtype) for p in parameters]
    with without_autocast(state.device):
        if exporting():
            return _scanned(state, grid, own)
        if _looked_into():
            return stepped(state, grid, own)
        return _operator(state, *own, *grid)


def _looked_into() -> bool:
    """Whether torch.func, forward-mode derivatives or a mode (counting, faking) see operations."""
    modes = not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0
    return modes or transformed()


def stepped(
    state: Float[Tensor, "states width"], grid: Grid, parameters: Sequence[Tensor]
) -> Float[Tensor, "positions states width"]:
    """Return the same by PyTorch's own operations: a graph for autograd as long as the flow."""
    # All of it: autocast would make what a map adds (`addr`) a bfloat16 on a GPU.
    with without_autocast(state.device):
        maps = _maps(grid, [p.to(state.dtype) for p in parameters])
        states = [state]
        for step in range((grid.positions - 1) * grid.substeps):
            state = _step(state, grid.wide, maps, 3 * step)
            if (step + 1) % grid.substeps == 0:
                states.append(state)
        return torch.stack(states)


class _Maps(NamedTuple):
    """Both linear maps without the time's column, and what the time adds at every third of a step.

    A step waits for the one before it, so on a GPU the host's time is all that counts: what each
    map adds for the time is made for all times at once, and the host never asks for a number.
    """

    inner: Tensor
    outer: Tensor
    added: list[tuple[Tensor, Tensor]]


def _times(grid: Grid, like: Tensor) -> Float[Tensor, " thirds"]:
    """Return the time of every third of a step, exactly: in float32 0.002 would be rounded."""
    exact = torch.float32 if like.device.type == "mps" else torch.float64
    thirds = 3 * (grid.positions - 1) * grid.substeps + 1
    share = torch.arange(thirds, dtype=exact, device=like.device) / 3
    return (grid.start + share * grid.wide).to(like.dtype)


def _added(grid: Grid, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return what the time adds in each map, (thirds, width) each."""
    first, bias, second, second_bias = parameters
    times = _times(grid, first)
    return (
        torch.addr(bias.expand(times.shape[0], -1), times, first[:, -1]),
        torch.addr(second_bias.expand(times.shape[0], -1), times, second[:, -1]),
    )


def _maps(grid: Grid, parameters: Sequence[Tensor]) -> _Maps:
    first, _, second, _ = parameters
    inner, outer = (added.unbind() for added in _added(grid, parameters))
    return _Maps(first[:, :-1].t(), second[:, :-1].t(), list(zip(inner, outer, strict=True)))


def _step(state: Tensor, wide: float, maps: _Maps, third: int, tape: Any = None) -> Tensor:
    """Return the state a step later (3/8 rule); a tape takes what both maps are given."""

    def slope(state: Tensor, third: int) -> Tensor:
        hidden = torch.addmm(maps.added[third][0], state, maps.inner).relu()
        if tape is not None:
            tape.append((state, hidden))
        return torch.addmm(maps.added[third][1], hidden, maps.outer)

    k1 = slope(state, third)
    k2 = slope(torch.add(state, k1, alpha=wide / 3), third + 1)
    k3 = slope(torch.add(state, k2 - k1 / 3, alpha=wide), third + 2)
    k4 = slope(torch.add(state, k1 - k2 + k3, alpha=wide), third + 3)
    return torch.add(state, k1 + k4 + 3 * (k2 + k3), alpha=wide / 8)


@torch.library.custom_op("tisa::flow", mutates_args=())
def _operator(
    state: Tensor,
    first: Tensor,
    bias: Tensor,
    second: Tensor,
    second_bias: Tensor,
    start: float,
    wide: float,
    positions: int,
    substeps: int,
) -> Tensor:
    grid = Grid(start, wide, positions, substeps)
    return stepped(state, grid, (first, bias, second, second_bias))


@_operator.register_fake
def _(state: Tensor, *rest: Any) -> Tensor:
    return state.new_empty(rest[6], *state.shape)


@torch.library.custom_op("tisa::flow_backward", mutates_args=())
def _backward(
    upstream: Tensor,
    solved: Tensor,
    first: Tensor,
    bias: Tensor,
    second: Tensor,
    second_bias: Tensor,
    start: float,
    wide: float,
    substeps: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the first state and of the four parameters."""
    grid = Grid(start, wide, len(solved), substeps)
    parameters = (first, bias, second, second_bias)
    found = [torch.zeros_like(p) for p in parameters]
    with without_autocast(solved.device):
        maps = _maps(grid, parameters)
        # Of the four evaluations in each step, without an index from the host.
        times = _times(grid, first).unfold(0, 4, 3).flatten()
        state = upstream[-1].clone()
        for position in reversed(range(grid.positions - 1)):
            steps = range(position * substeps, (position + 1) * substeps)
            tape: list[tuple[Tensor, Tensor]] = []
            again = solved[position]
            for step in steps:
                again = _step(again, wide, maps, 3 * step, tape)
            asked: list[tuple[Tensor, Tensor]] = []
            for step in reversed(steps):
                # The tape's last four belong to the last step.
                four = tape[4 * (step - steps.start) :][:4]
                state = _step_back(state, wide, maps, four, asked)
            here = times[4 * steps.start : 4 * steps.stop].flip(0)
            _gather(found, asked, tape[::-1], here)
            state = state + upstream[position]
    first_grad, bias_grad, second_grad, second_bias_grad = found
    return state, first_grad, bias_grad, second_grad, second_bias_grad


def _step_back(
    grad: Tensor,
    wide: float,
    maps: _Maps,
    tape: Sequence[tuple[Tensor, Tensor]],
    asked: list[tuple[Tensor, Tensor]],
) -> Tensor:
    """Return the gradient a step earlier; `asked` takes those of both maps' outputs, last first."""
    slopes = [grad * (wide / 8 * weight) for weight in (1, 3, 3, 1)]
    # What the later slopes were made of: k4 of k1 − k2 + k3, k3 of k2 − k1/3, k2 of k1/3.
    parts = ((), (wide / 3,), (-wide / 3, wide), (wide, -wide, wide))
    state = grad
    for k in (3, 2, 1, 0):
        hidden = (slopes[k] @ maps.outer.t()) * (tape[k][1] > 0)
        asked.append((hidden, slopes[k]))
        back = hidden @ maps.inner.t()
        state = state + back
        for earlier, share in enumerate(parts[k]):
            slopes[earlier] = torch.add(slopes[earlier], back, alpha=share)
    return state


def _gather(
    found: Sequence[Tensor],
    asked: Sequence[tuple[Tensor, Tensor]],
    tape: Sequence[tuple[Tensor, Tensor]],
    times: Float[Tensor, " evaluations"],
) -> None:
    """Add a position's part to the gradients of the parameters: a product for each map."""
    for which, (weight, bias) in enumerate((found[:2], found[2:])):
        gradient = torch.stack([one[which] for one in asked])
        given = torch.stack([one[which] for one in tape])
        weight[:, :-1].addmm_(gradient.flatten(0, 1).t(), given.flatten(0, 1))
        over_states = gradient.sum(1)
        weight[:, -1] += times @ over_states
        bias += over_states.sum(0)


@_backward.register_fake
def _(upstream: Tensor, solved: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return solved.new_empty(solved.shape[1:]), *(torch.empty_like(p) for p in rest[:4])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output, *inputs[1:5])
    ctx.grid = (inputs[5], inputs[6], inputs[8])


def _differentiate(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(upstream, *ctx.saved_tensors, *ctx.grid), None, None, None, None)


def _refuse(ctx: Any, *gradients: Tensor) -> NoReturn:
    raise RuntimeError(
        "FLOATER: its flow has no second derivative by autograd; take it with torch.func "
        "(torch.func.grad of torch.func.grad), which looks into the steps"
    )


_operator.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_refuse)


def _scanned(
    state: Float[Tensor, "states width"], grid: Grid, parameters: Sequence[Tensor]
) -> Float[Tensor, "positions states width"]:
    """Return the same with one step for all of them in the graph."""
    # Only here: older versions of PyTorch load their compiler with it.
    from torch._higher_order_ops.scan import scan

    # One position more: a graph for any length must not ask whether there is more than one.
    steps = grid.positions * grid.substeps
    first, _, second, _ = parameters
    maps = first[:, :-1].t(), second[:, :-1].t()
    places = 3 * torch.arange(steps, device=state.device).unsqueeze(-1)
    places = places + torch.arange(4, device=state.device)
    further = grid._replace(positions=grid.positions + 1)
    inner, outer = (added[places] for added in _added(further, parameters))

    def step(state: Tensor, added: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        pairs = list(zip(added[0].unbind(), added[1].unbind(), strict=True))
        later = _step(state, grid.wide, _Maps(*maps, pairs), 0)
        return later, later.clone()

    _, states = scan(step, state.clone(), (inner, outer))
    whole = torch.cat((state[None], states))
    return whole[grid.substeps * torch.arange(grid.positions, device=state.device)]
