"""A method and the others in, a record of everything that was measured out."""

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tisa.packages import device_named
from tisa.positions import canonical, resolve
from tisa.store import write_text
from tisa_lab.compare.settings import CompareConfig
from tisa_lab.compare.speed import times
from tisa_lab.compare.text import made_up
from tisa_lab.criteria import table
from tisa_lab.criteria.settings import Settings
from tisa_lab.extrapolation.measuring import extrapolated
from tisa_lab.pretrain.config import Grid, Length, RunSettings
from tisa_lab.pretrain.corpus import CorpusNames
from tisa_lab.pretrain.grid import Run, run_grid
from tisa_lab.probes.race import RACERS, ProbeConfig, run_race
from tisa_lab.record import sources, surroundings
from tisa_lab.view import Silent

# What a method of somebody's is compared with.
OTHERS = RACERS
RUNS = "runs"


def compared(
    methods: tuple[str, ...],
    out: Path,
    *,
    others: tuple[str, ...] = OTHERS,
    config: CompareConfig,
    device: str | None = None,
    command: str = "",
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Return the record: criteria, tasks, pretraining, past its length, speed; runs lie in `out`.

    Interrupted, it goes on with the finished language models, which take the most time.
    """
    if not methods:
        raise ValueError("methods must be one or more, got none")
    place = device_named(device)
    methods = tuple(map(canonical, methods))
    every = tuple(dict.fromkeys([*methods, *map(canonical, others)]))
    chosen = {name: resolve(name, what="methods") for name in every}
    labels = {name: one.label for name, one in chosen.items()}
    decoders = {one.label: one.causal_only for one in chosen.values() if one.causal_only}
    # Table 1 and the tasks are of encoders.
    encoders = tuple(name for name in every if labels[name] not in decoders)
    progress("the criteria of Table 1")
    # Without the search beside known witnesses, which is for those who doubt these.
    criteria = table.run(
        Settings(
            seed=config.seed, device=device, search_beside=False, search_steps=config.search_steps
        ),
        encoders, command=command,
    )  # fmt: skip
    progress(f"tasks: {', '.join(config.tasks)}")
    tasks: dict[str, Any] = {"rows": []}
    if encoders:
        tasks = run_race(
            ProbeConfig(
                length=config.probe_length, factors=(1, 4), steps=config.probe_steps,
                seed=config.seed,
            ),
            encoders, config.tasks, device=device,
            progress=lambda method, task: progress(f"  {task}: {method}"),
        )  # fmt: skip
    progress("language models, and the same past their length")
    past = _language_models(every, out, config, device, progress)
    progress("speed")
    own = [name for name in every if name != "none"]
    speed = times(own, config.speed_length, config.speed_rounds, place)
    return {
        "kind": "compare",
        "methods": [labels[name] for name in methods],
        "decoders": decoders,
        "config": asdict(config),
        "rows": _rows(labels, criteria, tasks, past),
        "speed": {labels[name]: speed[name] for name in every},
        "criteria": criteria["rows"],
        "tasks": tasks["rows"],
        "past": past,
        "sources": sources(resolve(name) for name in every),
        "surroundings": surroundings(command, place),
    }  # fmt: skip


def _language_models(
    every: tuple[str, ...],
    out: Path,
    config: CompareConfig,
    device: str | None,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Return what `tisa-lab extrapolate` records of a model for each method."""
    text, held_out = out / RUNS / "train.txt", out / RUNS / "valid.txt"
    # A sentence has about 30 bytes, which are the tokens.
    sentences = max(20, 4 * config.length // 20)
    write_text(text, made_up(config.steps * config.batch_tokens // 3000 + 20, 100, config.seed))
    write_text(held_out, made_up(12, sentences, config.seed + 1))
    grid = Grid(
        objective="causal", hidden_size=config.hidden_size, embedding_size=None,
        num_hidden_layers=config.num_hidden_layers, lengths=(Length(config.length),),
        num_attention_heads=config.num_attention_heads, steps=config.steps, position=every,
        batch_tokens=config.batch_tokens, learning_rate=(config.learning_rate,), seed=config.seed,
    )  # fmt: skip
    configs = grid.configs()
    names = CorpusNames([str(text)], tokenizer="bytes")
    kind = None if device is None else device_named(device).type
    failed = run_grid(
        configs, out / RUNS, names, valid=str(held_out), view=Silent(),
        settings=RunSettings(
            device=kind, evaluate_every=config.steps, checkpoint_every=config.steps,
            log_every=config.steps,
        ),
    )  # fmt: skip
    if failed:
        raise ValueError(f"language models: {failed[0][0].label} failed: {failed[0][1]}")
    folders = [out / RUNS / Run(one).key for one in configs]
    return extrapolated(
        folders, data=str(held_out), modes=("whole",), device=device, position=every,
        lengths=tuple(factor * config.length for factor in (1, 2, 4)), progress=progress,
    )  # fmt: skip


def _rows(
    labels: dict[str, str], criteria: dict[str, Any], tasks: dict[str, Any], past: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return one row for each method: what a person looks at first."""
    rows = []
    for name, label in labels.items():
        found = [row["cells"] for row in criteria["rows"] if row["method"] == label]
        answers = [row["accuracy"] for row in tasks["rows"] if row["method"] == label]
        (run,) = [run for run in past["runs"] if run["label"] == _grid_label(name)]
        rows.append({
            "method": label,
            "marks": sum(cell["mark"] for cell in found[0].values()) if found else None,
            "right": _mean([one["1"] for one in answers]),
            "right_far": _mean([one["4"] for one in answers]),
            "perplexity": [row.get("perplexity") for row in run["rows"]],
        })  # fmt: skip
    return sorted(rows, key=lambda row: row["perplexity"][0] or math.inf)


def _grid_label(name: str) -> str:
    """Return what a grid calls a method: its options stand apart from its name."""
    chosen = resolve(name)
    return " ".join([chosen.name, *(f"{key}={value}" for key, value in chosen.options.items())])


def _mean(shares: list[float | None]) -> float | None:
    found = [share for share in shares if share is not None]
    return sum(found) / len(found) if found and len(found) == len(shares) else None
