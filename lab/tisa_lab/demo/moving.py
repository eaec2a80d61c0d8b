"""The first screen: one phrase at every place of a sentence, and attention inside the phrase.

Each word spreads the attention that it gives to the phrase over the words of the phrase: shares
that sum to 1. In the first layer the shares follow from logits inside the phrase alone. So a method
that is translation-invariant keeps them wherever the phrase stands.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedModel

from tisa.shapes import Float, Tensor

PHRASE = ["the", "dog", "bit", "the", "man"]
# The phrase can be said at most places of it; a word stays before the phrase, and one after it.
SENTENCE = [
    "every", "summer", "in", "the", "old", "town", "on", "the", "bridge", "behind", "the", "church",
    "in", "the", "garden", "before", "the", "storm", "after", "dinner",
]  # fmt: skip


def move(
    original: PreTrainedModel, converted: PreTrainedModel, tokenizer: Any
) -> dict[str, Any] | None:
    """Return attention inside the phrase at every place, with the position table and with TISA.

    Of the head in the first layer whose attention moves most in the original; `mean` is over all
    heads and places. None where a model is too short for the sentence, or has no such attention.
    """
    found = {}
    for name, model in (("table", original), ("tisa", converted)):
        attention = inside(model, tokenizer)
        if attention is None:
            return None
        found[name] = attention
    shares = {name: moved(attention) for name, attention in found.items()}
    head = int(shares["table"].mean((0, 2)).argmax())
    return {
        "words": SENTENCE,
        "phrase": PHRASE,
        "layer": 1,
        "head": head + 1,
        "attention": {
            name: attention[:, head].mul(1e4).round().div(1e4).tolist()
            for name, attention in found.items()
        },
        "mean": {name: round(float(shares[name].mean()), 6) for name in found},
    }  # fmt: skip


def moved(
    attention: Float[Tensor, "places heads words words"],
) -> Float[Tensor, "places heads words"]:
    """Return which share of a word's attention is elsewhere than at the first place."""
    return (attention - attention[:1]).abs().sum(-1) / 2


@torch.no_grad()
def inside(
    model: PreTrainedModel, tokenizer: Any
) -> Float[Tensor, "places heads words words"] | None:
    """Return attention inside the phrase at every place of the sentence; rows sum to 1."""
    phrase, around = ([_pieces(tokenizer, w) for w in words] for words in (PHRASE, SENTENCE))
    ends = (tokenizer.cls_token_id, tokenizer.sep_token_id)
    first, last = ([] if token is None else [token] for token in ends)
    inputs, starts = [], []
    for place in range(1, len(around)):
        before = [*first, *chain(*around[:place])]
        inputs.append([*before, *chain(*phrase), *chain(*around[place:]), *last])
        starts.append(len(before))
    length = len(inputs[0])
    if not all(phrase) or length > getattr(model.config, "max_position_embeddings", length):
        return None
    with _eager(model):
        ids = torch.tensor(inputs, device=model.device)
        layers = model(input_ids=ids, output_attentions=True).attentions
    if not layers or layers[0].shape[-2:] != (length, length):
        return None
    # A word of several tokens is looked at in all of them, and looks as they do on average.
    member = torch.zeros(sum(map(len, phrase)), len(phrase), dtype=torch.float64)
    member[range(len(member)), [w for w, pieces in enumerate(phrase) for _ in pieces]] = 1
    size = len(member)
    tokens = torch.stack(
        [a[:, s : s + size, s : s + size] for a, s in zip(layers[0], starts, strict=True)]
    )
    tokens = tokens.double().cpu()
    rows = tokens / tokens.sum(-1, keepdim=True)
    return (member / member.sum(0)).T @ rows @ member


def _pieces(tokenizer: Any, word: str) -> list[int]:
    # With a space, as inside a text: some tokenizers have other tokens for the first word.
    return list(tokenizer(f" {word}", add_special_tokens=False).input_ids)


@contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    """Let a model compute attention so that it can be seen."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
