"""Scores and bands of all layers at once: one forward pass asks for them layer by layer."""

from functools import lru_cache
from typing import Any

import torch
from torch.func import functional_call

from tisa.scoring import TISA
from tisa.shapes import Float, Int32, Tensor


class Together:
    """What the layers of one forward pass ask for, made for all of them when the first one asks.

    Each layer has kernels of its own, and dozens of small operations to make scores and a band of
    them; on a GPU launching these takes the host longer than attention takes the GPU. Nothing is
    kept for the next pass: a fused optimiser changes parameters without leaving a trace.
    """

    def __init__(self, owners: list[Any], *, with_vectors: bool = True) -> None:
        self.owners = owners
        self.with_vectors = with_vectors
        self.vectors: dict[tuple[int, int], dict[int, Tensor]] = {}
        self.bands: dict[torch.dtype, dict[int, Tensor]] = {}

    def vector(self, scoring: Any, queries: int, keys: int) -> Float[Tensor, "heads span"] | None:
        """Return the scores of this scoring function; None if it has to make them alone."""
        if not self.with_vectors:
            return None
        if (queries, keys) not in self.vectors:
            self.vectors[queries, keys] = _vectors(self._like(scoring), queries, keys)
        return self.vectors[queries, keys].get(id(scoring))

    def band(self, scoring: Any, dtype: torch.dtype) -> Int32[Tensor, "heads 2"] | None:
        """Return the band of this scoring function; None if it has to make it alone."""
        if dtype not in self.bands:
            self.bands[dtype] = _bands(self._like(scoring), dtype)
        return self.bands[dtype].get(id(scoring))

    def _like(self, scoring: Any) -> list[TISA]:
        return [s for owner in self.owners for s in owner.offset_scores if _alike(s, scoring)]


def _alike(one: Any, other: Any) -> bool:
    """Return whether both are kernels of the same number on one device, and at hand."""
    return (
        type(one) is type(other) is TISA
        and one.num_kernels == other.num_kernels
        and one.kernel_offsets.device == other.kernel_offsets.device
        and _at_hand(one.kernel_offsets)
        and _at_hand(other.kernel_offsets)
    )


def _at_hand(parameter: Tensor) -> bool:
    """Return whether this process holds all of it: FSDP gathers a layer when its turn comes."""
    if hasattr(parameter, "device_mesh"):
        return False
    # The first FSDP leaves the shape and takes the memory away.
    return torch.compiler.is_compiling() or parameter.untyped_storage().size() > 0


@lru_cache(maxsize=8)
def _empty(heads: int, kernels: int) -> TISA:
    """Return a scoring function without values, to be called with those of others."""
    with torch.device("meta"):
        return TISA(heads, kernels, init="zero")


def _joined(scorings: list[TISA]) -> tuple[TISA, dict[str, Tensor], list[int]]:
    """Return an empty function of all heads, the values to call it with, and each one's heads."""
    heads = [scoring.num_attention_heads for scoring in scorings]
    first = scorings[0]
    values = {
        name: torch.cat([scoring.get_parameter(name) for scoring in scorings])
        for name, _ in first.named_parameters()
    }
    return _empty(sum(heads), first.num_kernels), values | dict(first.named_buffers()), heads


def _vectors(scorings: list[TISA], queries: int, keys: int) -> dict[int, Tensor]:
    if len(scorings) < 2:
        return {}
    whole, values, heads = _joined(scorings)
    found = functional_call(whole, values, (queries, keys))
    return {id(s): part for s, part in zip(scorings, found.split(heads), strict=True)}


def _bands(scorings: list[TISA], dtype: torch.dtype) -> dict[int, Tensor]:
    if len(scorings) < 2:
        return {}
    with torch.no_grad():
        whole, values, heads = _joined(scorings)
        found = functional_call(_Band(whole), {f"of.{k}": v for k, v in values.items()}, (dtype,))
    return {id(s): part for s, part in zip(scorings, found.split(heads), strict=True)}


class _Band(torch.nn.Module):
    """A scoring function's band as a forward pass, for `functional_call`."""

    def __init__(self, of: TISA) -> None:
        super().__init__()
        self.of = of

    def forward(self, dtype: torch.dtype) -> Int32[Tensor, "heads 2"]:
        """Return the band."""
        band = self.of.band(dtype)
        assert band is not None
        return band
