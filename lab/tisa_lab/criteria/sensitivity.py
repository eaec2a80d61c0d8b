"""How the marks depend on the thresholds, on the random numbers and on the sizes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tisa_lab.criteria.measurement import RULES, Measurement
from tisa_lab.criteria.paper import claims
from tisa_lab.criteria.settings import Settings

# The thresholds that are tried beside the one that is used.
TRIED: dict[str, tuple[float, ...]] = {
    "inductive": (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99),
    "data-driven": (0, 1, 10, 100, 1000),
    "parameter efficient": (1e-6, 1e-5, 1e-4, 1e-3, 5e-3, 1e-2, 2e-2, 0.1, 1.0),
    "translation invariant": (1e-12, 1e-9, 1e-6, 1e-3, 1e-2, 0.1, 1.0),
    "parallelizable": (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0),
    "interpretable": (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999),
}


def sensitivity_of(
    measured: Mapping[str, Mapping[str, Measurement]], settings: Settings
) -> list[dict[str, Any]]:
    """Return for each criterion and threshold how many marks agree and which ones change.

    Parameter efficiency has a second definition beside its threshold, that counts must not grow
    with the length; it is also tried without it.
    """
    rows = []
    for criterion, thresholds in TRIED.items():
        for threshold in thresholds:
            rows.append(_tried(measured, settings, criterion, threshold, growing=False))
    for threshold in TRIED["parameter efficient"]:
        rows.append(_tried(measured, settings, "parameter efficient", threshold, growing=True))
    return rows


def variations(settings: Settings) -> dict[str, Settings]:
    """Return other random numbers and other sizes to measure everything with again."""
    # What the search finds beside a known witness says nothing about a mark.
    settings = replace(settings, search_beside=False)
    return {
        f"seed {settings.seed + 10_000}": replace(settings, seed=settings.seed + 10_000),
        f"seed {settings.seed + 20_000}": replace(settings, seed=settings.seed + 20_000),
        "96 positions, 4 heads of 16": replace(
            settings, training_length=96, hidden_size=64, num_attention_heads=4
        ),
    }


def compared(
    base: Mapping[str, Mapping[str, Measurement]],
    varied: Mapping[str, Mapping[str, Measurement]],
    settings: Settings,
) -> dict[str, Any]:
    """Return the marks that a variation changes, and all its numbers."""
    changed = []
    for method, cells in base.items():
        for criterion, cell in cells.items():
            rule = RULES[criterion]
            mark = rule.mark(varied[method][criterion], rule.used(settings))
            if mark != rule.mark(cell, rule.used(settings)):
                changed.append(f"{method}, {criterion} {'✓' if mark else '✗'}")
    return {
        "changed": changed,
        "numbers": {
            method: {criterion: cell.number for criterion, cell in cells.items()}
            for method, cells in varied.items()
        },
    }


def _tried(
    measured: Mapping[str, Mapping[str, Measurement]],
    settings: Settings,
    criterion: str,
    threshold: float,
    *,
    growing: bool,
) -> dict[str, Any]:
    rule, claimed = RULES[criterion], claims()
    agree, changed = 0, []
    for method, cells in measured.items():
        if method not in claimed:
            continue
        cell = replace(cells[criterion], refuted=False) if growing else cells[criterion]
        mark = rule.mark(cell, threshold)
        agree += mark == claimed[method][criterion]
        if mark != rule.mark(cells[criterion], rule.used(settings)):
            changed.append(f"{method} {'✓' if mark else '✗'}")
    return {
        "criterion": criterion + (", growth allowed" if growing else ""),
        "threshold": threshold,
        "used": not growing and threshold == rule.used(settings),
        "agree": agree,
        "of": sum(method in claimed for method in measured),
        "changed": changed,
    }
