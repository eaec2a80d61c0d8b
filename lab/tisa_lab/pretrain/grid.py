"""Methods × rates × seeds of one recipe: one command, resumable, several runs at a time.

A grid's folder has a folder for each run and records.jsonl, a line for each finished one. That file
alone is enough to go on elsewhere: a run with a line in it is not repeated.
"""

import math
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tisa.store import make_folder
from tisa_lab.executors import InProcess, Place
from tisa_lab.pretrain.asking import EVALUATED, Evaluate
from tisa_lab.pretrain.checkpoints import check_run, differences
from tisa_lab.pretrain.config import PretrainConfig, RunSettings
from tisa_lab.pretrain.corpus import Corpus, CorpusNames
from tisa_lab.pretrain.report import label_of, small
from tisa_lab.pretrain.training import identity_of, run
from tisa_lab.sweep import JobRecord, Records, failure, run_sweep
from tisa_lab.view import Lines, Silent, spoken

HERE = Place()


@dataclass(frozen=True, eq=False)
class Run:
    """One run of a grid: a job of a sweep."""

    config: PretrainConfig

    @property
    def key(self) -> str:
        """Return its name among the runs of its grid, which is also its folder's."""
        return _key(self.config.to_dict())

    @property
    def label(self) -> str:
        """Return its method, rate and seed."""
        return _label(self.config.to_dict())


@dataclass(frozen=True)
class RunRecord(JobRecord):
    """The record of a run as a grid keeps it: without the losses of single steps."""

    values: dict[str, Any]

    @property
    def key(self) -> str:
        """Return the key of its run."""
        return _key(self.values["config"])

    @property
    def label(self) -> str:
        """Return the label of its run."""
        return _label(self.values["config"])

    def to_dict(self) -> dict[str, Any]:
        """Return it as it is written."""
        return small(self.values)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunRecord":
        """Return the record of what was written."""
        try:
            _key(values["config"])
        except (TypeError, KeyError):
            raise ValueError(f"expected the record of a run, got {str(values)[:60]}") from None
        return cls(values)


def _label(config: dict[str, Any]) -> str:
    return f"{label_of(config)}, rate {config['learning_rate']:g}, seed {config['seed']}"


def _key(config: dict[str, Any]) -> str:
    name = f"{label_of(config)}-{config['learning_rate']:g}-{config['seed']}"
    return re.sub(r"[^\w.=+-]+", "-", name)


@dataclass(frozen=True)
class Told:
    """Whether the runs in other processes are to stop: told by a file, or by the clock."""

    file: Path
    deadline: float

    def __call__(self) -> bool:
        """Return whether to stop."""
        return time.time() > self.deadline or self.file.exists()


@dataclass(frozen=True)
class Work:
    """What is done with a run of a grid, here or in another process."""

    out: Path
    names: CorpusNames
    valid: str | None
    settings: RunSettings
    command: str
    stop: Callable[[], bool]
    evaluate: Evaluate | None = None

    def __call__(self, job: Run) -> RunRecord | None:
        """Return the record, or None where the run was told to stop."""
        corpus, valid, save_tokenizer = self.corpora()
        folder = self.out / job.key
        make_folder(folder)
        with open(folder / "log.txt", "a", encoding="utf-8") as file:
            record = run(
                job.config, corpus, folder, valid=valid, settings=self.settings, view=Lines(file),
                command=self.command, stop=self.stop, save_tokenizer=save_tokenizer,
                evaluate=self.evaluate,
            )  # fmt: skip
        return None if record is None else RunRecord(record)

    def corpora(self) -> tuple[Corpus, Corpus | None, Callable[[Path], None]]:
        """Return both corpora, and what writes their tokenizer."""
        corpus, save_tokenizer = self.names.open()
        valid = None if self.valid is None else self.names.beside(self.valid)
        return corpus, valid, save_tokenizer


