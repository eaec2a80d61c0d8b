"""Batches of similar length, so that hardly any time goes into padding."""

from collections.abc import Iterator, Sequence

import torch

# Batches whose rows are sorted together: enough for even lengths, few enough for chance.
POOL = 50


class ByLength(torch.utils.data.Sampler[int]):
    """Rows in an order in which each `batch_size` of them have similar lengths.

    Rows are shuffled, sorted by length within pools of 50 batches, cut into batches, and the
    batches shuffled. Every row comes once; the one batch that is not full comes last, so that
    cutting the order into batches finds those made here. Each pass draws another order, all of
    them determined by the seed.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
        self.lengths = torch.tensor(lengths)
        self.batch_size = batch_size
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self.lengths), generator=self.generator)
        full = len(order) // self.batch_size * self.batch_size
        pools = [
            pool[self.lengths[pool].argsort(stable=True)]
            for pool in order[:full].split(POOL * self.batch_size)
        ]
        batches = torch.cat(pools).view(-1, self.batch_size)
        shuffled = batches[torch.randperm(len(batches), generator=self.generator)]
        yield from [*shuffled.flatten().tolist(), *order[full:].tolist()]
