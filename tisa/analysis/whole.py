"""The whole analysis of one model: weights in, one `Analysis` out, all numbers as plain data."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tisa.analysis.curves import Curve, read_curves
from tisa.analysis.families import PositionModel, has_table, read_positions, why_not
from tisa.analysis.grid import grid_fit
from tisa.analysis.heads import Heads, analyse_heads
from tisa.analysis.kernels import KernelFits, fit_heads
from tisa.analysis.reading import Reading, read_table, term_variances
from tisa.analysis.resampling import Null, bootstrap_interval, gaussian_null
from tisa.analysis.spectrum import Spectrum, principal_components
from tisa.analysis.text import TextCurves, attention_by_offset
from tisa.analysis.toeplitz import centred, diagonals
from tisa.offsets import offset_range
from tisa.shapes import Float, Tensor
from tisa.weights import read_checkpoint

NEAR = 64
# Kernels in the largest fit: of the first layer and learned curves, and of deeper layers.
LARGEST_FIT, LARGEST_DEEPER = 8, 5


@dataclass(frozen=True)
class Invariance:
    """Toeplitz R² of P of one table: estimate, interval and null, whole and off the diagonal.

    Estimate and interval are NaN where P has no variance, as P of a table of zeros.
    """

    r2: float
    interval: tuple[float, float]
    off_diagonal: float
    off_diagonal_interval: tuple[float, float]
    null: Null


@dataclass(frozen=True)
class LearnedCurve:
    """A curve that the model holds as such, and how many kernels it takes to say the same."""

    curve: Curve
    fits: KernelFits


@dataclass(frozen=True)
class Analysis:
    """Everything that is known about one model's positions; what the model lacks is None.

    invariance: by table: "table" (E_P), "centred", "without_first", "as_read" (through
    normalisation and map). heads: one entry per layer, as read. raw_heads: the first layer's raw
    product. fits: kernels for the first layer's mean diagonals over all offsets; near_fits: for
    every layer's, |k| ≤ 64.
    """

    name: str
    family: str
    model: PositionModel | None = None
    reading: Reading | None = None
    invariance: dict[str, Invariance] = field(default_factory=dict)
    blocks: list[tuple[int, int, Invariance]] = field(default_factory=list)
    grid: tuple[Tensor, float, float, float, float] | None = None
    spectrum: Spectrum | None = None
    raw_heads: Heads | None = None
    heads: tuple[Heads, ...] = ()
    fits: KernelFits | None = None
    near_fits: tuple[KernelFits, ...] = ()
    terms: Float[Tensor, "heads terms"] | None = None
    curves: tuple[LearnedCurve, ...] = ()
    text: TextCurves | None = None


def analyze(
    model: str | Path,
    *,
    text: str | None = None,
    biases: bool = False,
    seed: int = 0,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Analysis:
    """Return the analysis of a local folder, a weight file, or a model on the hub.

    Args:
        model: what to read; local paths never touch the network.
        text: run the model on this text too: mean logits by offset for every layer.
        biases: add the biases of queries and keys to F̂_P; the paper's product has none.
        seed: of null, bootstrap and the sample of words.
        trust_remote_code: with a text, run code that lies beside the model.
        progress: called with a few words at every step.
    """
    tell = progress or (lambda step: None)
    tell("reading weights")
    checkpoint = read_checkpoint(model)
    curves = read_curves(checkpoint)
    if not curves and not has_table(checkpoint):
        raise ValueError(f"{checkpoint.name}: {why_not(checkpoint)}")
    found: dict[str, Any] = {}
    family = "learned curves"
    length = 256
    with torch.no_grad():
        if has_table(checkpoint):
            positions = read_positions(checkpoint, biases=biases)
            family, length = positions.family, min(length, positions.positions.shape[0])
            found = _tables(positions, seed, tell)
        if curves:
            tell("learned curves")
            found["curves"] = tuple(
                LearnedCurve(c, fit_heads(c.scores, c.offsets, largest=LARGEST_FIT)) for c in curves
            )
        if text is not None:
            found["text"] = attention_by_offset(
                checkpoint, text, length=length, progress=progress,
                trust_remote_code=trust_remote_code,
            )  # fmt: skip
    return Analysis(checkpoint.name, family, **found)


def measure_invariance(
    table: Float[Tensor, "positions width"],
    *,
    prepare: Callable[[Tensor], Tensor] | None = None,
    null: Null | None = None,
    seed: int = 0,
) -> Invariance:
    """Return the Toeplitz R² of P = E Eᵀ with its interval and its null.

    `prepare` is done to the table, and to the null's tables, first; a `null` that is known already
    is not drawn again.
    """
    positions, width = table.shape
    sums = diagonals(prepare(table) if prepare else table)
    whole = sums.whole()
    return Invariance(
        float(whole.r2()),
        bootstrap_interval(sums, seed=seed),
        float(whole.r2(off_diagonal=True)),
        bootstrap_interval(sums, off_diagonal=True, seed=seed),
        # Large tables vary less, and take longer.
        null
        or gaussian_null(
            positions,
            width,
            draws=10 if positions <= 1024 else 3,
            seed=seed,
            deviation=float(table.std(0).mean()) or 1.0,
            prepare=prepare,
        ),
    )


def measure_blocks(
    table: Float[Tensor, "positions width"], *, size: int | None = None, seed: int = 0
) -> list[tuple[int, int, Invariance]]:
    """Return (start, end, invariance of P among these positions alone) of each block.

    Blocks are of `size` positions; by default of 128, in tables below 256 positions of 32.
    """
    size = size or (128 if table.shape[0] >= 256 else 32)
    found: list[tuple[int, int, Invariance]] = []
    nulls: dict[int, Null] = {}
    for start in range(0, table.shape[0], size):
        part = table[start : start + size]
        if part.shape[0] < min(16, size) and found:
            continue  # a rest of a few rows says nothing
        measured = measure_invariance(part, null=nulls.get(len(part)), seed=seed)
        nulls[len(part)] = measured.null
        found.append((start, start + len(part), measured))
    return found


def _tables(model: PositionModel, seed: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Return what is known from a table of position embeddings and the heads that read it."""
    table = model.positions
    tell("translation invariance of P")
    invariance = {
        "table": measure_invariance(table, seed=seed),
        "centred": measure_invariance(table, prepare=centred, seed=seed),
        "without_first": measure_invariance(table[1:], seed=seed),
    }
    tell("what the heads read")
    reading = read_table(model, seed=seed)
    invariance["as_read"] = measure_invariance(
        reading.table[:, :-1],
        prepare=lambda x: torch.nn.functional.pad(x, (0, 1), value=1.0) @ model.through,
        seed=seed,
    )
    grid = None
    if model.grid is not None:
        grid = _grid(table, model.grid, seed)
    tell("principal components")
    spectrum = principal_components(table)
    draws = 5 if table.shape[0] <= 1024 else 1
    tell("heads, raw product")
    causal = model.causal
    raw = analyse_heads(table, model.raw_query, model.raw_key, causal=causal, null_draws=draws)
    heads, near = [], []
    offsets = offset_range(1 if causal else table.shape[0], table.shape[0])
    pairs = (table.shape[0] - offsets.abs()).float()
    for layer in range(model.query.shape[0]):
        tell(f"heads, layer {layer + 1} of {model.query.shape[0]}")
        query, key = model.query[layer], model.key[layer]
        heads.append(
            analyse_heads(
                reading.table, query, key, causal=causal, null_draws=0 if layer else draws
            )
        )
        curves = heads[-1].curves
        size = LARGEST_FIT if layer == 0 else LARGEST_DEEPER
        near.append(fit_heads(curves, offsets, largest=size, weights=pairs, reach=NEAR))
        if layer == 0:
            fits = fit_heads(curves, offsets, largest=size, weights=pairs)
    return {
        "model": model,
        "reading": reading,
        "invariance": invariance,
        "blocks": measure_blocks(table, seed=seed),
        "grid": grid,
        "spectrum": spectrum,
        "raw_heads": raw,
        "heads": tuple(heads),
        "fits": fits,
        "near_fits": tuple(near),
        "terms": term_variances(model, reading) if model.words is not None else None,
    }


def _grid(
    table: Tensor, grid: tuple[int, int], seed: int
) -> tuple[Tensor, float, float, float, float]:
    """Return the mean of P by step on the grid, its R² whole and off the diagonal, and both nulls.

    The places of the grid are the table's last rows; [CLS] comes before them.
    """
    rows, columns = grid
    generator = torch.Generator().manual_seed(seed)
    places = table[table.shape[0] - rows * columns :]
    draws = [
        grid_fit(torch.randn(places.shape, generator=generator), rows, columns)[1:]
        for _ in range(5)
    ]
    null = torch.tensor(draws).mean(0).tolist()
    return (*grid_fit(places, rows, columns), null[0], null[1])
