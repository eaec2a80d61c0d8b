"""Scores from a model's own heads: layer by layer, so that attention stays what it was.

For each layer in turn, on the converted model's own activations: a free score per offset that
brings each head's attention nearest to the original's (KL divergence, convex, `aim.py`), kernels
for that curve (`tisa.fitting`), and refinement of the kernels against the same divergence. Other
scoring functions go down that divergence by themselves (`descent.py`). Nothing is propagated
through the network.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tisa.fitting import BROADEST, SHARPEST, Kernels, fit_kernels
from tisa.hf import families
from tisa.hf.aim import Aim, Anchor, descend
from tisa.hf.calibration import Batch
from tisa.hf.core import Call, OwnScores
from tisa.hf.descent import fit_by_descent
from tisa.scoring import TISA, ScoringFunction
from tisa.shapes import Float, Tensor

KERNEL_STEPS = 120


class _Enough(Exception):  # noqa: N818
    """The layer that was waited for has been seen."""


def fit_scores(
    converted: PreTrainedModel,
    original: PreTrainedModel,
    batches: list[Batch],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[Float[Tensor, " heads"]]:
    """Set the scores of a converted model to those of the original's heads, in place.

    Returns the divergence that is left of each head, one tensor for each layer or pass.
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
            left.append(_fit_one(module.offset_scores[number], aim))
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


def _fit_one(scoring: nn.Module, aim: Aim) -> Float[Tensor, " heads"]:
    if type(scoring) is not TISA:
        assert isinstance(scoring, ScoringFunction)
        return fit_by_descent(scoring, aim)
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
