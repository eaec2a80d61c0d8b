"""Which figures a report has: analyses in, (name, what it shows, Figure) out, one at a time."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from tisa.analysis import plots
from tisa.analysis.heads import block_means, factors, positional_attention
from tisa.analysis.kernels import KernelFits
from tisa.analysis.reading import TERMS
from tisa.analysis.toeplitz import mean_diagonal, toeplitz_r2, written
from tisa.analysis.whole import NEAR, Analysis
from tisa.offsets import offset_range, to_matrix
from tisa.shapes import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Squares to a side of a map: more cannot be seen.
SIDE = 512
TABLES = {
    "table": "P",
    "centred": "P, columns centred",
    "without_first": "P without the first position",
    "as_read": "P as the first layer reads it",
}

Named = Iterator[tuple[str, str, "Figure"]]


def figures_of(found: Analysis) -> Named:
    """Yield all figures of one model; each is made when it is asked for."""
    if found.model is not None:
        yield from _of_table(found)
        yield from _of_heads(found)
    for number, learned in enumerate(found.curves, 1):
        curve, name = learned.curve, f"learned-curve-{number}"
        title = f"{found.name}: f(k) of {curve.label}"
        figure = plots.learned_curves(curve.scores, curve.offsets, title=title)
        yield name, f"Learned scores f(k) of {curve.name}", figure
        title += " and kernels fitted"
        figure = _kernels(curve.scores, curve.offsets, learned.fits, title)
        yield f"{name}-kernels", f"Learned scores of {curve.name} with fitted kernels", figure
    if found.text is not None:
        text = found.text
        reach = min(NEAR, int(text.offsets[-1]))
        figure = plots.layers_by_offset(text.logits.mean(1), text.offsets, reach=reach)
        yield "text-layers", "Mean logits by layer and offset on the text", figure
        for layer in range(text.logits.shape[0]):
            yield (
                f"text-layer-{layer + 1}",
                f"Mean logits by offset of every head of layer {layer + 1} on the text",
                plots.learned_curves(
                    text.logits[layer],
                    text.offsets,
                    reach=reach,
                    title=f"On text: layer {layer + 1}",
                    label="logit above its row's mean",
                ),
            )


def figures_of_all(found: Sequence[Analysis], scores: Mapping[str, float] | None = None) -> Named:
    """Yield the figures that compare models; `scores` is a column of numbers by model name."""
    tables = [a for a in found if a.model is not None]
    if len(tables) >= 2:
        yield (
            "compare-gram",
            "P of all models side by side: " + ", ".join(a.name for a in tables),
            plots.gram_maps(
                [_gram(a.model.positions) for a in tables if a.model is not None],
                [f"{a.name}\nR² {written(a.invariance['table'].r2)}" for a in tables],
                positions=[a.model.positions.shape[0] for a in tables if a.model is not None],
            ),
        )
    defined = [a for a in tables if not math.isnan(a.invariance["table"].r2)]
    chosen = [a for a in defined if scores and a.name in scores]
    if scores and len(chosen) >= 2:
        yield (
            "compare-scores",
            "Toeplitz R² of P against the score",
            plots.score_scatter(
                [a.invariance["table"].r2 for a in chosen],
                [scores[a.name] for a in chosen],
                [a.name for a in chosen],
                intervals=[a.invariance["table"].interval for a in chosen],
            ),
        )


def _of_table(found: Analysis) -> Named:
    model, spectrum = found.model, found.spectrum
    assert model is not None
    assert spectrum is not None
    table = model.positions
    n = table.shape[0]
    measured = found.invariance["table"]
    yield (
        "table",
        f"The position table of {found.name}, positions by dimensions, and four of its rows",
        plots.embedding_table(table, title=f"{found.name}: E_P, {n} × {table.shape[1]} numbers"),
    )
    title = f"{found.name}: P, R² {written(measured.r2)}"
    figure = plots.gram_map(_gram(table), title=title, positions=n)
    yield "gram", f"Heat map of P of {found.name}", figure
    side = min(n, SIDE)
    fit = mean_diagonal(table[:side]).float()
    yield (
        "toeplitz",
        "P, its best Toeplitz fit, and what the fit leaves",
        plots.toeplitz_parts(
            table[:side] @ table[:side].T,
            to_matrix(fit[None], side, side)[0],
            r2=toeplitz_r2(table[:side]),
            title="" if side == n else f"first {side} positions of ",
        ),
    )
    parts = found.invariance
    yield (
        "toeplitz-r2",
        "Toeplitz R² with intervals and what chance gives",
        plots.toeplitz_bars(
            [f"{TABLES[t]}{end}" for t in parts for end in ("", ", off the diagonal")],
            [r for p in parts.values() for r in (p.r2, p.off_diagonal)],
            [i for p in parts.values() for i in (p.interval, p.off_diagonal_interval)],
            [r for p in parts.values() for r in (p.null.whole, p.null.off_diagonal)],
            title=f"{found.name}: how much of P is a function of the offset",
        ),
    )
    if found.grid is not None:
        fitted, r2, _, null, _ = found.grid
        yield "grid", "P by step on the grid of patches", plots.grid_steps(fitted, r2=r2, null=null)
    shown = (spectrum.variance, spectrum.trajectories, spectrum.frequencies.tolist())
    yield "spectrum", "Principal components of the position table", plots.spectrum(*shown)


def _of_heads(found: Analysis) -> Named:
    model, reading, raw = found.model, found.reading, found.raw_heads
    assert model is not None
    assert reading is not None
    assert raw is not None
    assert found.fits is not None
    n = model.positions.shape[0]
    offsets = offset_range(1 if model.causal else n, n)
    first = found.heads[0]
    yield (
        "heads",
        "Positional attention of all heads of the first layer, as the model reads positions",
        plots.head_maps(
            positional_attention(block_means(reading.table, 256), model.query[0], model.key[0]),
            r2=first.r2.tolist(),
            sensitive=first.sensitive,
            positions=n,
            title=f"{found.name}: F̂_P of the first layer",
        ),
    )
    yield (
        "heads-raw",
        "Positional attention of all heads of the first layer, raw product of the table",
        plots.head_maps(
            positional_attention(block_means(model.positions, 256), model.raw_query, model.raw_key),
            r2=raw.r2.tolist(),
            sensitive=first.sensitive,
            positions=n,
            title=f"{found.name}: raw E_P W_Q W_Kᵀ E_Pᵀ/√d",
        ),
    )
    strongest = first.strength.argsort(descending=True)[: min(4, len(first.strength))].tolist()
    rows = [n * part // 8 for part in (1, 3, 5, 7)]
    lines = torch.stack([_rows(found, head, rows) for head in strongest])
    yield (
        "offset-rows",
        "Rows of F̂_P against the offset, for the heads most sensitive to position",
        plots.offset_rows(lines, rows, first.curves[strongest], offsets, strongest),
    )
    title = f"{found.name}: f(k) of the first layer's heads"
    figure = _kernels(first.curves, offsets, found.near_fits[0], title)
    yield "kernels", "Mean diagonal of every head of the first layer with five kernels", figure
    figure = plots.kernel_errors(found.fits.r2)
    yield "kernel-errors", "What S kernels leave of each head's curve, all offsets", figure
    if found.terms is not None:
        figure = plots.logit_terms(found.terms / found.terms.sum(1, keepdim=True), TERMS)
        yield "logit-terms", "What the first layer's logits are made of", figure


def _rows(found: Analysis, head: int, rows: list[int]) -> Tensor:
    model, reading = found.model, found.reading
    assert model is not None
    assert reading is not None
    a, b = factors(reading.table, model.query[0, head], model.key[0, head])
    found_rows = a[rows] @ b.T
    if model.causal:  # what a query does not see is not drawn
        later = torch.arange(len(b)) > torch.tensor(rows)[:, None]
        found_rows[later] = torch.nan
    return found_rows


def _kernels(curves: Tensor, offsets: Tensor, fits: KernelFits, title: str) -> "Figure":
    size = min(5, len(fits.kernels) - 1)
    reach = min(NEAR, int(offsets.abs().max()))
    return plots.kernel_curves(
        curves,
        offsets,
        fits.kernels[size],
        fits.constants[size],
        r2=fits.r2[size].tolist(),
        title=f"{title}, S = {size}",
        reach=reach,
    )


def _gram(table: Tensor) -> Tensor:
    small = block_means(table, SIDE)
    return small @ small.T
