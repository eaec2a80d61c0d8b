"""The loss on held-out documents: the same rows and the same masks whoever asks, and when."""

from typing import Any

import numpy as np
import torch

from tisa_lab.pretrain.batches import NO_LABEL, Batch, batch_of
from tisa_lab.pretrain.config import PretrainConfig
from tisa_lab.pretrain.corpus import Chunk, Corpus, Place, head
from tisa_lab.pretrain.rows import Rows

# Not the seed of the run: all runs are compared on the same masks.
SEED = 20210601


def validation_batches(
    corpus: Corpus, config: PretrainConfig, tokens: int, *, rows: int, rank: int, processes: int
) -> list[Batch]:
    """Return one process's batches of the first documents, as many for each process."""
    some = head(corpus, tokens)
    ends = np.cumsum([len(document) for document in some], dtype=np.int64)
    chunk = Chunk(np.concatenate(some), ends, Place(), Place())
    cut = Rows(chunk, config.longest, config.objective, corpus.vocabulary.specials, SEED)
    made = [(cut.row(number), (SEED, number)) for number in range(len(cut))]
    groups = [made[first : first + rows] for first in range(0, len(made), rows)]
    count = -(-len(groups) // processes)
    mine = groups[rank::processes]
    batches = [
        batch_of(group, config.objective, config.mask_share, corpus.vocabulary) for group in mine
    ]
    while len(batches) < count:
        # Every process takes part in every forward pass, with nothing to predict if need be.
        last = batch_of(groups[0], config.objective, config.mask_share, corpus.vocabulary)
        batches.append(
            Batch(last.input_ids, last.cu_seqlens, last.positions,
                  torch.full_like(last.labels, NO_LABEL))
        )  # fmt: skip
    return batches


@torch.no_grad()
def validation_loss(
    accelerator: Any, model: Any, batches: list[Batch], config: PretrainConfig
) -> float:
    """Return the mean loss of all labels of all processes."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    with accelerator.autocast():
        for batch in batches:
            on = batch.to(accelerator.device)
            sums[0] += model(on.input_ids, on.cu_seqlens, on.positions, on.labels, config.longest)
            sums[1] += (on.labels != NO_LABEL).sum()
    model.train()
    total = accelerator.reduce(sums, reduction="sum")
    return float(total[0] / total[1])
