"""The error budget: a backend's error ≤ 2 × that of plain eager code in the same dtype.

Both against the reference in float64 on the same, already rounded input. A floor covers cases in
which the eager code happens to be exact: the last rounding to the dtype, and float32's rounding of
numbers of the order of 1 that cancel inside.
"""

import torch

from tisa.offsets import to_matrix


def eager(query, key, value, vector, *, scale=None, mask=None):
    """Return attention as people write it, in the dtype of its input throughout.

    A query that sees nothing gets zeros, as from the operator.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    logits = query @ key.transpose(-1, -2) * scale
    if vector is not None:
        queries, keys = query.shape[-2], key.shape[-2]
        logits = logits + to_matrix(vector.to(query.dtype), queries, keys)
    if mask is None:
        return logits.softmax(-1) @ value
    logits = logits + mask.to(query.dtype)
    blind = (logits == -torch.inf).all(-1, keepdim=True)
    return logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0) @ value


def assert_within_budget(got, exact, plain, *, name="", terms=0.0):
    """`terms`: how large the numbers are that cancel in a sum (`magnitudes` in fuzz.py)."""
    exact = exact.double()
    allowed = 2 * (plain.double() - exact).abs().max()
    last = 2 * torch.finfo(got.dtype).eps * exact.abs().max()
    floor = last + (64 + terms) * torch.finfo(torch.float32).eps
    error = (got.double() - exact).abs().max()
    assert torch.isfinite(got).all(), f"{name} is not finite"
    assert error <= allowed + floor, f"{name}: error {error:.2e}, allowed {allowed + floor:.2e}"
