"""Steps made ready ahead of the model that is to be trained on them."""

import signal
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from tisa_lab.pretrain.batches import Step


class _Steps(IterableDataset):
    def __init__(self, make: Callable[[], Iterator[Step]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Step]:
        return self.make()


def _deaf(worker: int) -> None:
    """Leave signals that reach a whole process group (torchrun, scancel, Ctrl-C) to the trainer."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def ahead(make: Callable[[], Iterator[Step]], *, in_a_process: bool) -> Iterator[Step]:
    """Return the steps, made in a process of their own where the model runs on a GPU."""
    if not in_a_process:
        return make()
    loader: Any = DataLoader(
        _Steps(make),
        batch_size=None,
        num_workers=1,
        prefetch_factor=16,
        multiprocessing_context="fork",
        worker_init_fn=_deaf,
    )
    return iter(loader)
