"""Where jobs are done: here, in a pool of processes, on Ray, or each by several processes.

A job has a key and a label. An executor has a function that does one job. It is given jobs while it
has room for more, and asked for what has ended: a result, or the reason why there is none. A pool
and Ray send the function to other processes, so it must be one that pickle can carry.
"""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, get_type_hints, runtime_checkable

import torch

import tisa
from tisa.packages import needed
from tisa.store import write_bytes

# Content of a folder by the names of its files.
Files = dict[str, bytes]
# What the other processes of a job are told where there is nothing to do: else they would give up.
WAIT = "wait"
# Seconds to wait for something to end, where nothing runs here.
IDLE = 0.2


@runtime_checkable
class Job(Protocol):
    """Something to do once: hashable, and carried by pickle."""

    @property
    def key(self) -> str:
        """Return what names this job among all others, as a file may be named."""

    @property
    def label(self) -> str:
        """Return a short name for people."""


class Lost(Exception):  # noqa: N818
    """A job's process ended in the middle of it; it may go well the next time."""


Work = Callable[..., Any]
# A job, and its result or the reason why there is none.
Finished = tuple[Any, Any]


@runtime_checkable
class Executor(Protocol):
    """What a sweep needs of the place where jobs are done."""

    def free(self) -> int:
        """Return how many more jobs it would take now."""

    def submit(self, job: Any) -> None:
        """Take a job."""

    def collect(self) -> list[Finished]:
        """Return what has ended since the last call; wait a moment where nothing has."""

    def close(self) -> None:
        """Stop; what has not ended is lost."""


@dataclass(frozen=True)
class Place:
    """Where jobs are done.

    Args:
        executor: In-process: one after another; pool: several processes on this machine; ray: on a
            cluster.
        workers: Jobs at a time in a pool or on Ray.
        address: Of a running Ray cluster: host:port, auto; by default one on this machine.
    """

    executor: Literal["in-process", "pool", "ray"] = "in-process"
    workers: int = 2
    address: str | None = None

    def __post_init__(self) -> None:
        *others, last = get_args(get_type_hints(type(self))["executor"])
        if self.executor not in (*others, last):
            choice = f"{', '.join(others)} or {last}"
            raise ValueError(f"executor must be {choice}, got {self.executor!r}")
        if self.workers < 1:
            raise ValueError(f"workers must be 1 or more, got {self.workers}")
        if self.address is not None and self.executor != "ray":
            raise ValueError(f'address is for executor "ray", got {self.executor!r}')

    @property
    def side_by_side(self) -> int:
        """Return how many processes do jobs at one time."""
        return self.workers if self.executor in ("pool", "ray") else 1

    def elsewhere(self, work: "Work", **cluster: Any) -> "Executor | None":
        """Return the executor where jobs are not done in this process, else None."""
        if self.executor == "pool":
            return Pool(work, self.workers)
        if self.executor == "ray":
            return OnRay(work, self.address, self.workers, **cluster)
        return None


