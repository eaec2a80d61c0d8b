"""Tokens in, unit vectors out: the mean of a text's hidden states, or of each stretch of them."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from inspect import signature
from typing import Any

import torch
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from tisa.hf import families
from tisa.shapes import Float, Tensor

Ids = Sequence[int]
# Hidden states of a text with its ends in, vectors out.
Reduce = Callable[[Float[Tensor, "batch length dim"]], Float[Tensor, "batch vectors dim"]]


class Encoder:
    """A model, what stands before and after each of its texts, and how it is read.

    Args:
        model: with mean pooling, as most sentence encoders have it.
        tokenizer: its own.
        prefix: words before every text.
        batch_tokens: tokens read at once.
        bf16: products in bfloat16.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, prefix: str, batch_tokens: int, bf16: bool
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.batch_tokens, self.bf16 = batch_tokens, bf16
        self.before, self.after = ends_of(tokenizer)
        if prefix:
            self.before += tokenizer(prefix, add_special_tokens=False)["input_ids"]

    @property
    def ends(self) -> int:
        """Return how many tokens stand around a text."""
        return len(self.before) + len(self.after)

    def words(self, texts: Sequence[str], most: int) -> list[list[int]]:
        """Return the tokens of texts, so many at most."""
        found = self.tokenizer(list(texts), add_special_tokens=False, truncation=False)
        return [list(ids)[:most] for ids in found["input_ids"]]

    @torch.inference_mode()
    def read(self, texts: Sequence[Ids], reduce: Reduce) -> list[Float[Tensor, "vectors dim"]]:
        """Return what is made of each text's hidden states, those of one length together."""
        found: dict[int, Tensor] = {}
        by_length: dict[int, list[int]] = {}
        for number, ids in enumerate(texts):
            by_length.setdefault(len(ids), []).append(number)
        for length, numbers in by_length.items():
            size = max(1, self.batch_tokens // (length + self.ends))
            for start in range(0, len(numbers), size):
                some = numbers[start : start + size]
                hidden = self._hidden([texts[i] for i in some])
                for number, vectors in zip(some, normalize(reduce(hidden), dim=-1), strict=True):
                    found[number] = vectors.cpu()
        return [found[number] for number in range(len(texts))]

    def _hidden(self, texts: Sequence[Ids]) -> Tensor:
        device = self.model.device
        ids = torch.tensor([[*self.before, *text, *self.after] for text in texts], device=device)
        given: dict[str, Tensor] = {"input_ids": ids}
        takes = signature(type(self.model.base_model).forward).parameters
        if "token_type_ids" in takes:
            # Buffers of them end where the table does.
            given["token_type_ids"] = torch.zeros_like(ids)
        table = families.position_table(self.model)
        if table is not None and "position_ids" in takes:
            places = torch.arange(ids.shape[1], device=device) + table.first_row
            given["position_ids"] = places.expand_as(ids)
        products = torch.autocast(device.type, torch.bfloat16) if self.bf16 else nullcontext()
        with products:
            hidden: Tensor = self.model.base_model(**given)[0]
        return hidden.float()


def ends_of(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the special tokens before and after a text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return list(whole[:start]), list(whole[start + len(bare) :])
    raise ValueError(
        f"model: its tokenizer puts special tokens into a text, {whole} for {bare}, and none around"
    )


def mean(hidden: Float[Tensor, "batch length dim"]) -> Float[Tensor, "batch 1 dim"]:
    """Return the mean of a text with its ends, as such encoders pool."""
    return hidden.mean(1, keepdim=True)


def chunks(before: int, after: int, size: int) -> Reduce:
    """Return what gives a vector for each `size` tokens, the ends aside: "late chunks"."""

    def reduce(hidden: Tensor) -> Tensor:
        text = hidden[:, before : hidden.shape[1] - after]
        return torch.stack([part.mean(1) for part in text.split(size, dim=1)], 1)

    return reduce


def parts_of(text: Ids, size: int) -> list[Ids]:
    """Return a text in pieces of so many tokens, the last one shorter."""
    return [text[start : start + size] for start in range(0, max(1, len(text)), size)]


def overlapping(text: Ids, size: int, count: int) -> list[Ids]:
    """Return so many pieces of one size, evenly from the beginning to the end."""
    last = len(text) - size
    if last <= 0:
        return [text]
    starts = [round(last * i / (count - 1)) for i in range(count)] if count > 1 else [0]
    return [text[start : start + size] for start in starts]


def weighted_mean(vectors: Sequence[Tensor], sizes: Sequence[int]) -> Float[Tensor, "1 dim"]:
    """Return the mean of pieces' vectors, each counting as many times as it has tokens."""
    weights = torch.tensor(sizes, dtype=torch.float32).unsqueeze(1)
    stacked = torch.cat(list(vectors))
    return normalize((weights * stacked).sum(0, keepdim=True), dim=-1)
