"""Any scoring function brought to a layer's heads, down the divergence that `fit` minimises.

1. Starts: the function's own initial values, drawn with fixed seeds. Where it has TISA's kernels in
   it (`NearFar`), these are fitted to what the rest of the function leaves of the free curve.
2. Each start comes near the free curve of least divergence: least squares, an offset counting by
   the attention that it carries, up to a constant, which a softmax does not see.
3. The best start goes down the divergence itself.

Beyond the offsets seen a function goes on by its formula. It is held there at the level of the
curve's ends, as kernels are, but by a thousandth of the force: enough for numbers that nothing else
holds (T5's far buckets), and little for a tail that falls for ever, as it is meant to.

Nothing is known of a function but its scores and their gradients. A head keeps the best numbers
that it had, where its curve depends on its own rows of the parameters alone; else all heads keep
those of the least sum.
"""

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from tisa.fitting import fit_kernels
from tisa.hf.fit import Aim, Anchor, descend
from tisa.scoring import TISA, ScoringFunction
from tisa.shapes import Float, Int, Tensor

STARTS, DOWN_STEPS = 2, 120
# Rounds of steps; a number that has grown takes larger ones in the next.
ROUNDS, NEAR_STEPS = 4, 60
RATE = 0.05
FORCE = 0.001

Cost = Callable[[], tuple[Float[Tensor, " heads"], list[Tensor]]]


def fit_by_descent(scoring: ScoringFunction, aim: Aim) -> Float[Tensor, " heads"]:
    """Set the function's parameters to the best that was found; return what is left of each head.

    The random numbers of the caller are left alone, and those used here are always the same.
    """
    parameters = [p for p in scoring.parameters() if p.requires_grad]
    if not any(p.numel() for p in parameters):
        return aim.divergence(scoring.scores(aim.offsets))[0]
    curve, held = aim.anchored(aim.best_curve())
    anchor = held._replace(weights=FORCE * held.weights)
    free = _Free(curve, anchor, aim)
    best: _Best | None = None
    place = aim.mass.device
    with torch.random.fork_rng([place] if place.type == "cuda" else []):
        for seed in range(STARTS):
            torch.manual_seed(seed)
            tried = copy.deepcopy(scoring)
            if hasattr(tried, "reset_parameters"):
                tried.reset_parameters()  # type: ignore[operator]
            free.place_kernels(tried)
            own = [p for p in tried.parameters() if p.requires_grad]
            # Rows are a head's own or not whatever the values are; some values hide it.
            best = best or _Best(_are_rows_of_heads(tried, own, aim.offsets), own)
            for _ in range(ROUNDS):
                _down(own, partial(free.cost, tried, own), NEAR_STEPS, best)
            if not hasattr(tried, "reset_parameters"):
                break
    assert best is not None
    down = _Best(best.rows, best.kept)
    for parameter, kept in zip(parameters, best.kept, strict=True):
        parameter.copy_(kept)
    _down(parameters, partial(_divergence, scoring, parameters, aim, anchor), DOWN_STEPS, down)
    for parameter, kept in zip(parameters, down.kept, strict=True):
        parameter.copy_(kept)
    return aim.divergence(scoring.scores(aim.offsets))[0]


class _Free:
    """The free curve and its far ends, as points that a function is to come near."""

    def __init__(self, curve: Float[Tensor, "heads span"], anchor: Anchor, aim: Aim) -> None:
        self.offsets = torch.cat((aim.offsets, anchor.offsets))
        self.curve = torch.cat((curve, anchor.level), 1)
        # Near its minimum the divergence is half the squared deviation.
        mass = aim.mass + aim.divergence(curve)[1] / 2
        self.weights = torch.cat((mass + 1e-9, 2 * anchor.weights), 1)

    def place_kernels(self, scoring: ScoringFunction) -> None:
        """Fit TISA's kernels inside a function to what the rest of the function leaves."""
        for part in scoring.modules():
            if not isinstance(part, TISA) or not part.num_kernels:
                continue
            rest = scoring.scores(self.offsets) - part.scores(self.offsets)
            kernels = fit_kernels(
                self.curve - rest, self.offsets, part.num_kernels, weights=self.weights,
                up_to_constant=True,
            )  # fmt: skip
            part.kernel_amplitudes.copy_(kernels.amplitude)
            part.kernel_sharpness.copy_(kernels.sharpness)
            part.kernel_offsets.copy_(kernels.offset)

    def cost(
        self, scoring: ScoringFunction, parameters: list[nn.Parameter]
    ) -> tuple[Float[Tensor, " heads"], list[Tensor]]:
        """Return each head's squared deviation, up to a constant, and its gradients."""
        with torch.enable_grad():
            cost = _spread(scoring.scores(self.offsets) - self.curve, self.weights)
            return cost.detach(), _gradients([cost], parameters, [torch.ones_like(cost)])


