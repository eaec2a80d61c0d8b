"""Models of the race and of recall as jobs of a sweep: several side by side, each done once."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tisa.packages import device_named
from tisa.positions import described, resolve
from tisa_lab.executors import InProcess, Place
from tisa_lab.probes import race, recall
from tisa_lab.probes.training import Sizes
from tisa_lab.sweep import JobRecord, Records, Shown, run_sweep
from tisa_lab.view import Silent

HERE = Place()


@dataclass(frozen=True, eq=False)
class Probe:
    """One model: a method and a task of the race, or recall, which has several."""

    config: Sizes
    method: str
    task: str

    @property
    def key(self) -> str:
        """Return its name, of which other sizes or another file of a class make another one."""
        chosen = resolve(self.method)
        told = json.dumps([asdict(self.config), chosen.label, described(chosen)], sort_keys=True)
        digest = hashlib.sha256(told.encode()).hexdigest()[:12]
        return re.sub(r"[^\w.=+-]+", "-", f"{self.task}-{chosen.label}") + f"-{digest}"

    @property
    def label(self) -> str:
        """Return its task and method."""
        return f"{self.task}: {resolve(self.method).label}"


@dataclass(frozen=True)
class Answers(JobRecord):
    """What a model answered: rows of a record, one for each task that it was asked."""

    named: tuple[str, str]
    rows: tuple[dict[str, Any], ...]

    @property
    def key(self) -> str:
        """Return the key of its job."""
        return self.named[0]

    @property
    def label(self) -> str:
        """Return the label of its job."""
        return self.named[1]

    def to_dict(self) -> dict[str, Any]:
        """Return it as it is written."""
        return {"key": self.key, "label": self.label, "rows": list(self.rows)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Answers":
        """Return what was written."""
        try:
            return cls((values["key"], values["label"]), tuple(values["rows"]))
        except (TypeError, KeyError):
            raise ValueError(f"expected the answers of a model, got {str(values)[:60]}") from None


def done(job: Probe, device: str | None) -> Answers:
    """Train the model of a job, ask it, and return its answers."""
    place = device_named(device)
    if isinstance(job.config, recall.RecallConfig):
        rows = recall.run(job.config, job.method, place)
    else:
        assert isinstance(job.config, race.ProbeConfig)
        rows = [{"task": job.task} | race.run(job.config, job.method, job.task, place)]
    method = resolve(job.method).label
    return Answers((job.key, job.label), tuple({"method": method} | row for row in rows))


def run_jobs(
    jobs: Sequence[Probe], out: Path, *, place: Place = HERE, device: str | None, view: Silent
) -> list[dict[str, Any]]:
    """Return the rows of all jobs, in their order; those that the folder has are not done again."""
    records = Records(out, Answers)
    work = partial(done, device=device)
    on_gpu = device_named(device).type == "cuda"
    executor = place.elsewhere(work, use_gpu=on_gpu) or InProcess(work)
    failed = run_sweep(jobs, records, executor, Shown(view, "models", _said, lambda left: None))
    if failed:
        raise ValueError(f"{failed[0][0].label} failed: {failed[0][1]}")
    found = {record.key: record.rows for record in records.all()}
    return [row for job in jobs for row in found[job.key]]


def _said(answers: Answers) -> str:
    shares = [f"{row['task']} {100 * row['accuracy']['1']:.0f} %" for row in answers.rows]
    return ", ".join(shares)
