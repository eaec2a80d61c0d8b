"""What a conversion kept: embeddings, word order, masked tokens, by length, beside the original."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from tisa.hf.calibration import Tokens, batches_of, inner, length_limit, tokens_of
from tisa.shapes import Float, Tensor

# A score of one's own: (model, tokenizer) → number.
Score = Callable[[PreTrainedModel, Any], float]
# Four orders of a sentence's words: as written, and three that differ from it and each other.
ORDERS = ("as written", "reversed", "halves exchanged", "shuffled")


def measurements(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    tokenizer: Any,
    texts: list[str],
    score: Score | None = None,
) -> tuple[dict[str, float], dict[str, float]]:
    """Return what both models do on held-out texts, by name: before and after."""
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    if score is not None:
        before["score"], after["score"] = (score(m, tokenizer) for m in (original, converted))
    if tokenizer is None:
        return before, after
    mask = getattr(tokenizer, "mask_token_id", None)
    if type(original).__name__.endswith("ForMaskedLM") and mask is not None:
        sequences = tokens_of(texts, original, tokenizer)
        for model, found in ((original, before), (converted, after)):
            found["masked-token accuracy"] = masked_accuracy(model, sequences, mask)[0]
    with torch.no_grad():
        some = texts[:64]
        # SMILES, or texts of a few words, have no other order of words.
        if any(orders_of(text, random.Random(0)) for text in some):
            before["order-match"] = 1.0
            after["order-match"] = order_match(converted, original, tokenizer, some)
        longest = [*texts, *(" ".join(texts[i:]) for i in range(min(8, len(texts))))]
        lengths = [n for n in (16, 64, 128, 256, 512) if n <= length_limit(original)]
        by = cosine_by_length(converted, original, tokenizer, longest, lengths)
    for length, value in by.items():
        before[f"cosine to original at {length} tokens"] = 1.0
        after[f"cosine to original at {length} tokens"] = value
    return before, after


@torch.no_grad()
def embeddings(
    model: PreTrainedModel, tokenizer: Any, texts: Sequence[str], *, max_length: int | None = 512
) -> Float[Tensor, "texts dim"]:
    """Return the mean of the last hidden states of each text, of length 1."""
    found: dict[int, Tensor] = {}
    for places in _by_length(texts):
        cut = tokenizer(
            [texts[i] for i in places], truncation=max_length is not None, max_length=max_length
        )
        given = _padded(cut, model.device)
        hidden = model.base_model(**given)[0].float()
        weight = given["attention_mask"].unsqueeze(-1).float()
        means = (hidden * weight).sum(1) / weight.sum(1)
        for i, vector in zip(places, torch.nn.functional.normalize(means, dim=-1), strict=True):
            found[i] = vector
    return torch.stack([found[i] for i in range(len(texts))])


def _padded(cut: Any, device: torch.device) -> dict[str, Tensor]:
    """Return rows of one length, by hand: not every tokenizer has a token to pad with."""
    longest = max(map(len, cut["input_ids"]))
    return {
        name: torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
        for name, rows in cut.items()
    }


def orders_of(text: str, generator: random.Random) -> list[str]:
    """Return the text in the four `ORDERS`, all different; [] where it has too few words."""
    words = text.split()
    half = len(words) // 2
    made = [words, words[::-1], words[half:] + words[:half]]
    for _ in range(20):
        shuffled = generator.sample(words, len(words))
        if shuffled not in made:
            return [" ".join(order) for order in [*made, shuffled]] if len(words) > 4 else []
    return []


def shuffles_of(text: str, generator: random.Random) -> list[str]:
    """Return the text as written and three times shuffled, all different; [] if it is short."""
    words = text.split()
    made = [words]
    for _ in range(50):
        shuffled = generator.sample(words, len(words))
        if shuffled not in made:
            made.append(shuffled)
        if len(made) == 4 and len(words) > 4:
            return [" ".join(order) for order in made]
    return []


def order_match(
    model: PreTrainedModel,
    original: PreTrainedModel,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    seed: int = 0,
    shuffles: bool = False,
) -> float:
    """Return how often an embedding is nearest to the original's of the same word order.

    Of the four `ORDERS` of each text; chance is 0.25. `shuffles` makes three random orders, which
    are more alike. A model without positions cannot tell them apart.
    """
    given = (model, original, tokenizer, texts)
    return float(order_matches(*given, seed=seed, shuffles=shuffles).mean())


def order_matches(
    model: PreTrainedModel,
    original: PreTrainedModel,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    seed: int = 0,
    shuffles: bool = False,
) -> Float[Tensor, "4"]:
    """Return the same for each of the four orders; the first is as written."""
    generator = random.Random(seed)
    make = shuffles_of if shuffles else orders_of
    groups = [made for text in texts if (made := make(text, generator))]
    if not groups:
        raise ValueError("order_match: texts must have some of more than four different words")
    flat = [text for group in groups for text in group]
    limit = min(512, length_limit(original))
    ours, theirs = (
        embeddings(m, tokenizer, flat, max_length=limit).unflatten(0, (-1, 4))
        for m in (model, original)
    )
    nearest = (ours @ theirs.mT).argmax(-1)
    # Without positions all four are the same vector: that counts as chance, not as the first.
    blind = (ours - ours[:, :1]).abs().amax((1, 2)) < 1e-5
    hits = (nearest == torch.arange(4, device=nearest.device)).float()
    return torch.where(blind.unsqueeze(1), 0.25, hits).mean(0).cpu()


def cosine_to_original(
    model: PreTrainedModel, original: PreTrainedModel, tokenizer: Any, texts: Sequence[str]
) -> float:
    """Return the mean cosine between the embeddings of both models."""
    limit = min(512, length_limit(original))
    ours, theirs = (embeddings(m, tokenizer, texts, max_length=limit) for m in (model, original))
    return float(cosine_similarity(ours, theirs).mean())


@torch.no_grad()
def cosine_by_length(
    model: PreTrainedModel,
    original: PreTrainedModel,
    tokenizer: Any,
    texts: Sequence[str],
    lengths: Sequence[int] = (16, 64, 128, 256, 512),
    *,
    most: int = 64,
) -> dict[int, float]:
    """Return the mean cosine of both models' mean hidden states for inputs of each length.

    Inputs are the texts' beginnings, cut to the length, of texts that are long enough.
    """
    found = {}
    for length in lengths:
        kept = []
        for text in texts:
            ids = tokenizer(text, truncation=True, max_length=length)["input_ids"]
            if len(ids) == length:
                kept.append(ids)
            if len(kept) == most:
                break
        if not kept:
            continue
        cosines = []
        for start in range(0, len(kept), max(1, 2048 // length)):
            given = torch.tensor(kept[start : start + max(1, 2048 // length)], device=model.device)
            ours, theirs = (
                m.base_model(input_ids=given)[0].float().mean(1) for m in (model, original)
            )
            cosines.append(cosine_similarity(ours, theirs))
        found[length] = float(torch.cat(cosines).mean())
    return found


@torch.no_grad()
def masked_accuracy(
    model: PreTrainedModel, sequences: list[Tokens], mask_token_id: int, *, seed: int = 0
) -> tuple[float, int]:
    """Return the share of masked tokens that the MLM head finds, and how many were masked.

    15 % of each sequence, not its ends, the same ones for every model.
    """
    right = total = 0
    generator = torch.Generator().manual_seed(seed)
    for batch in batches_of(sequences, model, elements=1):
        ids, real = batch.inputs["input_ids"], batch.inputs["attention_mask"].bool()
        chosen = torch.rand(ids.shape, generator=generator).to(ids.device) < 0.15
        chosen &= inner(real)
        given = {**batch.inputs, "input_ids": ids.masked_fill(chosen, mask_token_id)}
        guess = model(**given).logits.argmax(-1)
        right += int((guess == ids)[chosen].sum())
        total += int(chosen.sum())
    if total == 0:
        raise ValueError("masked_accuracy: no token was masked; give more or longer sequences")
    return right / total, total


def _by_length(texts: Sequence[str]) -> Iterator[list[int]]:
    """Yield places of texts of similar length, few at a time where they are long."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    group: list[int] = []
    for i in order:
        if group and (len(group) + 1) * (len(texts[i]) + 8) > 16_000:
            yield group
            group = []
        group.append(i)
    if group:
        yield group
