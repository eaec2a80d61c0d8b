"""Jobs in, every job's record in a folder: whatever is killed, and however many take part.

`records.jsonl` has a line for each finished job. A job that is being done is claimed by a lock on a
file of its own: the system lets go of it when the process ends, however it ends.
"""

import os
import shlex
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from tisa.store import Lines, locked
from tisa.store.seals import line
from tisa_lab.executors import Executor, Job, Lost
from tisa_lab.view import Silent

# A job whose process is lost (killed for memory, say) is tried so often in one sweep.
TRIES = 3

Together = Callable[[Sequence[Any]], list[list[Any]]]


class JobRecord(ABC):
    """What a finished job leaves behind: a line in a file of them."""

    @property
    @abstractmethod
    def key(self) -> str:
        """Return the key of its job."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Return the label of its job."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the record as it is written: what JSON can say."""

    @classmethod
    @abstractmethod
    def from_dict(cls, values: dict[str, Any]) -> Any:
        """Return the record of what was written; what is none is refused with a ValueError."""


R = TypeVar("R", bound=JobRecord)


class Records(Generic[R]):
    """A folder of records of one type, one for each job, that many processes write to."""

    def __init__(self, folder: str | Path, kind: type[R]) -> None:
        self.folder = Path(folder)
        self.path = self.folder / "records.jsonl"
        self.kind = kind
        self._lines = Lines(self.path)
        self._keys: set[str] = set()
        self._read = 0

    def all(self) -> list[R]:
        """Return all records, in the order in which they were finished."""
        return self._from(0)[0]

    def done(self) -> set[str]:
        """Return the keys of the jobs that are finished."""
        # Whole lines never change, so that only what is new has to be read.
        records, self._read = self._from(self._read)
        self._keys |= {record.key for record in records}
        return set(self._keys)

    def claim(self, job: Job) -> ExitStack | None:
        """Return the right to do a job, until it is closed or the process ends.

        None where the job is finished or another process has it.
        """
        with ExitStack() as held:
            had = held.enter_context(locked(self.folder / "claims" / job.key, wait=False))
            # Finished by another process after we looked last and before we had the lock?
            if had and job.key not in self.done():
                return held.pop_all()
        return None

    def append(self, *records: R) -> None:
        """Add records, all of them or nothing; they are on the disk when this returns.

        Where there is no room for them, they are kept among the system's temporary files, and the
        error says where.
        """
        if not records:
            return
        written = [record.to_dict() for record in records]
        try:
            self._lines.append(*written)
        except OSError as full:
            kept = _keep([line(values) for values in written])
            label = records[0].label
            told = (
                f"the finished run ({label}) is"
                if len(records) == 1
                else f"{len(records)} finished runs ({label}, …) are"
            )
            raise OSError(
                full.errno,
                f"{self.path}: {full.strerror}; {told} kept in {kept}: make room, add what is in "
                f"it with `cat {kept} >> {shlex.quote(str(self.path))}`, and go on",
            ) from full

    def _from(self, start: int) -> tuple[list[R], int]:
        records = []
        for found in self._lines.each(start):
            values, start = found.record(), found.end
            try:
                records.append(self.kind.from_dict(values))
            except ValueError as wrong:
                raise ValueError(f"{found.where}: {wrong}; remove that line") from None
        return records, start


@runtime_checkable
class View(Protocol):
    """What wants to know how a sweep goes."""

    def begin(self, jobs: Sequence[Any], done: set[str]) -> None:
        """Hear which jobs there are, and the keys of what is finished."""

    def started(self, job: Any) -> None:
        """Hear that a job is being done."""

    def finished(self, job: Any, outcome: Any) -> None:
        """Hear of its record, of the exception with which it failed, or None: it is unfinished."""

    def elsewhere(self, jobs: Sequence[Any], done: set[str]) -> None:
        """Hear which jobs are left that other processes do, and what all have finished."""


def failure(job: Any, wrong: Exception) -> str:
    """Return what is said of a job that came to nothing."""
    return f"failed: {job.label}: {wrong}; the same command tries it again"


