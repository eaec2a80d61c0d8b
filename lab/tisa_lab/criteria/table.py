"""All criteria for all methods: settings in, a record out."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from tisa.packages import device_named
from tisa.positions import METHODS, canonical, resolve
from tisa_lab.criteria import (
    data_driven,
    efficient,
    inductive,
    interpretable,
    invariant,
    parallel,
)
from tisa_lab.criteria.measurement import RULES, Measurement
from tisa_lab.criteria.paper import CRITERIA, TABLE_1, claims, row_name
from tisa_lab.criteria.sensitivity import compared, sensitivity_of, variations
from tisa_lab.criteria.settings import Settings
from tisa_lab.record import sources, surroundings

MEASURES: dict[str, Callable[[str, Settings], Measurement]] = {
    "inductive": inductive.measure,
    "data-driven": data_driven.measure,
    "parameter efficient": efficient.measure,
    "translation invariant": invariant.measure,
    "parallelizable": parallel.measure,
    "interpretable": interpretable.measure,
}


def ordered(methods: Sequence[str] | None = None) -> list[str]:
    """Return those methods, the rows of Table 1 first, or refuse one.

    By default all that an encoder can have: the table is of encoders. Methods of somebody's own,
    and those with options, come last.
    """
    asked = list(METHODS) if methods is None else [canonical(name) for name in methods]
    for name in list(asked):
        chosen = resolve(name, what="methods")
        if methods is not None:
            chosen.check_encoder("methods")
        elif chosen.causal_only is not None:
            asked.remove(name)
    rows = [name for name, _ in TABLE_1.values() if name in asked]
    return list(dict.fromkeys([*rows, *(name for name in METHODS if name in asked), *asked]))


def run(
    settings: Settings,
    methods: Sequence[str] | None = None,
    *,
    varied: bool = False,
    command: str = "tisa_lab.criteria.table.run",
    progress: Callable[[str, str], None] = lambda method, criterion: None,
) -> dict[str, Any]:
    """Return the record: every number, every mark beside the paper's, and how sure it is.

    `varied` measures everything again with other random numbers and sizes. `progress` is called
    before each cell is measured.
    """
    started, busy = time.perf_counter(), time.process_time()
    names = ordered(methods)
    measured = measure(settings, names, progress)
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    others = variations(settings) if varied else {}
    rows = [_row(method, cells, settings) for method, cells in measured.items()]
    return {
        **surroundings(command, device_named(settings.device)),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(busy, 1),
        "settings": asdict(settings),
        "agreement": agreement(rows),
        "sources": sources(resolve(method) for method in names),
        "rows": rows,
        "sensitivity": sensitivity_of(measured, settings),
        "variations": {
            label: compared(measured, measure(other, names, progress), settings)
            for label, other in others.items()
        },
    }


def measure(
    settings: Settings, methods: Sequence[str], progress: Callable[[str, str], None]
) -> dict[str, dict[str, Measurement]]:
    """Return every cell of the table for these methods."""
    found: dict[str, dict[str, Measurement]] = {}
    threads = torch.get_num_threads()
    # Thousands of tiny operations one after the other: threads would only wait for each other.
    torch.set_num_threads(1)
    try:
        for method in methods:
            found[method] = {}
            for criterion in CRITERIA:
                progress(method, criterion)
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(settings.seed)
                    found[method][criterion] = MEASURES[criterion](method, settings)
    finally:
        torch.set_num_threads(threads)
    return found


def agreement(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many of the paper's marks agree with the measured ones."""
    cells = [
        (criterion, cell["mark"] == cell["paper"])
        for row in rows
        for criterion, cell in row["cells"].items()
        if cell["paper"] is not None
    ]
    return {
        "agree": sum(same for _, same in cells),
        "of": len(cells),
        "by criterion": {c: sum(same for name, same in cells if name == c) for c in CRITERIA},
    }


def _row(method: str, cells: dict[str, Measurement], settings: Settings) -> dict[str, Any]:
    claimed = claims().get(method, {})
    return {
        "method": resolve(method).label,
        "row": row_name(resolve(method).label),
        "cells": {
            criterion: {
                "mark": RULES[criterion].mark(cell, RULES[criterion].used(settings)),
                "paper": claimed.get(criterion),
                "number": cell.number,
                "refuted": cell.refuted,
                "evidence": cell.evidence,
            }
            for criterion, cell in cells.items()
        },
    }
