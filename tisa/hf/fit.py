"""Scores from a model's own heads: layer by layer, so that attention stays what it was.

For each layer in turn, on the converted model's own activations: a free score per offset that
brings each head's attention nearest to the original's (KL divergence, convex), kernels for that
curve (`tisa.fitting`), and refinement of the kernels against the same divergence. Other scoring
functions go down that divergence by themselves (`descent.py`). Nothing is propagated through the
network.

A softmax does not see a head's constant, and kernels are 0 far away: a curve that is fitted up to a
constant may stand anywhere, and go to 0 where the offsets seen end. So the constant is chosen such
that the curve's far ends stand at 0, and `Anchor` holds them there and beyond.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from tisa.fitting import BROADEST, SHARPEST, Kernels, fit_kernels
from tisa.hf import families
from tisa.hf.calibration import Batch
from tisa.hf.core import Call, OwnScores
from tisa.scoring import TISA
from tisa.shapes import Bool, Float, Int, Tensor

KERNEL_STEPS = 120
TABLE_STEPS = 100
# An end of the curve: the outermost offsets of a side, with so much of its pairs of tokens.
END = 0.1
# Where the curve must still be as at its end, in multiples of the last offset seen.
BEYOND = (1.05, 1.1, 1.2, 1.35, 1.6, 2.0, 2.5, 3.0, 4.0)
# What a squared deviation of 1 costs there, in divergence.
HOLD = 0.03


class Anchor(NamedTuple):
    """What a head's curve must be at the far ends of the offsets seen and beyond them."""

    offsets: Int[Tensor, " places"]
    level: Float[Tensor, "heads places"]
    weights: Float[Tensor, "heads places"]

    def cost(self, curve: Float[Tensor, "heads places"]) -> Float[Tensor, " heads"]:
        """Return what each head's deviation costs, of a curve at these offsets."""
        return (self.weights * (curve - self.level) ** 2).sum(-1)


class Aim:
    """One layer's attention: the original's weights, the converted model's bare logits."""

    def __init__(self, content: list[Tensor], target: list[Tensor], batches: list[Batch]) -> None:
        self.parts = []
        self.length = max(t.shape[-1] for t in target)
        total = sum(int(b.valid.sum()) for b in batches)
        heads = content[0].shape[1]
        self.mass = content[0].new_zeros(heads, 2 * self.length - 1)
        self.constant = content[0].new_zeros(heads)
        self.pairs = content[0].new_zeros(2 * self.length - 1)
        for logits, weights, batch in zip(content, target, batches, strict=True):
            keys = torch.arange(logits.shape[-1], device=logits.device)
            entries = keys - batch.rows[:, None] + (self.length - 1)
            share = batch.valid[:, None, :].to(logits.dtype) / total
            weights = weights * share.unsqueeze(-1)
            self.parts.append((logits, entries, share))
            self.mass.index_add_(1, entries.flatten(), weights.sum(0).flatten(1))
            known = (weights / share.unsqueeze(-1).clamp_min(1e-30)).clamp_min(1e-12).log()
            self.constant += (weights * (known - logits)).sum((0, 2, 3))
            real = (logits[:, 0] > -1e29) * share[:, 0, :, None]
            self.pairs.index_add_(0, entries.flatten(), real.sum(0).flatten())

    @property
    def offsets(self) -> Int[Tensor, " span"]:
        """Return the offsets of a curve."""
        return torch.arange(-(self.length - 1), self.length, device=self.mass.device)

    def divergence(
        self, curve: Float[Tensor, "heads span"]
    ) -> tuple[Float[Tensor, " heads"], Float[Tensor, "heads span"]]:
        """Return each head's KL divergence and its gradient by the curve.

        With A the original's weights and Z = logits + curve it is ΣA·(ln A − Z) + Σ ln Σ exp Z. Of
        the curve only the mass that A has at each offset matters in the first sum, and the
        gradient is the difference of the masses.
        """
        loss = self.constant - (self.mass * curve).sum(-1)
        gradient = -self.mass
        for logits, entries, share in self.parts:
            scored = logits + curve[:, entries]
            total = scored.logsumexp(-1)
            loss = loss + (share * total).sum((0, 2))
            found = scored.sub_(total.unsqueeze(-1)).exp_().mul_(share.unsqueeze(-1))
            gradient.index_add_(1, entries.flatten(), found.sum(0).flatten(1))
        return loss, gradient

    def best_curve(self) -> Float[Tensor, "heads span"]:
        """Return the free curve of least divergence, by Adam with a falling rate."""
        curve = torch.zeros_like(self.mass)
        descend([curve], lambda: [self.divergence(curve)[1]], TABLE_STEPS, [0.2])
        return curve

    def anchored(
        self, curve: Float[Tensor, "heads span"]
    ) -> tuple[Float[Tensor, "heads span"], Anchor]:
        """Return the curve with its far ends at 0, by the attention they carry, and its anchor.

        Ends of different height cannot both be 0; each is held where it is for as long as broad
        kernels can.
        """
        # Offsets without any attention count a little, by the pairs of tokens that have them.
        carried = self.mass + 1e-3 * self.pairs / self.pairs.sum()
        ends = [end for side in (-1, 1) if (end := self._end(side)).any()]
        shares = [torch.where(end, carried, 0.0) for end in ends]
        carried = sum(shares, torch.zeros_like(carried))
        curve = curve - (carried * curve).sum(-1, keepdim=True) / carried.sum(-1, keepdim=True)
        places, levels, weights = [], [], []
        for end, share in zip(ends, shares, strict=True):
            share = share[:, end] / share.sum(-1, keepdim=True)
            level = (share * curve[:, end]).sum(-1, keepdim=True)
            seen = self.offsets[end]
            last = int(seen[seen.abs().argmax()])
            beyond = torch.tensor([last * m for m in BEYOND], device=seen.device).round().long()
            places += [seen, beyond]
            levels.append(level.expand(-1, len(seen) + len(beyond)))
            weights += [share, torch.full_like(level, 1 / len(beyond)).expand(-1, len(beyond))]
        anchor = Anchor(torch.cat(places), torch.cat(levels, 1), HOLD * torch.cat(weights, 1))
        return curve, anchor

    def _end(self, side: int) -> Bool[Tensor, " span"]:
        """Return which offsets are the outermost of a side (−1: keys before the query)."""
        outwards = side * self.offsets
        seen = torch.where(outwards > 0, self.pairs, 0.0)
        further = seen.flip(0).cumsum(0).flip(0) if side > 0 else seen.cumsum(0)
        return (seen > 0) & (further - seen < END * seen.sum())


