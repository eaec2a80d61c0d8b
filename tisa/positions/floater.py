"""FLOATER: positions that flow along a differential equation (Liu et al., ICML 2020)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from tisa.packages import needed
from tisa.positions.base import Layers, Places, Position, PositionConfig, Prepared
from tisa.scoring.base import check_flags
from tisa.scoring.published import fill, groups, only
from tisa.shapes import Float, Tensor


class Flow(nn.Module):
    """The parameters of h(t, p): two linear maps, each given the time beside its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width + 1, width)
        self.second = nn.Linear(width + 1, width)


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
    # The adjoint calls this in the backward pass, where autocast may be on.
    with torch.autocast(state.device.type, enabled=False):
        inner = linear(torch.cat((state, now), dim=-1), weight, bias).relu()
        return linear(torch.cat((inner, now), dim=-1), second_weight, second_bias)


class Floater(Position):
    """Vectors p(t) added to q, k and v of every layer: p(t) = p(0) + ∫ h(τ, p(τ)) dτ, t = i·Δt.

    Δt = `step`; Runge–Kutta of order 4 with `substeps` steps in each Δt, gradients by the adjoint
    method (`torchdiffeq`). Parameters: `flow`, h, shared by all; `starts` (layers, 3, hidden), the
    initial state for each layer and each of q, k, v.

    Positions come one after the other: a solution takes time proportional to the length. Where no
    gradient is wanted it is kept, and solved again only for a longer input or other parameters.
    `stride` above 1 is our shortcut for training: a step of the solver for so many positions, cubic
    Hermite interpolation between them, and gradients through the solver's own steps.
    The maps to q, k and v have no biases, p stands for them; `biases=True` keeps them, as models of
    before 2026-11-19 have them. At step 0 as in the author's code: h's weights Glorot-normal, its
    biases 0, starts Glorot-uniform over all layers and widths.
    """

    def __init__(
        self,
        config: PositionConfig,
        *,
        step: float = 0.01,
        substeps: int = 5,
        stride: int = 1,
        biases: bool = False,
        layers: Layers = "each",
    ) -> None:
        super().__init__(config, layers=layers)
        check_flags("Floater", biases=biases)
        self.biases = biases
        if step <= 0 or substeps < 1:
            raise ValueError(
                f"Floater: step must be above 0 and substeps at least 1, got {step} and {substeps}"
            )
        if stride < 1:
            raise ValueError(f"Floater: stride must be at least 1, got {stride}")
        self.step = step
        self.stride = stride
        self.substeps = substeps
        self.flow = Flow(config.hidden_size)
        self.starts = nn.Parameter(torch.empty(self.copies, 3, config.hidden_size))
        self._kept: tuple[list[Tensor], Tensor] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new initial values."""
        for layer in (self.flow.first, self.flow.second):
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
        # As the author's (three, layers, hidden) has it.
        bound = math.sqrt(6 / (self.config.hidden_size * (self.copies + 3)))
        nn.init.uniform_(self.starts, -bound, bound)

    def read_reference(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take the weights of the author's encoder."""
        linear = "proj_flow.layers.{}.linear.{}"
        names = {
            f"flow.{own}.{kind}": linear.format(number, kind)
            for own, number in (("first", 0), ("second", 2))
            for kind in ("weight", "bias")
        }
        group = only(groups("Floater", state_dict, ("proj_bias", *names.values())), "Floater")
        values = {own: group[name] for own, name in names.items()}
        # (three, layers, hidden)
        values["starts"] = group["proj_bias"].movedim(1, 0)
        fill(self, values, "give the config the sizes of that model")

    def shared(self, places: Places) -> Float[Tensor, "copies three tokens hidden"]:
        """Return the solved vectors at the positions of the queries."""
        if self.stride > 1 and torch.compiler.is_compiling() and torch.is_grad_enabled():
            # Some dozen plain steps, which a compiler can put into the graph of the rest.
            solved = self._flow_from(self._start(), 0, places.keys)
        else:
            solved = self.solve(places.keys)
        return solved[:, :, places.positions]

    def project(
        self, layer: int, prepared: Prepared
    ) -> Float[Tensor, "three tokens hidden"] | None:
        """Return the layer's vectors for queries, keys and values."""
        copy = self.copy_of(layer)
        return None if copy is None else prepared.shared[copy]

    @torch.compiler.disable
    def solve(self, length: int) -> Float[Tensor, "copies three length hidden"]:
        """Return p at the first `length` positions, from memory where no gradient is wanted."""
        start, parameters = self._start(), list(self.parameters())
        if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
            return self._flow_from(start, 0, length)
        if self._kept is None or not _same(self._kept[0], parameters):
            copies = [p.detach().clone() for p in parameters]
            # One position at least: an input without tokens leaves a flow that can go on.
            self._kept = (copies, self._flow_from(start, 0, max(1, length)))
        now, solved = self._kept
        if solved.shape[2] < length:
            # A decoder asks for one position more each time: the flow goes on from the last.
            more = self._flow_from(solved[:, :, -1], solved.shape[2] - 1, length)
            solved = torch.cat((solved, more[:, :, 1:]), dim=2)
            self._kept = (now, solved)
        return solved[:, :, :length]

    def _start(self) -> Float[Tensor, "copies three hidden"]:
        return self.starts.to(torch.promote_types(self.starts.dtype, torch.float32))

    def _flow_from(
        self, state: Float[Tensor, "copies three hidden"], first: int, end: int
    ) -> Float[Tensor, "copies three positions hidden"]:
        """Return p from position `first`, where it is `state`, to before position `end`."""
        if end - first < 2:
            return state.unsqueeze(2)[:, :, : end - first]
        if self.stride > 1:
            return self._leap_from(state, first, end)
        # Exact times: in float32 steps of 0.002 are rounded by a hundredth of a per cent at t = 5.
        exact = torch.float32 if state.device.type == "mps" else torch.float64
        times = torch.arange(first, end, dtype=exact, device=state.device) * self.step
        # These tensors, not whatever the module holds by the time of the backward pass.
        parameters = tuple(self.flow.parameters())
        solved = needed("torchdiffeq", "FLOATER", "tisa[floater]").odeint_adjoint(
            lambda time, state: derivative(time, state, parameters),
            state.flatten(0, 1),
            times,
            method="rk4",
            options={"grid_constructor": self._grid},
            adjoint_params=parameters,
        )
        return solved.unflatten(1, state.shape[:2]).movedim(0, 2)

    def _leap_from(
        self, state: Float[Tensor, "copies three hidden"], first: int, end: int
    ) -> Float[Tensor, "copies three positions hidden"]:
        """Return the same from steps of `stride` positions, and interpolation between them."""
        nodes = -(-(end - 1 - first) // self.stride) + 1
        wide = self.step * self.stride
        exact = torch.float32 if state.device.type == "mps" else torch.float64
        times = first * self.step + torch.arange(nodes, dtype=exact, device=state.device) * wide
        parameters = tuple(self.flow.parameters())
        solved = _steps(state.flatten(0, 1), times, wide, parameters)
        each = times[:, None, None].expand(nodes, solved.shape[1], 1).flatten(0, 1)
        slopes = derivative(each, solved.flatten(0, 1), parameters).view_as(solved) * wide
        place = torch.arange(end - first, device=state.device)
        left = (place // self.stride).clamp_max(nodes - 2)
        u = ((place - left * self.stride) / self.stride).to(solved.dtype)[:, None, None]
        between = (
            (1 + 2 * u) * (1 - u) ** 2 * solved[left]
            + u * (1 - u) ** 2 * slopes[left]
            + u**2 * (3 - 2 * u) * solved[left + 1]
            + u**2 * (u - 1) * slopes[left + 1]
        )
        return between.unflatten(1, state.shape[:2]).movedim(0, 2)

    def _grid(self, flow: Any, states: Tensor, times: Tensor) -> Tensor:
        """Return the times of all steps: `substeps` equal ones between neighbouring positions."""
        share = torch.arange(self.substeps, dtype=times.dtype, device=times.device) / self.substeps
        inner = times[:-1, None] + times.diff()[:, None] * share
        return torch.cat((inner.flatten(), times[-1:]))

    def extra_repr(self) -> str:
        """Return what `print(module)` shows."""
        solver = f"step={self.step:g}, substeps={self.substeps}, stride={self.stride}"
        return f"{super().extra_repr()}, {solver}"


def _steps(
    state: Float[Tensor, "states width"],
    times: Float[Tensor, " nodes"],
    wide: float,
    parameters: Sequence[Tensor],
) -> Float[Tensor, "nodes states width"]:
    """Return the state at every node: Runge–Kutta of order 4 (3/8 rule), a step to every node.

    A step waits for the one before it, so on a GPU the host's time is all that counts: what each
    map adds for the time is made for all times at once, and the host never asks for a number.
    """
    # All of it: autocast would make what a map adds (`addr`) a bfloat16 on a GPU.
    with torch.autocast(state.device.type, enabled=False):
        first, bias, second, second_bias = (p.to(state.dtype) for p in parameters)
        share = torch.arange(3 * len(times) - 2, dtype=times.dtype, device=times.device) / 3
        thirds = (times[0] + share * wide).to(state.dtype)
        (inner, inner_added), (outer, outer_added) = (
            (weight[:, :-1].t(), torch.addr(offset.expand(len(thirds), -1), thirds, weight[:, -1]))
            for weight, offset in ((first, bias), (second, second_bias))
        )
        added = list(zip(inner_added.unbind(), outer_added.unbind(), strict=True))

        def slope(state: Tensor, third: int) -> Tensor:
            hidden = torch.addmm(added[third][0], state, inner).relu()
            return torch.addmm(added[third][1], hidden, outer)

        states = [state]
        for third in range(0, len(thirds) - 1, 3):
            k1 = slope(state, third)
            k2 = slope(torch.add(state, k1, alpha=wide / 3), third + 1)
            k3 = slope(torch.add(state, k2 - k1 / 3, alpha=wide), third + 2)
            k4 = slope(torch.add(state, k1 - k2 + k3, alpha=wide), third + 3)
            state = torch.add(state, k1 + k4 + 3 * (k2 + k3), alpha=wide / 8)
            states.append(state)
        return torch.stack(states)


def _same(kept: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
    """Return whether these are the parameters still.

    By their values: a fused optimiser, or whoever writes to `.data`, changes them without a trace.
    """
    return all(
        one.device == other.device and one.dtype == other.dtype and torch.equal(one, other)
        for one, other in zip(kept, parameters, strict=True)
    )
