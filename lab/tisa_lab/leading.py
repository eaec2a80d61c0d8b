"""Jobs one after another, each done by all processes that torchrun or accelerate started."""

import time
from typing import Any

import torch

from tisa.packages import needed
from tisa_lab.executors import IDLE, Finished, Work

# What the other processes are told where there is nothing to do: else they would give up.
WAIT = "wait"


class Leading:
    """One job after another, each in all processes that torchrun or accelerate started.

    The leading process has the folder, the claims and the view; the others are told each job
    (`follow`). Who fails alone leaves the others waiting for it, and they cannot be called back: so
    an error is not caught, the process ends, and what started it ends the others.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self._next: Any = None
        self._failed = False

    def free(self) -> int:
        """Return 1, or 0 where a job waits to be done."""
        return int(self._next is None)

    def submit(self, job: Any) -> None:
        """Take a job, to be done when results are asked for."""
        self._next = job

    def collect(self) -> list[Finished]:
        """Do the job that waits."""
        job, self._next = self._next, None
        if job is None:
            time.sleep(IDLE)
            _told(WAIT)
            return []
        _told(job)
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


def _told(what: Any) -> Any:
    """Return what the leading process says."""
    said = [what]
    torch.distributed.broadcast_object_list(said, src=0)
    return said[0]
