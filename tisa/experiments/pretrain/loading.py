"""Steps made ready ahead of the model that is to be trained on them."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from tisa.experiments.pretrain.batches import Step


class _Steps(IterableDataset):
    def __init__(self, make: Callable[[], Iterator[Step]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Step]:
        return self.make()


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
    )
    return iter(loader)
