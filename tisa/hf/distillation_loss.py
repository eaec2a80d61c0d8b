"""What a distillation counts: batches, the loss of one, and the check on held-out texts."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import cosine_similarity, kl_div, log_softmax
from transformers import PreTrainedModel

from tisa.hf.calibration import Batch, Tokens, batches_of, inner
from tisa.shapes import Tensor

# Of an input's tokens, for models with an MLM head.
MASKED, MASKED_WEIGHT = 0.15, 10.0
# Of the texts, so many are held out where none are given, and so many at most.
SHARE, MOST = 8, 64
# Rounding, which is no harm.
ROUNDING = 1e-6


def divided(sequences: Sequence[Tokens]) -> tuple[list[Tokens], list[Tokens]]:
    """Return texts to train on and texts to check on: every eighth in the order of their length."""
    ordered = sorted(range(len(sequences)), key=lambda i: len(sequences[i].ids))
    held = ordered[min(SHARE, len(ordered)) // 2 :: SHARE]
    if len(held) > MOST:
        held = [held[round(i * (len(held) - 1) / (MOST - 1))] for i in range(MOST)]
    kept = set(range(len(sequences))) - set(held)
    return [sequences[i] for i in sorted(kept)], [sequences[i] for i in sorted(held)]


def batches_by(
    sequences: Sequence[Tokens], model: PreTrainedModel, seed: int, tokens: int, by_length: bool
) -> list[Batch]:
    """Return small batches in a random order, those of one length together."""
    made = list(
        itertools.chain.from_iterable(
            batches_of(part, model, elements=1, tokens=tokens)
            for part in _parts(sorted(sequences, key=lambda s: len(s.ids)), 32)
        )
    )
    generator = torch.Generator().manual_seed(seed)
    made = [made[i] for i in torch.randperm(len(made), generator=generator).tolist()]
    if not by_length:
        return made
    classes: dict[int, list[Batch]] = {}
    for batch in made:
        classes.setdefault(length_class(batch), []).append(batch)
    rounds = max(len(part) for part in classes.values())
    return [part[i % len(part)] for i in range(rounds) for part in classes.values()]


def length_class(batch: Batch) -> int:
    """Return which power of 2 the length of its texts does not pass."""
    return (batch.inputs["input_ids"].shape[1] - 1).bit_length()


def _parts(sequences: list[Tokens], size: int) -> Iterator[list[Tokens]]:
    for start in range(0, len(sequences), size):
        yield sequences[start : start + size]


class Check:
    """The loss on held-out texts, by length; what is better at one and worse at another is worse.

    Args:
        batches: of texts that are neither fitted nor distilled on.
        teacher: the original.
        mask_token_id: None where there is no MLM head.
        pooled_weight: as in the loss.
        seed: of the masked places, which are the same in every check.
    """

    def __init__(
        self,
        batches: list[Batch],
        teacher: PreTrainedModel,
        mask_token_id: int | None,
        pooled_weight: float,
        seed: int,
    ) -> None:
        self.batches, self.teacher, self.seed = batches, teacher, seed
        self.mask_token_id, self.pooled_weight = mask_token_id, pooled_weight

    @torch.no_grad()
    def losses(self, student: Any) -> dict[int, float]:
        """Return the mean loss of the texts of each power of 2."""
        found: dict[int, list[tuple[float, int]]] = {}
        for number, batch in enumerate(self.batches):
            generator = torch.Generator().manual_seed(self.seed + number)
            given = (student, self.teacher, batch, self.mask_token_id, generator)
            value = float(loss_of(*given, self.pooled_weight))
            count = len(batch.inputs["input_ids"])
            found.setdefault(length_class(batch), []).append((value, count))
        return {
            name: sum(value * count for value, count in some) / sum(count for _, count in some)
            for name, some in sorted(found.items())
        }


def score_of(losses: dict[int, float], start: dict[int, float]) -> float:
    """Return the mean over lengths of loss / loss at the start; infinite if any length is worse."""
    # Where nothing was lost nothing can be gained.
    ratios = [
        losses[name] / first if first > 0 else 1.0 if losses[name] <= first else float("inf")
        for name, first in start.items()
    ]
    # No number is worse, too.
    if not all(ratio <= 1 + ROUNDING for ratio in ratios):
        return float("inf")
    return sum(ratios) / len(ratios)


def loss_of(
    student: Any,
    teacher: PreTrainedModel,
    batch: Batch,
    mask_token_id: int | None,
    generator: torch.Generator,
    pooled_weight: float,
) -> Tensor:
    """Return how far the student is from the teacher on a batch."""
    inputs = dict(batch.inputs)
    real = inputs["attention_mask"].bool()
    if mask_token_id is None:
        with torch.no_grad():
            wanted = _hidden(teacher, inputs)
        found = _hidden(student, inputs)
        error = ((found - wanted)[real] ** 2).sum() / (wanted[real] ** 2).sum()
        weight = real.unsqueeze(-1).to(found.dtype)
        ours, theirs = ((x * weight).sum(1) / weight.sum(1) for x in (found, wanted))
        return error + pooled_weight * (1 - cosine_similarity(ours, theirs, dim=-1)).mean()
    chosen = torch.rand(real.shape, generator=generator).to(real.device) < MASKED
    # Not the ends, which are always the same.
    chosen &= inner(real)
    inputs["input_ids"] = inputs["input_ids"].masked_fill(chosen, mask_token_id)
    with torch.no_grad():
        target = log_softmax(teacher(**inputs).logits.float(), -1)
    logs = log_softmax(student(**inputs).logits.float(), -1)
    each = kl_div(logs, target, reduction="none", log_target=True).sum(-1)
    weights = real + (MASKED_WEIGHT - 1) * chosen
    return (each * weights).sum() / weights.sum()


def _hidden(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return the last hidden states, whatever stands on top of them."""
    found = model(**inputs, output_hidden_states=True)
    hidden = getattr(found, "last_hidden_state", None)
    return (found.hidden_states[-1] if hidden is None else hidden).float()
