"""Every way to read a document, by name: cut, pieces, more places of the table, one pass, chunks.

A way reads each document once and makes of it one vector, or several of which the best counts, or
both. Late chunks (Günther et al., 2024) are means of stretches of one pass.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from tisa.hf import families
from tisa.shapes import Tensor
from tisa_lab.long.encoders import (
    Encoder,
    Ids,
    Reduce,
    chunks,
    mean,
    overlapping,
    parts_of,
    weighted_mean,
)
from tisa_lab.long.places import Kind, longer, scaled

ONE, SEVERAL = "one vector", "several vectors"
PLACES: dict[str, Kind] = {"PI": "interpolated", "GP": "grouped", "RP": "repeated"}
FOLD = "fold only"
# Of a row: documents' vectors, by the row's name.
Rows = dict[str, list[Tensor]]
Around = Callable[[PreTrainedModel], Encoder]


@dataclass(frozen=True)
class Way:
    """A way to read: its name, whose model it takes ("" for the original), and its rows.

    A row is one vector of a document, or several.
    """

    name: str
    model: str
    rows: dict[str, str]
    read: Callable[[Encoder, Sequence[Ids], Around], Rows]
    # At which lengths it differs from what another way does.
    fits: Callable[[int], bool] = lambda length: True


def ways_of(
    original: PreTrainedModel, converted: Sequence[str], chunk: int, limit: int
) -> list[Way]:
    """Return all ways, references first: pieces, of which one mean and the best one."""
    found = [_pieces(size, limit) for size in sorted({chunk, 256, limit}) if size <= limit]
    found.sort(key=lambda way: way.name != f"pieces of {chunk}")
    found.append(_cut(limit))
    found.append(_as_many_operations(original, chunk))
    found.append(_late_within(chunk, limit))
    if families.position_table(original) is not None:
        for word, kind in PLACES.items():
            found += [_more_places(word, kind, limit, scale) for scale in (False, True)]
    found += [_whole(name, chunk) for name in (FOLD, *converted)]
    return found


def reference_of(kind: str, chunk: int) -> str:
    """Return the row that others of its kind are compared with."""
    return f"{'mean' if kind == ONE else 'best'} of pieces of {chunk}"


def _cut(limit: int) -> Way:
    name = f"cut at {limit}"

    def read(encoder: Encoder, texts: Sequence[Ids], around: Around) -> Rows:
        return {name: encoder.read([text[: limit - encoder.ends] for text in texts], mean)}

    return Way(name, "", {name: ONE}, read)


def _pieces(size: int, limit: int) -> Way:
    one, best = (f"{what} of pieces of {size}" for what in ("mean", "best"))
    rows = {one: ONE, best: SEVERAL}

    def read(encoder: Encoder, texts: Sequence[Ids], around: Around) -> Rows:
        parts = [parts_of(text, size - encoder.ends) for text in texts]
        vectors = iter(encoder.read([part for some in parts for part in some], mean))
        by_text = [[next(vectors) for _ in some] for some in parts]
        return {
            one: [weighted_mean(v, [*map(len, p)]) for v, p in zip(by_text, parts, strict=True)],
            best: [torch.cat(v) for v in by_text],
        }

    return Way(f"pieces of {size}", "", rows, read, lambda length: size <= length)


def _late_within(chunk: int, limit: int) -> Way:
    name = f"late chunks of {chunk}, pieces of {limit}"

    def read(encoder: Encoder, texts: Sequence[Ids], around: Around) -> Rows:
        size = chunk - encoder.ends
        # Whole chunks, so that their ends are those of the pieces of one chunk.
        parts = [parts_of(text, (limit - encoder.ends) // size * size) for text in texts]
        reduce = chunks(len(encoder.before), len(encoder.after), size)
        vectors = iter(encoder.read([part for some in parts for part in some], reduce))
        return {name: [torch.cat([next(vectors) for _ in some]) for some in parts]}

    return Way(name, "", {name: SEVERAL}, read, lambda length: length > chunk)


def _as_many_operations(original: PreTrainedModel, chunk: int) -> Way:
    name = f"best of pieces of {chunk} that overlap"

    def read(encoder: Encoder, texts: Sequence[Ids], around: Around) -> Rows:
        counts = [affordable(original, len(text) + encoder.ends, chunk) for text in texts]
        size = chunk - encoder.ends
        parts = [overlapping(text, size, n) for text, n in zip(texts, counts, strict=True)]
        vectors = iter(encoder.read([part for some in parts for part in some], mean))
        return {name: [torch.cat([next(vectors) for _ in some]) for some in parts]}

    return Way(name, "", {name: SEVERAL}, read, lambda length: length > chunk)


def _more_places(word: str, kind: Kind, limit: int, scale: bool) -> Way:
    name = f"{word}, logits scaled" if scale else word

    def read(encoder: Encoder, texts: Sequence[Ids], around: Around) -> Rows:
        most = max(map(len, texts)) + encoder.ends
        other = around(longer(encoder.model, most, kind))
        factor = math.log(most) / math.log(limit) if scale else 1.0
        with scaled(other.model, factor):
            return {name: other.read(texts, mean)}

    return Way(name, "", {name: ONE}, read, lambda length: length > limit)


def _whole(model: str, chunk: int) -> Way:
    late = f"late chunks of {chunk}, {model}"

    def read(encoder: Encoder, texts: Sequence[Ids], around: Around) -> Rows:
        # Both of one pass.
        pooled = _both(mean, chunks(len(encoder.before), len(encoder.after), chunk - encoder.ends))
        found = encoder.read(texts, pooled)
        return {model: [v[:1] for v in found], late: [v[1:] for v in found]}

    return Way(f"one pass, {model}", model, {model: ONE, late: SEVERAL}, read)


def _both(one: Reduce, several: Reduce) -> Reduce:
    return lambda hidden: torch.cat([one(hidden), several(hidden)], 1)


def operations(model: PreTrainedModel, length: int) -> int:
    """Return about how many multiplications a pass over one text takes."""
    base = model.base_model
    linear = sum(
        module.weight.numel()
        for name, module in base.named_modules()
        if isinstance(module, nn.Linear) and "pooler" not in name
    )
    passes = families.passes(model)
    layers = len(families.attention_modules(model)) * passes
    attention = 2 * layers * model.config.hidden_size * length
    return length * (linear * passes + attention)


def affordable(model: PreTrainedModel, length: int, size: int) -> int:
    """Return how many pieces cost as much as one pass, or as many as the text fills."""
    least = math.ceil(length / size)
    return max(least, operations(model, length) // operations(model, size))
