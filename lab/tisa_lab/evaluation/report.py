"""Curves over learning rates as tables, a page in Markdown, and plain data."""

import math
import statistics
from typing import Any

from tisa_lab.evaluation.rates import Curve, gate
from tisa_lab.extrapolation.report import shown
from tisa_lab.pretrain.asking import EVALUATED
from tisa_lab.tables import markdown

WITHIN = (0.02, 0.1)
Table = tuple[list[str], list[list[str]]]


def page(curves: list[Curve]) -> str:
    """Return everything that the records have, as Markdown."""
    parts = ["## Loss against the learning rate", "", markdown(*by_rate(curves)), "",
             markdown(*best_of_rates(curves)), "", gate(curves)]  # fmt: skip
    for title, made in answered(curves).items():
        parts += ["", f"## {title}", "", markdown(*made)]
    wrong = failed(curves)
    if wrong:
        parts += ["", "## What failed", "", *(f"- {line}" for line in wrong)]
    return "\n".join(parts) + "\n"


def answered(curves: list[Curve]) -> dict[str, Table]:
    """Return what models were asked, each part that some of them answered, by its title."""
    titles = {"BLiMP, % right": blimp, "Sliding windows: perplexity": windows,
              "Recall, % right": recall, "Copying, % right (gain in nats)": copying}  # fmt: skip
    found = {title: made(curves) for title, made in titles.items()}
    return {title: table for title, table in found.items() if table[1]}


def failed(curves: list[Curve]) -> list[str]:
    """Return which part of which model's evaluation failed, and why."""
    return sorted(
        f"{curve.label}, rate {rate:g}, seed {record['config']['seed']}, {part}: {answer['failed']}"
        for curve in curves
        for rate, some in curve.runs.items()
        for record in some
        for part, answer in record.get(EVALUATED, {}).items()
        if "failed" in answer
    )


def by_rate(curves: list[Curve]) -> Table:
    """Return perplexities by rate; seeds in one cell have commas between them."""
    rates = sorted({rate for curve in curves for rate in curve.rates})
    rows = []
    for curve in curves:
        cells = []
        for rate in rates:
            losses = curve.losses(rate) if rate in curve.runs else []
            cell = ", ".join(shown(math.exp(min(loss, 700))) for loss in losses) or "–"
            cells.append(f"**{cell}**" if rate == curve.best else cell)
        rows.append([curve.label, *cells])
    return ["perplexity", *(f"{rate:g}" for rate in rates)], rows


def best_of_rates(curves: list[Curve]) -> Table:
    """Return each method at its best rate, and how wide the range of rates around it is."""
    rows = []
    for curve in curves:
        losses, spread = curve.losses(curve.best), curve.spread
        told = "1" if spread is None else f"{len(losses)} ({100 * math.expm1(spread):.1f} %)"
        around = []
        for share in WITHIN:
            low, high, open_ended = curve.within(share)
            around.append(f"{'≥ ' * open_ended}{high / low:.1f} ({_rate(low)} … {_rate(high)})")
        rows.append([
            curve.label, shown(curve.perplexity(curve.best)), f"{curve.best:g}", told, *around
        ])  # fmt: skip
    ranges = (f"rates within {100 * share:.0f} %: highest ÷ lowest" for share in WITHIN)
    return ["method", "best perplexity", "its rate", "seeds (spread)", *ranges], rows


def blimp(curves: list[Curve]) -> Table:
    """Return the share of right pairs by phenomenon, at each method's best rate."""
    asked = {curve.label: curve.answers("blimp") for curve in curves}
    names = sorted({name for some in asked.values() for one in some for name in one["phenomena"]})
    rows = [
        [method, f"{100 * _mean([one['right'] for one in some]):.1f}",
         *(f"{100 * _mean([one['phenomena'][name] for one in some]):.0f}" for name in names)]
        for method, some in asked.items() if some
    ]  # fmt: skip
    return ["method", "all", *(name.replace("_", " ") for name in names)], rows


def windows(curves: list[Curve]) -> Table:
    """Return perplexities of sliding windows by length; other readings have rows of their own."""
    rows: dict[str, dict[int, list[float]]] = {}
    for curve in curves:
        for one in curve.answers("windows"):
            for row in one:
                name = row.get("reading", curve.label)
                losses = rows.setdefault(name, {}).setdefault(row["length"], [])
                losses += [row["loss"]] if row.get("loss") is not None else []
    lengths = sorted({length for one in rows.values() for length in one})
    return ["method", *(f"{length:,}" for length in lengths)], [
        [name, *(shown(math.exp(min(_mean(one[n]), 700))) if one.get(n) else "–" for n in lengths)]
        for name, one in rows.items()
    ]


def recall(curves: list[Curve]) -> Table:
    """Return what small decoders with each method remember, by task and length."""
    rows, factors = [], []
    for curve in curves:
        found = curve.answers("recall")
        if not found:
            continue
        cells = []
        for task in ("recall", "passkey"):
            seeds = [row["accuracy"] for one in found for row in one if row["task"] == task]
            factors = list(seeds[0])
            for factor in factors:
                some = [accuracy[factor] for accuracy in seeds if accuracy[factor] is not None]
                cells.append(f"{100 * _mean(some):.0f}" if some else "–")
        rows.append([curve.label, *cells])
    heads = [f"{task}, {n} ×" for task in ("recall", "passkey") for n in factors]
    return ["method", *heads], rows


def copying(curves: list[Curve]) -> Table:
    """Return what the trained models themselves copy from that far away."""
    rows, lengths = [], []
    for curve in curves:
        found = curve.answers("copying")
        if not found:
            continue
        lengths = [row["length"] for row in found[0]]
        cells = []
        for number in range(len(lengths)):
            some = [one[number] for one in found if "right" in one[number]]
            right, gain = (_mean([one[name] for one in some]) for name in ("right", "gain"))
            cells.append(f"{100 * right:.1f} ({gain:+.2f})" if some else "–")
        rows.append([curve.label, *cells])
    return ["method", *(f"{length:,}" for length in lengths)], rows


def data(curves: list[Curve]) -> list[dict[str, Any]]:
    """Return the same as plain values."""
    return [
        {
            "method": curve.label,
            "best_rate": curve.best,
            "perplexity": _finite(curve.perplexity(curve.best)),
            "spread": curve.spread,
            "losses": {f"{r:g}": [_finite(x) for x in curve.losses(r)] for r in curve.rates},
            "within": {f"{share:g}": list(curve.within(share)) for share in WITHIN},
            **{part: curve.answers(part) for part in ("blimp", "windows", "recall", "copying")},
        }
        for curve in curves
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _rate(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")
