"""A method and the others in, a record of everything that was measured out."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tisa.packages import device_named
from tisa.positions import Chosen, canonical, resolve
from tisa.store import write_text
from tisa_lab.compare.reckoning import check_affordable
from tisa_lab.compare.settings import CompareConfig, Sizes
from tisa_lab.compare.speed import times
from tisa_lab.compare.text import made_up
from tisa_lab.criteria import table
from tisa_lab.criteria.settings import Settings
from tisa_lab.executors import Place
from tisa_lab.extrapolation.measuring import extrapolated
from tisa_lab.extrapolation.windows import long_documents
from tisa_lab.pretrain.config import Grid, Length, RunSettings
from tisa_lab.pretrain.corpus import CorpusNames, head
from tisa_lab.pretrain.grid import Run, run_grid
from tisa_lab.probes.jobs import Probe, run_jobs
from tisa_lab.probes.race import ProbeConfig
from tisa_lab.probes.recall import RECALLS, RecallConfig
from tisa_lab.record import sources, surroundings
from tisa_lab.view import Silent

RUNS, PROBES = "runs", "probes"
# Of the held-out text, enough to read past the length.
READ_TOKENS = 400_000
HERE, MADE_UP = Place(), CorpusNames()


def compared(
    methods: tuple[str, ...],
    out: Path,
    *,
    config: CompareConfig,
    names: CorpusNames = MADE_UP,
    valid: str | None = None,
    place: Place = HERE,
    device: str | None = None,
    command: str = "",
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Return the record: criteria, tasks, recall, pretraining, past its length, speed.

    Models that are trained lie in `out`. Interrupted, it goes on with those that are finished,
    which take the most time; criteria and speed are measured again.
    """
    if not methods:
        raise ValueError("methods must be one or more, got none")
    where, sizes = device_named(device), config.sizes()
    methods = tuple(map(canonical, methods))
    every = tuple(dict.fromkeys([*methods, *map(canonical, sizes.others)]))
    chosen = {name: resolve(name, what="methods") for name in every}
    check_affordable(config, len(every), where, asked=device is not None, progress=progress)
    text = _Text(out, names, valid, sizes, config.seed)
    labels = {name: one.label for name, one in chosen.items()}
    decoders = {one.label: one.causal_only for one in chosen.values() if one.causal_only}
    # Table 1 and the tasks are of encoders.
    encoders = tuple(name for name in every if labels[name] not in decoders)
    progress("the criteria of Table 1")
    # Without the search beside known witnesses, which is for those who doubt these.
    criteria = table.run(
        Settings(
            seed=config.seed, device=device, search_beside=False, search_steps=sizes.search_steps
        ),
        encoders, command=command,
    )  # fmt: skip
    progress(f"tasks: {', '.join(sizes.tasks)}; recall")
    answers = run_jobs(
        _jobs(every, encoders, config, sizes), out / RUNS / PROBES, place=place, device=device,
        view=_Spoken(progress),
    )  # fmt: skip
    tasks = [row for row in answers if row["task"] in sizes.tasks]
    recall = [row for row in answers if row["task"] in RECALLS]
    progress("language models, and the same past their length")
    past = _language_models(every, out, text, config, place, device, progress)
    progress("speed")
    own = [name for name in every if name != "none"]
    speed = times(own, sizes.speed_length, sizes.speed_rounds, where)
    return {
        "kind": "compare",
        "methods": [labels[name] for name in methods],
        "decoders": decoders,
        "config": config.to_dict(),
        "made_up": names == MADE_UP,
        "rows": _rows(chosen, criteria, tasks, recall, past),
        "speed": {labels[name]: speed.get(name, 1.0) for name in every},
        "criteria": criteria["rows"],
        "tasks": tasks,
        "recall": recall,
        "past": past,
        "sources": sources(chosen.values()),
        "surroundings": surroundings(command, where),
    }  # fmt: skip


def _jobs(
    every: tuple[str, ...], encoders: tuple[str, ...], config: CompareConfig, sizes: Sizes
) -> list[Probe]:
    race = ProbeConfig(
        length=sizes.probe_length, factors=(1, 4), steps=sizes.probe_steps, seed=config.seed
    )
    recall = RecallConfig(
        length=sizes.recall_length, factors=sizes.recall_factors,
        steps=sizes.recall_steps, seed=config.seed,
    )  # fmt: skip
    tasks = [Probe(race, name, task) for task in sizes.tasks for name in encoders]
    return [*tasks, *(Probe(recall, name, "recall") for name in every)]


