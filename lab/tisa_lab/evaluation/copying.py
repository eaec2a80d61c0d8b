"""What a language model itself recalls: a passage that it has seen, coming again far away.

An input begins with a passage, goes on with held-out text, and ends with the passage again. The
passage's tokens are drawn from the text one by one, so that nothing but the first time can tell
what follows in the second. Asked is for every token of the second time but the first.

A model trained on little text may not have learned to copy at all. Then `right` is near 0, and
`gain` says how much there is of it: by how many nats the loss is lower than where the input began
with another passage.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import cross_entropy

from tisa.transformer import LanguageModel
from tisa_lab.pretrain.batches import words
from tisa_lab.pretrain.text import Vocabulary

SEED, PASSAGE, TOKENS_AT_ONCE = 20260801, 32, 32768


def copied(
    model: LanguageModel,
    documents: list[npt.NDArray[np.unsignedinteger]],
    vocabulary: Vocabulary,
    lengths: list[int],
    *,
    inputs: int = 16,
    bf16: bool = False,
) -> list[dict[str, Any]]:
    """Return for each length the share of right tokens, and the gain in nats.

    A length that a method has no places for is `refused`.
    """
    text = np.concatenate(documents).astype(np.int64)
    limit, rows = model.transformer.position.max_length, []
    for length in lengths:
        row: dict[str, Any] = {"length": length}
        if limit is not None and length > limit:
            rows.append(row | {"refused": f"positions end at {limit:,}"})
            continue
        # Two inputs differ in the passage that they begin with, and in nothing else.
        again, other = made(text, length, inputs, vocabulary)
        right, loss = _asked(model, again, bf16)
        _, without = _asked(model, other, bf16)
        rows.append(row | {"right": right, "gain": without - loss})
    return rows


def made(
    text: npt.NDArray[np.int64], length: int, inputs: int, vocabulary: Vocabulary
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs that end as they begin, and the same with another beginning.

    The shortest have two passages and no text between them.
    """
    passage = min(PASSAGE, (length - 1) // 2)
    between = length - 1 - 2 * passage
    drawn = text[(words(2 * inputs * passage, SEED, length) % np.uint64(len(text))).astype(int)]
    first, other = drawn.reshape(2, inputs, passage)
    starts = words(inputs, SEED, length, 1) % np.uint64(max(1, len(text) - between))
    filler = text[starts.astype(int)[:, None] + np.arange(between)]
    begin = np.full((inputs, 1), vocabulary.specials.begin)
    alike = np.concatenate((filler, first), axis=1)
    again, otherwise = (
        torch.from_numpy(np.concatenate((begin, start, alike), axis=1)) for start in (first, other)
    )
    return again, otherwise


@torch.no_grad()
def _asked(model: LanguageModel, ids: torch.Tensor, bf16: bool) -> tuple[float, float]:
    device = next(model.parameters()).device
    passage = min(PASSAGE, (ids.shape[1] - 1) // 2)
    right, losses = [], []
    for some in ids.split(max(1, TOKENS_AT_ONCE // ids.shape[1])):
        some = some.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            # The place of each token but the passage's last predicts the one after it.
            logits = model.head(model.transformer(some)[:, -passage:-1]).float()
        labels = some[:, 1 - passage :]
        right.append((logits.argmax(-1) == labels).double())
        losses.append(cross_entropy(logits.transpose(1, 2), labels, reduction="none").double())
    return float(torch.cat(right).mean()), float(torch.cat(losses).mean())
