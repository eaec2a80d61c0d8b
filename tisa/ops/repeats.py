"""A call that was made before is not looked at again.

With short sequences Python takes longer than the GPU, and a training loop makes calls of the same
shapes again and again. So a backend may say how to repeat a call (`repeat`), which is kept under
all that a check or a choice depends on. Not under addresses: in training they change from step to
step.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch

from tisa.ops.call import autocast_enabled, likeness, needs_gradient, plain
from tisa.shapes import Tensor

# From query, key, value, scores, band and mask to the output.
Repeat = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor]

# What makes known calls in C++ and is asked first, if it is on (ops/triton/native.py).
native: Any = None

# Forgetting all at once is simpler than forgetting the oldest.
_MOST = 1024
# None for a call that was made once: many are never made again.
_repeats: dict[Hashable, Repeat | None] = {}


def signature(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor | None,
    band: Tensor | None,
    mask: Tensor | None,
    *told: object,
) -> Hashable | None:
    """Return what tells this call from all others; None where it must be looked at every time."""
    if not plain(query, key, value, scores, band, mask):
        return None
    if not all(type(x) in (bool, int, float, str, type(None)) for x in told):
        return None
    if mask is not None and (mask.ndim != 4 or mask.requires_grad):
        return None
    device = query.device
    if device.type == "meta":
        return None
    autocast = torch.get_autocast_dtype(device.type) if autocast_enabled(device) else None
    # C++, which knows calls with and without gradients apart, is told of each.
    needs = native is not None and needs_gradient(query, key, value, scores)
    alike = likeness(query, key, value, scores, band, mask)
    # With their types: 1 equals True.
    return alike, autocast, needs, told, *map(type, told)


def find(signature: Hashable | None) -> Repeat | None:
    """Return how to repeat the call, if it was made before."""
    return _repeats.get(signature)


def keep(signature: Hashable, repeat: Callable[[], Repeat | None]) -> None:
    """Remember a call, and from the second time on how to repeat it."""
    if signature in _repeats:
        _repeats[signature] = repeat()
        return
    if len(_repeats) >= _MOST:
        _repeats.clear()
    _repeats[signature] = None


def forget() -> None:
    """Look at every call once more."""
    _repeats.clear()