class Shown:
    """A sweep as one sees it: what runs, a line for each job that ended, the time left.

    Args:
        view: a picture, lines, or nothing (`tisa_lab.view`).
        unit: what jobs are called, in the plural.
        said: what is said of a record.
        left: the seconds that jobs will take, None where nobody knows.
    """

    def __init__(
        self,
        view: Silent,
        unit: str,
        said: Callable[[Any], str],
        left: Callable[[Sequence[Any]], float | None],
    ) -> None:
        self.view, self.unit, self.said, self.left = view, unit, said, left
        self._jobs: Sequence[Any] = ()
        self._done: set[str] = set()
        self._note = ""

    def begin(self, jobs: Sequence[Any], done: set[str]) -> None:
        """Take note of all jobs."""
        self._jobs = jobs
        before = len(done & {job.key for job in jobs})
        self.view.begin(len(jobs), before, unit=self.unit)
        self.view.say(f"{len(jobs)} {self.unit}, {before} of them done before")
        self._count(done)

    def started(self, job: Any) -> None:
        """Show a job among those that run."""
        self._note = ""
        self.view.started(job.label)

    def finished(self, job: Any, outcome: Any) -> None:
        """Say what came of a job."""
        self.view.ended(job.label)
        if isinstance(outcome, Exception):
            self.view.say(failure(job, outcome), wrong=True)
            return
        self._count(self._done | {job.key})
        place = f"{len(self._done)}/{len(self._jobs)}"
        self.view.say(f"{place} {job.label}: {self.said(outcome)}")

    def elsewhere(self, jobs: Sequence[Any], done: set[str]) -> None:
        """Say that the rest is done by other processes."""
        self._count(done)
        if jobs and not self._note:
            self._note = f"{len(jobs)} {self.unit} are run by other processes; waiting for them"
            self.view.say(self._note)

    def _count(self, done: set[str]) -> None:
        self._done = done & {job.key for job in self._jobs}
        left = self.left([job for job in self._jobs if job.key not in self._done])
        self.view.step(len(self._done), left=left)


def run_sweep(
    jobs: Sequence[Any],
    records: Records[Any],
    executor: Executor,
    view: View,
    together: Together | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> list[tuple[Any, Exception]]:
    """Do every job that the folder has no record of; return those that failed, with the reason.

    Jobs that another process has claimed are waited for, and done here if it dies. A job that
    failed is not tried again in this sweep, but in the next one. `together` divides jobs into
    groups; the executor is then given jobs of one group at a time. Where `stop` says so no further
    job is begun. A job whose outcome is None was left unfinished, and goes on in the next sweep.
    """
    done = records.done()
    view.begin(jobs, done)
    waiting = [job for job in jobs if job.key not in done]
    claims: dict[Any, ExitStack] = {}
    tries: dict[Any, int] = {}
    failed: list[tuple[Any, Exception]] = []
    try:
        while waiting or claims:
            if stop():
                waiting.clear()
            for job in _claimed(waiting, claims, records, executor.free(), together):
                tries[job] = tries.get(job, 0) + 1
                view.started(job)
                executor.submit(job)
            if not claims and waiting:
                view.elsewhere(waiting, records.done())
            finished = executor.collect()
            # All at once: a full disk at the first would else be the end of the others too.
            records.append(
                *(found for _, found in finished if not isinstance(found, Exception | None))
            )
            for job, outcome in finished:
                if isinstance(outcome, Lost) and tries[job] < TRIES:
                    waiting.append(job)
                elif isinstance(outcome, Exception):
                    failed.append((job, outcome))
                view.finished(job, outcome)
                claims.pop(job).close()
            done = records.done()
            waiting = [job for job in waiting if job.key not in done]
    finally:
        executor.close()
        for claim in claims.values():
            claim.close()
    return failed


def _claimed(
    waiting: list[Any],
    claims: dict[Any, ExitStack],
    records: Records[Any],
    room: int,
    together: Together | None,
) -> list[Any]:
    """Return as many jobs as there is room for that are ours now; take them off the list."""
    taken: list[Any] = []
    for group in [list(waiting)] if together is None else together(waiting):
        for job in group:
            if len(taken) == room:
                break
            claim = records.claim(job)
            if claim is not None:
                claims[job] = claim
                taken.append(job)
                waiting.remove(job)
        if taken:
            break
    return taken


def _keep(lines: list[str]) -> str:
    file, path = tempfile.mkstemp(prefix="tisa-lab-", suffix=".jsonl")
    with os.fdopen(file, "w", encoding="utf-8", newline="\n") as kept:
        kept.writelines(f"{line}\n" for line in lines)
        kept.flush()
        os.fsync(kept.fileno())
    return path
