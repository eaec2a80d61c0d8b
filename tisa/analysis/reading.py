"""What the layers read of a position: embeddings through the model's normalisation, by parts.

A token's input is x̂ = N(word + position + constant), and N divides by a deviation that word and
position share: no position has an x̂ of its own. Over a sample of words the table x̂[word, position]
is therefore split as an analysis of variance does,

    x̂[w, i] = mean + word[w] + position[i] + rest[w, i],

each part with mean 0. `position` is what the model's heads see of a place, whatever the word.
With M = W_Q W_Kᵀ/√d_k a logit is then a sum of nine products, of which softmax sees six (what
depends on the query alone is the same for all keys), and each has a variance of its own.
"""

from dataclasses import dataclass

import torch

from tisa.analysis.families import PositionModel
from tisa.shapes import Float, Tensor

TERMS = ("position-position", "position-word", "word-position", "word-word", "position", "word")


@dataclass(frozen=True)
class Reading:
    """The parts of the first layer's input, and the share of its variance that each carries.

    table: (positions, width + 1), mean + position part, and a 1 for what does not depend on it.
    words: (words, width), the word part of the sample; None where the model has no words.
    """

    table: Float[Tensor, "positions width1"]
    words: Float[Tensor, "words width"] | None
    share_position: float
    share_word: float
    share_rest: float


def read_table(model: PositionModel, *, sample: int = 1024, seed: int = 0) -> Reading:
    """Return what the heads read of each position, averaged over a sample of the vocabulary."""
    positions = model.positions + model.constant
    if model.words is None:
        return Reading(_with_one(_normalised(positions, model.eps)), None, 1.0, 0.0, 0.0)
    count, width = model.words.shape
    # Each word at each position is what costs time here: fewer words where positions are many.
    sample = min(count, max(64, min(sample, sample * 512 // positions.shape[0])))
    generator = torch.Generator().manual_seed(seed)
    words = model.words[torch.randperm(count, generator=generator)[:sample]].double()
    if model.eps is not None:
        positions, words = (x - x.mean(-1, keepdim=True) for x in (positions, words))
    by_position = torch.zeros_like(positions)
    by_word = torch.zeros_like(words)
    square = 0.0
    for start in range(0, positions.shape[0], 2048):
        rows = slice(start, start + 2048)
        here = positions[rows].double()
        # x̂[w, i] = (position[i] + word[w]) / deviation[i, w], and no more is needed of x̂.
        squares = (here**2).sum(1, keepdim=True) + (words**2).sum(1) + 2 * here @ words.T
        share = torch.ones_like(squares)
        if model.eps is not None:
            share = (squares.clamp_min(0) / width + model.eps).rsqrt()
        by_position[rows] = (here * share.mean(1, keepdim=True) + share @ words / sample).float()
        by_word += share.T @ here + words * share.sum(0)[:, None]
        square += float((squares * share**2).sum())
    by_word /= positions.shape[0]
    mean = by_position.mean(0)
    total = square / (sample * positions.shape[0]) - float((mean**2).sum())
    position = float(((by_position - mean) ** 2).sum(1).mean())
    word = float(((by_word - mean) ** 2).sum(1).mean())
    return Reading(
        _with_one(by_position),
        (by_word - mean).float(),
        position / total,
        word / total,
        1 - (position + word) / total,
    )


def term_variances(
    model: PositionModel, reading: Reading, layer: int = 0
) -> Float[Tensor, "heads terms"]:
    """Return the variance of each of `TERMS` in the layer's logits, in the order of its heads.

    Words and positions are taken as independent and uniform over the sample and the table.
    "position-word" is a query's position with a key's word; "position" and "word" alone are what a
    key gets whatever the query is.
    """
    query, key = model.query[layer], model.key[layer]
    scale = query.shape[-1] ** -0.5
    mean = reading.table.mean(0)
    position = reading.table - mean
    parts = {"position": position}
    if reading.words is not None:
        parts["word"] = torch.cat((reading.words, torch.zeros(len(reading.words), 1)), 1)
    spread = {}
    for name, part in parts.items():
        covariance = part.T @ part / part.shape[0]
        spread[name] = [m.mT @ covariance @ m for m in (query, key)]
    variances = []
    for term in TERMS:
        of_query, _, of_key = term.rpartition("-")
        if not {of_query, of_key} - {""} <= set(spread):
            variances.append(query.new_zeros(len(query)))
        elif of_query:
            product = spread[of_query][0] * spread[of_key][1].mT
            variances.append(product.sum((-2, -1)) * scale**2)
        else:
            fixed = mean @ query  # (heads, dim)
            weighted = torch.einsum("hd,hde,he->h", fixed, spread[of_key][1], fixed)
            variances.append(weighted * scale**2)
    return torch.stack(variances, 1)


def _normalised(x: Tensor, eps: float | None) -> Tensor:
    if eps is None:
        return x
    return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps)


def _with_one(table: Tensor) -> Tensor:
    return torch.cat((table, torch.ones(table.shape[0], 1)), 1)
