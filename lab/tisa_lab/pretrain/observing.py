"""What a model in training knows about position: numbers for its record, small enough to keep."""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tisa.analysis.resampling import Null, gaussian_null
from tisa.analysis.toeplitz import toeplitz_r2
from tisa.positions.absolute import Absolute
from tisa.positions.from_scoring import FromScoring
from tisa.positions.tupe import Tupe
from tisa.scoring import ScoringFunction
from tisa.shapes import Float, Tensor
from tisa.transformer import LanguageModel

BLOCK = 128


def position_table(model: LanguageModel) -> Float[Tensor, "positions width"] | None:
    """Return the learned vectors of positions, None where the method has none."""
    position: nn.Module = model.transformer.position
    if not isinstance(position, (Absolute, Tupe)):
        return None
    weight: Tensor = position.table.weight.detach()
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
    # TUPE's first row is [CLS]'s own.
    return weight.float().cpu()[1 if isinstance(position, Tupe) else 0 :]


def observed(model: LanguageModel) -> dict[str, Any]:
    """Return the Toeplitz R² of P beside chance, and how far P looks like blocks of 128."""
    table = position_table(model)
    if table is None:
        return {}
    null = _null(*table.shape)
    whole, off = (toeplitz_r2(table, off_diagonal=o) for o in (False, True))
    return {
        "r2": None if math.isnan(whole) else whole,
        "r2_off_diagonal": None if math.isnan(off) else off,
        "chance": null.whole,
        "chance_off_diagonal": null.off_diagonal,
        **block_contrast(table),
    }


def block_contrast(table: Float[Tensor, "positions width"]) -> dict[str, float]:
    """Return how far the first 128 positions are a block of P: means in it, beside it, around it.

    `block` is the share of P's variance off the diagonal that these three means explain: near 0
    for a Toeplitz matrix of short range, large where the block is of one brightness.
    `block_squares` is the share of all squares off the diagonal that lie in it, whatever its
    pattern: of 512 positions it has a sixteenth of the places, and of a Toeplitz matrix of short
    range a fourth of the squares.
    """
    if table.shape[0] < 2 * BLOCK:
        return {}
    gram = (table @ table.T).double()
    inside = torch.arange(table.shape[0]) < BLOCK
    pairs = inside.long()[:, None] + inside.long()[None, :]
    off = ~torch.eye(table.shape[0], dtype=torch.bool)
    total = gram[off].var(correction=0)
    fitted = torch.zeros_like(gram)
    found = {}
    for name, number in (("others", 0), ("between", 1), ("first", 2)):
        here = (pairs == number) & off
        found[f"mean_{name}"] = float(gram[here].mean())
        fitted[here] = gram[here].mean()
    found["block"] = float(fitted[off].var(correction=0) / total) if total > 0 else 0.0
    squares = gram.square() * off
    found["block_squares"] = float(squares[:BLOCK, :BLOCK].sum() / squares.sum().clamp_min(1e-300))
    norms = table.norm(dim=1)
    found["norm_first"] = float(norms[inside].mean())
    found["norm_others"] = float(norms[~inside].mean())
    return found


def curves(model: LanguageModel, farthest: int) -> dict[str, Any]:
    """Return every head's score at near and some far offsets, {} for other methods; on the CPU."""
    position = model.transformer.position
    if not isinstance(position, FromScoring):
        return {}
    near = torch.arange(-64, 65)
    far = torch.unique(torch.logspace(6, 13, 57, base=2.0).round().long())
    far = far[(far > 64) & (far <= max(128, 8 * farthest))]
    offsets = torch.cat((-far.flip(0), near, far))
    scores = []
    for scoring in position.scoring:
        assert isinstance(scoring, ScoringFunction)
        with torch.no_grad():
            scores.append(scoring.scores(offsets))
    return {
        "offsets": offsets.tolist(),
        "scores": [[[round(v, 5) for v in head] for head in s.tolist()] for s in scores],
    }


@lru_cache(maxsize=4)
def _null(positions: int, width: int) -> Null:
    return gaussian_null(positions, width, draws=3)