class _Best:
    """The best parameters so far: of each head, or of all heads together."""

    def __init__(self, rows: bool, parameters: list[nn.Parameter] | list[Tensor]) -> None:
        self.rows = rows
        self.kept = [p.detach().clone() for p in parameters]
        self.least: Tensor | None = None

    def keep(self, cost: Float[Tensor, " heads"], parameters: list[nn.Parameter]) -> None:
        """Take what costs less than before; what is no number never does."""
        cost = cost if self.rows else cost.sum(0, keepdim=True)
        if self.least is None:
            self.least = torch.full_like(cost, torch.inf)
        better = cost < self.least
        self.least[better] = cost[better]
        for kept, parameter in zip(self.kept, parameters, strict=True):
            if self.rows:
                kept[better] = parameter.detach()[better]
            elif bool(better):
                kept.copy_(parameter)


def _down(parameters: list[nn.Parameter], cost: Cost, steps: int, best: _Best) -> None:
    """Take Adam steps in place, in proportion to the size of each number; keep the best."""
    begun = [p.detach().clone() for p in parameters]
    sizes = [p.abs().clamp_min(1.0) for p in begun]
    moved = [torch.zeros_like(p) for p in begun]

    def gradients() -> list[Tensor]:
        found, by_parameter = cost()
        best.keep(found, parameters)
        return [g * size for g, size in zip(by_parameter, sizes, strict=True)]

    def move() -> None:
        for parameter, *at in zip(parameters, begun, sizes, moved, strict=True):
            parameter.copy_(at[0] + at[1] * at[2])

    descend(moved, gradients, steps, [RATE] * len(moved), after=move)
    best.keep(cost()[0], parameters)


def _divergence(
    scoring: ScoringFunction, parameters: list[nn.Parameter], aim: Aim, anchor: Anchor
) -> tuple[Float[Tensor, " heads"], list[Tensor]]:
    """Return each head's divergence with what its far ends cost, and the gradients."""
    with torch.enable_grad():
        curve = scoring.scores(aim.offsets)
        ends = scoring.scores(anchor.offsets) - anchor.level
        held = _spread(ends, anchor.weights)
    loss, by_curve = aim.divergence(curve.detach())
    ones = torch.ones_like(held)
    return loss + held.detach(), _gradients([curve, held], parameters, [by_curve, ones])


def _spread(
    difference: Float[Tensor, "heads places"], weights: Float[Tensor, "heads places"]
) -> Float[Tensor, " heads"]:
    """Return the weighted squares of a difference about its weighted mean."""
    mean = (weights * difference).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)
    return (weights * (difference - mean) ** 2).sum(-1)


def _gradients(
    of: list[Tensor], parameters: list[nn.Parameter], weights: list[Tensor]
) -> list[Tensor]:
    """Return the gradients; 0 where one is no number, or a parameter has no part in it."""
    found = torch.autograd.grad(of, parameters, weights, allow_unused=True)
    return [
        torch.zeros_like(p) if g is None else g.nan_to_num(0.0, 0.0, 0.0)
        for p, g in zip(parameters, found, strict=True)
    ]


def _are_rows_of_heads(
    scoring: ScoringFunction, parameters: list[nn.Parameter], offsets: Int[Tensor, " span"]
) -> bool:
    """Return whether each head's curve depends on its own rows of the parameters alone."""
    heads = scoring.num_attention_heads
    if any(p.shape[:1] != (heads,) for p in parameters):
        return False
    for head in {0, heads - 1}:
        with torch.enable_grad():
            one = scoring.scores(offsets)[head].square().sum()
            found = _gradients([one], parameters, [torch.ones_like(one)])
        if any(bool(g.count_nonzero() - g[head].count_nonzero()) for g in found):
            return False
    return True
