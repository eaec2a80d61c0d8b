"""A small encoder for each method and task, trained at one length and asked at longer ones."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tisa.packages import device_named
from tisa.positions import canonical, resolve
from tisa_lab.probes.tasks import OFFSET, TASKS, VOCABULARY, Made
from tisa_lab.probes.training import Sizes, answered, train
from tisa_lab.record import sources, surroundings

RACERS = ("none", "absolute", "sinusoidal", "rotary", "t5", "alibi", "kerple-log", "tisa",
          "tisa-v2", "near-far")  # fmt: skip


@dataclass(frozen=True)
class ProbeConfig(Sizes):
    """Sizes and recipe of every run of the race."""

    def __post_init__(self) -> None:
        # Training begins at half of it, where *find* must have an answer.
        self.check(shortest=2 * (OFFSET + 1))


def run_race(
    config: ProbeConfig,
    methods: tuple[str, ...] = RACERS,
    tasks: tuple[str, ...] = tuple(TASKS),
    *,
    device: str | None = None,
    command: str = "",
    progress: Callable[[str, str], None] = lambda method, task: None,
) -> dict[str, Any]:
    """Return the record: accuracy of each method, task and length; a name given twice runs once."""
    place = device_named(device)
    methods = tuple(map(canonical, methods))
    chosen = {method: resolve(method, what="methods") for method in methods}
    unknown = [task for task in tasks if task not in TASKS]
    if unknown or not tasks:
        raise ValueError(
            f"tasks: expected some of {', '.join(TASKS)}, got {', '.join(unknown) or 'none'}"
        )
    if not methods:
        raise ValueError("methods must be one or more, got none")
    for one in chosen.values():
        one.check_encoder("methods")
    rows = []
    for task in dict.fromkeys(tasks):
        for method in dict.fromkeys(methods):
            progress(method, task)
            found = run(config, method, task, place)
            rows.append({"method": chosen[method].label, "task": task} | found)
    return {
        "kind": "probes",
        "config": asdict(config),
        "rows": rows,
        "sources": sources(chosen.values()),
        "surroundings": surroundings(command, place),
    }


def run(config: ProbeConfig, method: str, task: str, device: torch.device) -> dict[str, Any]:
    """Return accuracy by length, the last loss and the time of one model and one task."""
    began = time.monotonic()
    torch.manual_seed(config.seed)
    model = config.model(method, VOCABULARY).to(device)

    def batch(length: int, generator: torch.Generator) -> Made:
        return TASKS[task](config.batch_size, length, generator)

    loss = train(model, config, batch, device)
    return {
        "accuracy": answered(model, config, TASKS[task], device),
        "loss": loss,
        "positional_parameters": model.transformer.num_parameters()[0],
        "seconds": time.monotonic() - began,
    }
