"""What a model keeps of the original: its sentence vectors, and whether it sees word order.

- closeness: the mean cosine between the vectors of both models for sentences never trained on.
- orders: four orders of each sentence's words; how often is a vector nearest to the original's
  vector of the same order? Chance is a quarter.
- pairs: "the dog bit the man" and "the man bit the dog"; how often is a vector nearer to the
  original's vector of the same sentence than to that of the other? Chance is a half.

A model without positions gives all orders the same vector, which counts as chance.
"""

import random
from typing import Any

import torch
from transformers import PreTrainedModel

from tisa.hf.measure import embeddings, orders_of
from tisa.shapes import Float, Tensor
from tisa_lab.demo.sentences import DEEDS, HELD_OUT
from tisa_lab.demo.settings import Settings

# Vectors nearer to each other than this are the same: sums in another order differ by less.
SAME = 1e-5


class Yardstick:
    """The original's vectors, which every other model is measured by."""

    def __init__(self, original: PreTrainedModel, tokenizer: Any, settings: Settings) -> None:
        self.tokenizer = tokenizer
        generator = random.Random(settings.seed)
        held_out = HELD_OUT[: settings.held_out]
        self.orders = [made for text in held_out if (made := orders_of(text, generator))]
        deeds = DEEDS[: settings.deeds]
        self.pairs = [[deed.active(), deed.exchanged().active()] for deed in deeds]
        self.original = self._vectors(original)

    def measure(self, model: PreTrainedModel) -> dict[str, Any]:
        """Return closeness, orders and pairs of a model, and how alike it finds each pair."""
        orders, pairs = self._vectors(model)
        their_orders, their_pairs = self.original
        alike = (pairs[:, 0] * pairs[:, 1]).sum(-1)
        return {
            "closeness": float((orders[:, 0] * their_orders[:, 0]).sum(-1).mean()),
            "orders": recognised(orders, their_orders),
            "pairs": recognised(pairs, their_pairs),
            "alike": [round(float(a), 6) for a in alike],
        }

    def _vectors(self, model: PreTrainedModel) -> tuple[Tensor, Tensor]:
        texts = [text for group in (*self.orders, *self.pairs) for text in group]
        found = embeddings(model, self.tokenizer, texts).cpu()
        cut = 4 * len(self.orders)
        return found[:cut].unflatten(0, (-1, 4)), found[cut:].unflatten(0, (-1, 2))


def recognised(
    ours: Float[Tensor, "groups versions dim"], theirs: Float[Tensor, "groups versions dim"]
) -> float:
    """Return how often a vector is nearest to the other model's vector of the same version."""
    versions = ours.shape[1]
    hits = ((ours @ theirs.mT).argmax(-1) == torch.arange(versions)).float()
    blind = (ours - ours[:, :1]).abs().amax((1, 2)) < SAME
    return float(torch.where(blind.unsqueeze(1), 1 / versions, hits).mean())