def descend(
    parts: list[Tensor],
    gradients: Callable[[], list[Tensor]],
    steps: int,
    rates: list[float],
    after: Callable[[], None] = lambda: None,
) -> None:
    """Take Adam steps in place, with rates that fall to a fiftieth."""
    groups = [{"params": [part], "lr": rate} for part, rate in zip(parts, rates, strict=True)]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95), eps=1e-7)
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - 0.98 * step / steps)
        for part, gradient in zip(parts, gradients(), strict=True):
            part.grad = gradient
        optimizer.step()
        after()
    for part in parts:
        part.grad = None


# Brings one layer's scoring function to its aim, and returns what is left of each head.
Fit = Callable[[Any, Aim], Float[Tensor, " heads"]]


class _Enough(Exception):  # noqa: N818
    """The layer that was waited for has been seen."""


def fit_scores(
    converted: PreTrainedModel,
    original: PreTrainedModel,
    batches: list[Batch],
    *,
    fit: Fit | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Float[Tensor, " heads"]]:
    """Set the scores of a converted model to those of the original's heads, in place.

    By default they are kernels (`fit_kernels_to`). Returns the divergence that is left of each
    head, one tensor for each layer or pass.
    """
    for name, weight in original.named_parameters():
        if not torch.isfinite(weight).all():
            raise ValueError(
                f"fit: {name} holds numbers that are not finite, and so does the attention that "
                "scores are fitted to; take a copy of the model that is whole"
            )
    with _evaluating(original), _evaluating(converted), torch.no_grad():
        targets = attention_weights(original, batches)
        groups = _grouped(converted)
        left = []
        for done, (module, number, layers) in enumerate(groups):
            content = [
                x for _, index in layers for x in _content(converted, batches, module, index)
            ]
            wanted = [x for layer, _ in layers for x in targets[layer]]
            aim = Aim(content, wanted, batches * len(layers))
            scoring: Any = module.offset_scores[number]
            left.append((fit or fit_kernels_to)(scoring, aim))
            if progress is not None:
                progress(done + 1, len(groups))
        return left


def attention_weights(model: PreTrainedModel, batches: list[Batch]) -> list[list[Tensor]]:
    """Return the attention weights of the chosen queries, by layer and batch."""
    found: list[list[Tensor]] = []
    for batch in batches:
        made = model.base_model(**batch.inputs, output_attentions=True, return_dict=True)
        weights = made.attentions
        for layer, one in enumerate(weights):
            if layer == len(found):
                found.append([])
            found[layer].append(one[:, :, batch.rows].float())
    return found