def run_grid(
    configs: Sequence[PretrainConfig],
    out: Path,
    names: CorpusNames,
    *,
    valid: str | None = None,
    settings: RunSettings,
    place: Place = HERE,
    view: Silent,
    command: str = "",
    stop: Callable[[], bool] = lambda: False,
    evaluate: Evaluate | None = None,
) -> list[tuple[Run, Exception]]:
    """Train what the folder has no record of; return the runs that failed, with the reason.

    `settings.max_seconds` are those of the whole grid: then no run is begun, those that run write a
    checkpoint, and the same call goes on.
    """
    if torch.distributed.is_torchelastic_launched():
        raise ValueError("several methods, rates or seeds: expected one process, got a launcher's")
    records = Records(out, RunRecord)
    runs = [Run(config) for config in configs]
    over = settings.max_seconds or math.inf
    # A run that is begun in the last seconds would get no further than compiling.
    spare, end = min(30.0, over / 10), time.time() + over
    with tempfile.TemporaryDirectory(dir=out.parent if out.parent.is_dir() else None) as folder:
        told = Told(Path(folder) / "stop", end - spare)

        def no_more() -> bool:
            if stop():
                told.file.touch()
            return stop() or time.time() > end - 2 * spare

        alone = place.executor == "in-process"
        work = Work(
            out, names, valid, replace(settings, max_seconds=None), command,
            (lambda: stop() or told()) if alone else told, evaluate,
        )  # fmt: skip
        _check(records, runs, work)
        executor = place.elsewhere(work, use_gpu=settings.device != "cpu") or InProcess(work)
        return run_sweep(runs, records, executor, GridView(view), stop=no_more)


def _check(records: Records[RunRecord], runs: Sequence[Run], work: Work) -> None:
    """Refuse a folder in which a run of the same name has other options or data."""
    corpus, valid, _ = work.corpora()
    asked = {
        job.key: identity_of(job.config, corpus, valid, work.settings, work.evaluate)
        for job in runs
    }
    for name, identity in asked.items():
        check_run(work.out / name, identity)
    for record in records.all():
        # A record has the tokenizer's name, and the corpus knows its fingerprint.
        identity = {k: v for k, v in asked.get(record.key, {}).items() if k != "tokenizer"}
        other = differences(record.values, identity) if identity else []
        if other:
            raise ValueError(
                f"{records.path} has another run of {record.label} ({'; '.join(other)}); take "
                "another folder, or the same options"
            )


class GridView:
    """A sweep's view of runs, shown by any view: a line for each that has ended."""

    def __init__(self, view: Silent) -> None:
        self.view = view

    def begin(self, jobs: Sequence[Run], done: set[str]) -> None:
        """Tell how many runs there are, and how many of them are finished."""
        before = len(done & {job.key for job in jobs})
        self.view.begin(len(jobs), before, unit="runs")
        self.view.say(f"{len(jobs)} runs, {before} of them done before")

    def started(self, job: Run) -> None:
        """Show that it runs."""
        self.view.started(job.label)

    def finished(self, job: Run, outcome: Any) -> None:
        """Say what came of it."""
        self.view.ended(job.label)
        if outcome is None:
            self.view.say(f"stopped: {job.label}; the same command goes on")
        elif isinstance(outcome, Exception):
            self.view.say(failure(job, outcome), wrong=True)
        else:
            self.view.step(self.view.done + 1)
            told = _result(outcome.values)
            self.view.say(f"{self.view.done}/{self.view.total} {job.label}: {told}")

    def elsewhere(self, jobs: Sequence[Run], done: set[str]) -> None:
        """Show what other processes have finished."""
        self.view.inside(f"{len(jobs)} runs are done by other processes")


def _result(record: dict[str, Any]) -> str:
    if "diverged" in record:
        return f"diverged: no number at step {record['diverged']['step']:,}"
    loss = record["evaluations"][-1].get("loss")
    told = "" if loss is None else f"validation loss {loss:.4f}, "
    asked = record.get(EVALUATED, {})
    parts = (f"{name} {spoken(seconds)}" for name, seconds in asked.get("seconds", {}).items())
    failed = (f"{name} FAILED: {one['failed']}" for name, one in asked.items() if "failed" in one)
    return "; ".join([f"{told}{spoken(record['seconds'])}", *parts, *failed])