class InProcess:
    """One job after another, here."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self._next: Any = None

    def free(self) -> int:
        """Return 1, or 0 where a job waits to be done."""
        return int(self._next is None)

    def submit(self, job: Any) -> None:
        """Take a job, to be done when results are asked for."""
        self._next = job

    def collect(self) -> list[Finished]:
        """Do the job that waits."""
        if self._next is None:
            time.sleep(IDLE)
            return []
        job, self._next = self._next, None
        return [(job, outcome(self.work, job))]

    def close(self) -> None:
        """Do nothing: nothing runs between two calls."""


class Pool:
    """Several processes side by side on this machine; they end with the one that started them."""

    def __init__(self, work: Work, workers: int) -> None:
        self.work = work
        self.workers = workers
        # A pool of one for each: a process that is killed breaks its pool, and so no other job.
        self._idle: list[ProcessPoolExecutor] = []
        self._running: dict[Future[Any], tuple[Any, ProcessPoolExecutor]] = {}

    def free(self) -> int:
        """Return how many processes have nothing to do."""
        return self.workers - len(self._running)

    def submit(self, job: Any) -> None:
        """Give a job to a process that has nothing to do."""
        if not self._idle:
            # Threads as here: sums in another order would be other numbers.
            given, spawn = (os.getpid(), torch.get_num_threads()), get_context("spawn")
            self._idle.append(ProcessPoolExecutor(1, spawn, initializer=_begin, initargs=given))
        process = self._idle.pop()
        with _deaf_to_ctrl_c():
            self._running[process.submit(outcome, self.work, job)] = (job, process)

    def collect(self) -> list[Finished]:
        """Return the jobs that have ended; one whose process was killed is lost."""
        if not self._running:
            time.sleep(IDLE)
            return []
        ended, _ = wait(self._running, timeout=0.5, return_when=FIRST_COMPLETED)
        finished: list[Finished] = []
        for future in ended:
            job, process = self._running.pop(future)
            try:
                finished.append((job, future.result()))
                self._idle.append(process)
            except BrokenProcessPool as broken:
                # By the system, for memory?
                finished.append((job, Lost(str(broken))))
                _end(process)
        return finished

    def close(self) -> None:
        """End the processes."""
        for process in [*self._idle, *(process for _, process in self._running.values())]:
            _end(process)
        self._idle.clear()
        self._running.clear()


class OnRay:
    """So many jobs side by side on a cluster; the worker of each needs this package.

    Args:
        work: what is done with a job; with `folder`, it is called as `work(job, folder=…)`.
        address: of the cluster ("host:port", "auto"); None starts one on this machine.
        workers: jobs at a time. GPUs are shared out among them, a whole one to each at most.
        use_gpu: whether jobs are given a GPU where the cluster has some.
        folder: its files travel with each job, and those that the job made come back.
    """

    def __init__(
        self, work: Work, address: str | None, workers: int, *, use_gpu: bool = True,
        folder: str | Path | None = None,
    ) -> None:  # fmt: skip
        self.work = work
        self.workers = workers
        self.folder = None if folder is None else Path(folder)
        self._ray = _connected(address, workers)
        self._running: dict[Any, Any] = {}
        gpus = 0.0
        if use_gpu:
            gpus = min(1.0, self._ray.cluster_resources().get("GPU", 0.0) / workers)
        # Lost workers are the sweep's matter: it counts tries, and its view tells of them.
        self._there = self._ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_there)

    def free(self) -> int:
        """Return how many more jobs may be given to the cluster."""
        return self.workers - len(self._running)

    def submit(self, job: Any) -> None:
        """Give a job to the cluster."""
        files = None if self.folder is None else _files(self.folder)
        # Threads as here: sums in another order would be other numbers.
        given = (self.work, job, files, torch.get_num_threads(), os.getcwd(), tisa.__version__)
        self._running[self._there.options(name=f"tisa {job.key}").remote(*given)] = job

    def collect(self) -> list[Finished]:
        """Return the jobs that have ended; one whose worker was killed is lost."""
        if not self._running:
            time.sleep(IDLE)
            return []
        ended, _ = self._ray.wait(list(self._running), num_returns=1, timeout=0.5)
        finished: list[Finished] = []
        for reference in ended:
            job = self._running.pop(reference)
            try:
                found, files = self._ray.get(reference)
            except self._ray.exceptions.RayTaskError as wrong:
                finished.append((job, RuntimeError(f"on its worker: {wrong.cause!r}")))
            except self._ray.exceptions.RayError as lost:
                finished.append((job, Lost(f"{type(lost).__name__}: {_first_line(lost)}")))
            else:
                if self.folder is not None:
                    _keep(files, self.folder)
                finished.append((job, found))
        return finished

    def close(self) -> None:
        """End what runs, and leave the cluster."""
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        self._running.clear()
        self._ray.shutdown()


class Leading(InProcess):
    """One job after another, each in all processes that torchrun or accelerate started.

    The leading process has the folder, the claims and the view; the others are told each job
    (`follow`). Who fails alone leaves the others waiting for it, and they cannot be called back: so
    an error is not caught, the process ends, and what started it ends the others.
    """

    _failed = False

    def collect(self) -> list[Finished]:
        """Do the job that waits."""
        job, self._next = self._next, None
        _told(WAIT if job is None else job)
        if job is None:
            time.sleep(IDLE)
            return []
        self._failed = True
        found = self.work(job)
        self._failed = False
        return [(job, found)]

    def close(self) -> None:
        """Let the others go."""
        if not self._failed:
            _told(None)


def follow(work: Work) -> None:
    """Do what the leading process says, until there is no more."""
    while (job := _told(None)) is not None:
        if job != WAIT:
            work(job)


def is_leader(device: torch.device) -> bool:
    """Join the other processes; return whether this one leads."""
    accelerate = needed("accelerate", "several processes for each job", "tisa-lab")
    return bool(accelerate.PartialState(cpu=device.type == "cpu").is_main_process)


def outcome(work: Work, job: Any) -> Any:
    """Return the result of a job that is done here and now, or what is wrong."""
    try:
        return work(job)
    except Exception as wrong:
        # A message travels between processes; an exception of another package may not.
        return RuntimeError(f"{type(wrong).__name__}: {wrong}")


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach: they are ended by the one that started them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # What is ignored stays ignored in a process that is started meanwhile.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _begin(parent: int, threads: int) -> None:
    torch.set_num_threads(threads)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _end(process: ProcessPoolExecutor) -> None:
    started = list((process._processes or {}).values())
    process.shutdown(wait=False, cancel_futures=True)
    for one in started:
        one.terminate()


def _connected(address: str | None, workers: int) -> Any:
    ray = needed("ray", "jobs on a cluster", "tisa-lab[cluster]")
    told: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address is None:
        ray.init(address="local", num_cpus=workers, include_dashboard=False, **told)
        return ray
    try:
        ray.init(address=address, **told)
    except (ConnectionError, ValueError, RuntimeError) as wrong:
        raise ValueError(
            f"address must be that of a running Ray cluster (host:port, auto), got {address!r}: "
            f"{_first_line(wrong)}; start one with `ray start --head`, or give no address"
        ) from wrong
    return ray


def _there(
    work: Work, job: Any, files: Files | None, threads: int, folder_here: str, version: str
) -> tuple[Any, Files]:
    """Return a job's outcome and the files that were made for it; runs on a worker."""
    if tisa.__version__ != version:
        told = f"a worker has tisa {tisa.__version__}, expected {version}; install it there"
        return RuntimeError(told), {}
    torch.set_num_threads(threads)
    if os.path.isdir(folder_here):
        # Names of models and data may be relative to it.
        os.chdir(folder_here)
    if files is None:
        return outcome(work, job), {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _keep(files, folder)
        found = outcome(partial(work, folder=folder), job)
        made = _files(folder)
    return found, {name: made[name] for name in made.keys() - files.keys()}


def _files(folder: Path) -> Files:
    """Return what lies in a folder, without locks and what is not finished."""
    paths = [p for p in folder.glob("[!.]*") if p.is_file() and p.suffix != ".lock"]
    return {path.name: path.read_bytes() for path in paths}


def _keep(files: Files, folder: Path) -> None:
    """Write files that are not there yet, each whole or not at all."""
    for name, content in files.items():
        if not (folder / name).exists():
            write_bytes(folder / name, content)


def _told(what: Any) -> Any:
    """Return what the leading process says."""
    said = [what]
    torch.distributed.broadcast_object_list(said, src=0)
    return said[0]


def _first_line(wrong: Exception) -> str:
    return (str(wrong).strip().splitlines() or [""])[0]
