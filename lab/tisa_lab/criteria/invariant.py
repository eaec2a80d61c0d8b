"""Translation invariant: the same tokens elsewhere get the same logits and the same outputs."""

from collections.abc import Iterable

import torch

from tisa.shapes import Float, Tensor
from tisa_lab.criteria.draws import random_content, random_layer, random_transformer
from tisa_lab.criteria.measurement import Measurement
from tisa_lab.criteria.settings import Settings


def measure(name: str, settings: Settings) -> Measurement:
    """Return the largest relative difference of logits and outputs when a phrase is moved."""
    logits = max(_logit_difference(name, settings, draw) for draw in range(settings.draws))
    outputs = max(_output_difference(name, settings, draw) for draw in range(settings.draws))
    return Measurement(
        max(logits, outputs),
        f"a moved phrase changes logits by up to {logits:.2g} and outputs by up to {outputs:.2g} "
        "of the largest one",
    )


def _logit_difference(name: str, settings: Settings, draw: int) -> float:
    """Logits of a layer between the tokens of a phrase, the phrase at p and at p + s."""
    layer = random_layer(name, settings, draw)
    first = settings.training_length - settings.phrase - max(settings.shifts)
    with torch.no_grad():
        return _largest_difference(
            layer.logits(_placed(settings, draw, start))[
                ..., start : start + settings.phrase, start : start + settings.phrase
            ]
            for start in (first, *(first + shift for shift in settings.shifts))
        )


def _output_difference(name: str, settings: Settings, draw: int) -> float:
    """Outputs of a whole model; everything but the phrase is hidden, so that it has no ends."""
    model = random_transformer(name, settings, draw)
    first = settings.training_length - settings.phrase - max(settings.shifts)
    found = []
    with torch.no_grad():
        for start in (first, *(first + shift for shift in settings.shifts)):
            here = slice(start, start + settings.phrase)
            mask = torch.zeros(1, settings.training_length, dtype=torch.bool)
            mask[:, here] = True
            placed = _placed(settings, draw, start)
            output = model(inputs_embeds=placed, attention_mask=mask.to(placed.device))
            found.append(output[:, here])
    return _largest_difference(found)


def _placed(settings: Settings, draw: int, start: int) -> Float[Tensor, "one length hidden"]:
    """Return other tokens, the same for every start, with the phrase put in at `start`."""
    content = random_content(settings, 1, settings.training_length, seed=100 + draw)
    phrase = random_content(settings, 1, settings.phrase, seed=200 + draw)
    content[:, start : start + settings.phrase] = phrase
    return content


def _largest_difference(found: Iterable[Tensor]) -> float:
    base, *others = found
    return max(float((other - base).abs().max() / base.abs().max()) for other in others)
