"""The error budget: a backend's error ≤ 2 × that of plain eager code in the same dtype.

Both against the reference in float64 on the same, already rounded input; a floor of a few units in
the last place covers cases in which the eager code happens to be exact, as when a gradient is 0
because two equal numbers cancel. Inputs are of the order of 1.
"""

import torch

from tisa.offsets import to_matrix


def eager(query, key, value, vector, *, scale=None):
    """Return attention as people write it, in the dtype of its input throughout."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    logits = query @ key.transpose(-1, -2) * scale
    if vector is not None:
        queries, keys = query.shape[-2], key.shape[-2]
        logits = logits + to_matrix(vector.to(query.dtype), queries, keys)
    return logits.softmax(-1) @ value


def assert_within_budget(got, exact, plain, *, name=""):
    exact = exact.double()
    allowed = 2 * (plain.double() - exact).abs().max()
    floor = 8 * torch.finfo(got.dtype).eps * exact.abs().max().clamp_min(1.0)
    error = (got.double() - exact).abs().max()
    assert torch.isfinite(got).all(), f"{name} is not finite"
    assert error <= allowed + floor, f"{name}: error {error:.2e}, allowed {allowed + floor:.2e}"
