"""All layers' score vectors at once: one forward pass asks for them layer by layer."""

from functools import lru_cache
from typing import Any

import torch
from torch.func import functional_call

from tisa.hf.bands import alike
from tisa.scoring import TISA
from tisa.shapes import Float, Tensor


class Vectors:
    """The score vectors of one forward pass, for all layers together when the first is asked for.

    Each layer has kernels of its own, and a handful of small operations to make scores of them; on
    a GPU launching these takes the host longer than attention takes the GPU.
    """

    def __init__(self, owners: list[Any]) -> None:
        self.owners = owners
        self.known: dict[tuple[int, int], dict[int, Tensor]] = {}

    def of(self, scoring: Any, queries: int, keys: int) -> Float[Tensor, "heads span"] | None:
        """Return the vector of this scoring function; None if it is not one of the model's own."""
        if (queries, keys) not in self.known:
            scorings = [
                s for owner in self.owners for s in owner.offset_scores if alike(s, scoring)
            ]
            self.known[queries, keys] = _vectors(scorings, queries, keys)
        return self.known[queries, keys].get(id(scoring))


@lru_cache(maxsize=8)
def _empty(heads: int, kernels: int) -> TISA:
    """Return a scoring function without values, to be called with those of others."""
    with torch.device("meta"):
        return TISA(heads, kernels, init="zero")


def _vectors(scorings: list[TISA], queries: int, keys: int) -> dict[int, Tensor]:
    if len(scorings) < 2:
        return {}
    heads = [scoring.num_attention_heads for scoring in scorings]
    first = scorings[0]
    whole = _empty(sum(heads), first.num_kernels)
    state = {
        name: torch.cat([scoring.get_parameter(name) for scoring in scorings])
        for name, _ in first.named_parameters()
    }
    state |= dict(first.named_buffers())
    found = functional_call(whole, state, (queries, keys))
    return {id(s): part for s, part in zip(scorings, found.split(heads), strict=True)}