class _Spoken(Silent):
    """A view that says only what stays."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        super().__init__()
        self.progress = progress

    def say(self, line: str, *, wrong: bool = False) -> None:
        """Pass it on."""
        self.progress(f"  {line}")


class _Text:
    """What the language models are trained on and read: a person's text, or a made-up one."""

    def __init__(
        self, out: Path, names: CorpusNames, valid: str | None, sizes: Sizes, seed: int
    ) -> None:
        longest = max(sizes.factors) * sizes.length
        if names == MADE_UP:
            if valid is not None:
                raise ValueError(
                    f"valid must be given with a text to train on (data), got {valid} alone"
                )
            text, held_out = out / RUNS / "train.txt", out / RUNS / "valid.txt"
            # A document has about 3,000 bytes, which are the tokens; a sentence at least 20.
            documents = sizes.steps * sizes.batch_tokens // 3000 + 20
            write_text(text, made_up(documents, 100, seed))
            write_text(held_out, made_up(12, max(20, longest // 20), seed + 1))
            names, valid = CorpusNames([str(text)], tokenizer="bytes"), str(held_out)
        if valid is None:
            raise ValueError("valid must be held-out documents of a text that is given, got none")
        self.names, self.valid = names, valid
        # Before the training, not after it: some of them must fill the longest window.
        names.open()
        long_documents(head(names.beside(valid), 10**12), longest, READ_TOKENS, is_causal=True)


def _language_models(
    every: tuple[str, ...],
    out: Path,
    text: _Text,
    config: CompareConfig,
    place: Place,
    device: str | None,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Return what `tisa-lab extrapolate` records of a model for each method."""
    sizes = config.sizes()
    grid = Grid(
        objective="causal", hidden_size=sizes.hidden_size, embedding_size=None,
        num_hidden_layers=sizes.num_hidden_layers, lengths=(Length(sizes.length),),
        num_attention_heads=sizes.num_attention_heads, steps=sizes.steps, position=every,
        batch_tokens=sizes.batch_tokens, learning_rate=(sizes.learning_rate,), seed=config.seed,
    )  # fmt: skip
    configs = grid.configs()
    kind = None if device is None else device_named(device).type
    failed = run_grid(
        configs, out / RUNS, text.names, valid=text.valid, view=_Spoken(progress), place=place,
        settings=RunSettings(
            device=kind, bf16=sizes.bf16, evaluate_every=sizes.steps,
            checkpoint_every=min(500, sizes.steps), log_every=sizes.steps,
        ),
    )  # fmt: skip
    if failed:
        run, why = failed[0]
        raise ValueError(
            f"language models: {run.label} failed: {why}; the same command tries it again"
        )
    folders = [out / RUNS / Run(one).key for one in configs]
    return extrapolated(
        folders, data=text.valid, modes=("whole",), device=device, position=every,
        bf16=sizes.bf16, max_tokens=READ_TOKENS, split=text.names.split,
        lengths=tuple(factor * sizes.length for factor in sizes.factors), progress=progress,
    )  # fmt: skip


def _rows(
    chosen: dict[str, Chosen],
    criteria: dict[str, Any],
    tasks: list[dict[str, Any]],
    recall: list[dict[str, Any]],
    past: dict[str, Any],
) -> list[dict[str, Any]]:
    """Return one row for each method: what a person looks at first."""
    rows = []
    for one in chosen.values():
        found = [row["cells"] for row in criteria["rows"] if row["method"] == one.label]
        answers = [row["accuracy"] for row in tasks if row["method"] == one.label]
        reach = {row["task"]: row["accuracy"] for row in recall if row["method"] == one.label}
        (run,) = [run for run in past["runs"] if run["label"] == _grid_label(one)]
        rows.append({
            "method": one.label,
            "marks": sum(cell["mark"] for cell in found[0].values()) if found else None,
            "right": _mean([each["1"] for each in answers]),
            "right_far": _mean([each["4"] for each in answers]),
            "recall": list(reach["recall"].values()),
            "passkey": list(reach["passkey"].values()),
            "perplexity": [row.get("perplexity") for row in run["rows"]],
        })  # fmt: skip
    return sorted(rows, key=lambda row: row["perplexity"][0] or math.inf)


def _grid_label(chosen: Chosen) -> str:
    """Return what a grid calls a method: its options stand apart from its name."""
    return " ".join([chosen.name, *(f"{key}={value}" for key, value in chosen.options.items())])


def _mean(shares: list[float | None]) -> float | None:
    found = [share for share in shares if share is not None]
    return sum(found) / len(found) if found and len(found) == len(shares) else None
