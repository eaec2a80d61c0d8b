"""FLOATER: positions that flow along a differential equation (Liu et al., ICML 2020)."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from tisa.ops.call import exporting, needs_gradient, plain
from tisa.positions.base import Layers, Places, Position, PositionConfig, Prepared
from tisa.positions.flow import Flow, Grid, derivative, follow, stepped
from tisa.scoring.base import check_flags
from tisa.scoring.published import fill, groups, only
from tisa.shapes import Float, Tensor


class Floater(Position):
    """Vectors p(t) added to q, k and v of every layer: p(t) = p(0) + ∫ h(τ, p(τ)) dτ, t = i·Δt.

    Δt = `step`; Runge–Kutta of order 4 with `substeps` steps in each Δt, and the exact gradients of
    these steps (`tisa.positions.flow`). Parameters: `flow`, h, shared by all; `starts` (layers, 3,
    hidden), the initial state for each layer and each of q, k, v.

    Positions come one after the other: a solution takes time proportional to the length. Where no
    gradient is wanted it is kept, and solved again only for a longer input or other parameters.
    `stride` above 1 is our shortcut for training: a step of the solver for so many positions, and
    cubic Hermite interpolation between them.
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
        in_graph = exporting() or (torch.compiler.is_compiling() and torch.is_grad_enabled())
        if in_graph or self.starts.is_meta:
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
        if needs_gradient(*parameters) or not plain(*parameters):
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
        grid = Grid(first * self.step, self.step / self.substeps, end - first, self.substeps)
        # These tensors, not whatever the module holds by the time of the backward pass.
        solved = follow(state.flatten(0, 1), grid, tuple(self.flow.parameters()))
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
        # Some dozen plain steps, which a compiler can put into the graph of the rest.
        solved = stepped(state.flatten(0, 1), Grid(first * self.step, wide, nodes, 1), parameters)
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

    def extra_repr(self) -> str:
        """Return what `print(module)` shows."""
        solver = f"step={self.step:g}, substeps={self.substeps}, stride={self.stride}"
        return f"{super().extra_repr()}, {solver}"


def _same(kept: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
    """Return whether these are the parameters still.

    By their values: a fused optimiser, or whoever writes to `.data`, changes them without a trace.
    """
    return all(
        one.device == other.device and one.dtype == other.dtype and torch.equal(one, other)
        for one, other in zip(kept, parameters, strict=True)
    )