def _grouped(model: PreTrainedModel) -> list[tuple[OwnScores, int, list[tuple[int, int]]]]:
    """Return each scoring function once: (module, number in it, its layers and their passes)."""
    groups: dict[tuple[int, int], tuple[OwnScores, int, list[tuple[int, int]]]] = {}
    for layer, (module, index) in enumerate(families.attention_calls(model)):
        number = index if len(module.offset_scores) > 1 else 0
        groups.setdefault((id(module), number), (module, number, []))[2].append((layer, index))
    return list(groups.values())


def _content(
    model: PreTrainedModel, batches: list[Batch], module: OwnScores, pass_index: int
) -> list[Tensor]:
    """Return the logits without scores of the chosen queries in one layer's pass, by batch."""
    found: list[Tensor] = []

    def look(
        module: nn.Module, query: Tensor, key: Tensor, mask: Any, scaling: Any, call: Call
    ) -> None:
        if call.pass_index != pass_index:
            return
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        rows = batch.rows
        logits = (query[:, :, rows] @ key.mT).float() * scale
        if isinstance(mask, Tensor):
            mask = mask[:, :, rows] if mask.shape[-2] > 1 else mask
            # float16 hides a key by −65,504, which is no sign of that in float32.
            hidden = mask <= torch.finfo(mask.dtype).min / 2
            logits = (logits + mask.float()).masked_fill(hidden, -1e30)
        found.append(logits.clamp_min(-1e30))
        raise _Enough

    module.observer = look
    try:
        for batch in batches:
            try:
                model.base_model(**batch.inputs)
            except _Enough:
                continue
    finally:
        module.observer = None
    return found


def fit_kernels_to(scoring: TISA, aim: Aim) -> Float[Tensor, " heads"]:
    """Set the kernels to the best that were found; return what is left of each head."""
    if scoring.num_kernels == 0:
        return aim.divergence(scoring.scores(aim.offsets))[0]
    curve, anchor = aim.anchored(aim.best_curve())
    # An offset counts by the attention that it carries, in the original or with this curve; near
    # its minimum the divergence is half the squared deviation.
    mass = aim.mass + aim.divergence(curve)[1] / 2
    kernels = fit_kernels(
        torch.cat((curve, anchor.level), 1),
        torch.cat((aim.offsets, anchor.offsets)),
        scoring.num_kernels,
        weights=torch.cat((mass + 1e-9, 2 * anchor.weights), 1),
    )
    kernels, left = _refined(kernels, aim, anchor)
    scoring.kernel_amplitudes.copy_(kernels.amplitude)
    scoring.kernel_sharpness.copy_(kernels.sharpness)
    scoring.kernel_offsets.copy_(kernels.offset)
    return left


def _refined(kernels: Kernels, aim: Aim, anchor: Anchor) -> tuple[Kernels, Float[Tensor, " heads"]]:
    """Return the kernels after descent on the divergence, each head's best, and what is left."""
    a, b, c = (part.float().clone() for part in kernels)
    log_b = b.clamp(BROADEST, SHARPEST).log()
    offsets = aim.offsets
    low, high = float(offsets.min()), float(offsets.max())
    nothing = torch.zeros_like(a)
    best = [nothing.clone(), b.clone(), c.clone()]
    # No scores at all are the first candidate: half of a model's heads need none.
    none = Kernels(nothing, b, c)
    left = aim.divergence(none.curve(offsets))[0]
    least = left + anchor.cost(none.curve(anchor.offsets))

    def gradients() -> list[Tensor]:
        with torch.enable_grad():
            leaves = [part.detach().requires_grad_() for part in (a, log_b, c)]
            tried = Kernels(leaves[0], leaves[1].exp(), leaves[2])
            curve, cost = tried.curve(offsets), anchor.cost(tried.curve(anchor.offsets))
        loss, by_curve = aim.divergence(curve.detach())
        keep(loss, cost.detach())
        return list(torch.autograd.grad([curve, cost], leaves, [by_curve, torch.ones_like(cost)]))

    def keep(loss: Tensor, cost: Tensor) -> None:
        better = loss + cost < least
        least[better] = (loss + cost)[better]
        left[better] = loss[better]
        for kept, part in zip(best, (a, log_b.exp(), c), strict=True):
            kept[better] = part[better]

    def bound() -> None:
        log_b.clamp_(math.log(BROADEST), math.log(SHARPEST))
        c.clamp_(low, high)

    descend([a, log_b, c], gradients, KERNEL_STEPS, [0.05, 0.05, 0.1], after=bound)
    last = Kernels(a, log_b.exp(), c)
    keep(aim.divergence(last.curve(offsets))[0], anchor.cost(last.curve(anchor.offsets)))
    return Kernels(*best), left


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Evaluate in eager attention, and put everything back."""
    training, implementation = model.training, model.config._attn_implementation
    model.eval()
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.train(training)
        model.set_attn_implementation(implementation)
