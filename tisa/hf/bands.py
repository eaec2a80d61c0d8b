"""The bands of all layers' scores at once: beyond them `tisa.attention` need not look at scores."""

from typing import Any

import torch

from tisa.scoring import TISA
from tisa.shapes import Int32, Tensor


class Bands:
    """Each scoring function's band, kept while its parameters stay as they are.

    Working a band out takes some ninety small operations, longer than a short attention, and in
    training every step changes every layer's: so they are worked out for all layers together.
    """

    def __init__(self, owners: list[Any]) -> None:
        self.owners = owners
        self.known: dict[int, tuple[Any, Any]] = {}

    def of(self, scoring: Any, dtype: torch.dtype) -> Int32[Tensor, "heads 2"] | None:
        """Return the scoring function's band for inputs of that dtype."""
        if torch.compiler.is_compiling():
            return scoring.band(dtype)
        found = self.known.get(id(scoring))
        if found is None or found[0] != _state(scoring, dtype):
            others = [s for owner in self.owners for s in owner.offset_scores if alike(s, scoring)]
            if not any(s is scoring for s in others):
                # Another's module, as peft and replicas have: it stands for itself.
                others = [scoring]
            for one, band in zip(others, bands_of(others, dtype), strict=True):
                self.known[id(one)] = (_state(one, dtype), band)
        return self.known[id(scoring)][1]


def bands_of(scorings: list[Any], dtype: torch.dtype) -> list[Int32[Tensor, "heads 2"] | None]:
    """Return the band of each of these scoring functions, alike in kernels and device."""
    if len(scorings) == 1:
        return [scorings[0].band(dtype)]
    heads = [scoring.num_attention_heads for scoring in scorings]
    parts = dict(scorings[0].named_parameters())
    whole = TISA(sum(heads), scorings[0].num_kernels, init="zero")
    with torch.no_grad():
        whole = whole.to(scorings[0].kernel_offsets.device)
        for name in parts:
            whole.get_parameter(name).copy_(torch.cat([s.get_parameter(name) for s in scorings]))
    band = whole.band(dtype)
    assert band is not None
    return list(band.split(heads))


def alike(one: Any, other: Any) -> bool:
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


def _state(scoring: Any, dtype: torch.dtype) -> tuple[Any, ...]:
    return (dtype, *((p.data_ptr(), p._version) for p in scoring.parameters()))
