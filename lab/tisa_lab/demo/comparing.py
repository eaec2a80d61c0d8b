"""Chapters 7 and 8: Table 1 of the paper measured, and methods raced on the position probes."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from tisa.packages import device_named
from tisa_lab.criteria import table
from tisa_lab.criteria.paper import CRITERIA, TABLE_1
from tisa_lab.criteria.settings import Settings as CriteriaSettings
from tisa_lab.demo.settings import Settings
from tisa_lab.probes import race
from tisa_lab.probes.tasks import OFFSET


def criteria(settings: Settings, progress: Callable[[str, float], None]) -> dict[str, Any]:
    """Return every mark of Table 1, measured as `tisa-lab criteria` does, beside the paper's."""
    names = list(settings.criteria_methods) or [name for name, _ in TABLE_1.values()]
    measured = CriteriaSettings(seed=settings.seed, search_beside=not settings.quick)
    cells = len(names) * len(CRITERIA)
    done = -1

    def tell(method: str, criterion: str) -> None:
        nonlocal done
        done += 1
        progress(f"{method}: {criterion}", done / cells)

    record = table.run(measured, names, progress=tell)
    return {
        "agree": record["agreement"]["agree"],
        "of": record["agreement"]["of"],
        "rows": record["rows"],
    }


def probes(settings: Settings, progress: Callable[[str, float], None]) -> dict[str, Any]:
    """Return the right answers of every method at the training length and past it."""
    config = race.ProbeConfig(
        length=settings.race_length, steps=settings.race_steps, seed=settings.seed,
        factors=(1, 2, 4), asked=128,
    )  # fmt: skip
    runs = [(task, method) for task in settings.race_tasks for method in settings.race_methods]
    rows = []
    for number, (task, method) in enumerate(runs):
        progress(f"{task}: {method}", number / len(runs))
        found = race.run(config, method, task, device_named(settings.device))
        rows.append({"task": task, "method": method} | found)
    return {
        "rows": rows,
        "lengths": [factor * config.length for factor in config.factors],
        "steps": config.steps,
        "offset": OFFSET,
        "config": asdict(config),
    }
