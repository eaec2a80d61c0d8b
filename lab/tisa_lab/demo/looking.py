"""Chapter 2: the model's position table, its P, and how far distance alone explains it."""

import base64
import io
import math
from pathlib import Path
from typing import Any

import torch

from tisa.analysis.colours import SEQUENTIAL
from tisa.analysis.families import has_table, read_positions, why_not
from tisa.analysis.toeplitz import mean_diagonal
from tisa.analysis.whole import measure_invariance
from tisa.offsets import to_matrix
from tisa.shapes import Float, Tensor
from tisa.weights import read_checkpoint

# Squares along a side of a map: sharp enough on a screen, and a page that can be sent.
SIDE = 256


def look(folder: Path, *, seed: int = 0) -> dict[str, Any]:
    """Return R² of P beside its null, and three maps as PNG: P, its fit, P of random numbers.

    R² and its interval are None where P has no variance.
    """
    checkpoint = read_checkpoint(folder)
    if not has_table(checkpoint):
        raise ValueError(f"model: {why_not(checkpoint)}; the demo needs a table of positions")
    table = read_positions(checkpoint).positions.double()
    found = measure_invariance(table, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    chance = torch.randn(table.shape, generator=generator, dtype=torch.float64)
    chance *= table.std()

    def known(value: float) -> float | None:
        return None if math.isnan(value) else value  # JSON has no NaN

    return {
        "positions": table.shape[0],
        "width": table.shape[1],
        "numbers": table.numel(),
        "r2": known(found.r2),
        "interval": [known(end) for end in found.interval],
        "null": found.null.whole,
        "off_diagonal": known(found.off_diagonal),
        "off_diagonal_interval": [known(end) for end in found.off_diagonal_interval],
        "off_diagonal_null": found.null.off_diagonal,
        "maps": {
            "table": picture(table @ table.T),
            "fit": picture(to_matrix(mean_diagonal(table)[None], len(table), len(table))[0]),
            "chance": picture(chance @ chance.T),
        },
    }


def picture(matrix: Float[Tensor, "rows columns"]) -> str:
    """Return a square matrix as PNG in base64; brighter is larger."""
    from matplotlib import colormaps
    from matplotlib.image import imsave

    size = len(matrix)
    factor = -(-size // SIDE)
    kept = size // factor * factor
    small = matrix[:kept, :kept].reshape(kept // factor, factor, kept // factor, factor)
    values = small.mean((1, 3))
    low, high = (float(torch.quantile(values, q)) for q in (0.01, 0.995))
    held = io.BytesIO()
    shown = ((values - low) / max(high - low, 1e-12)).clamp(0, 1).numpy()
    imsave(held, colormaps[SEQUENTIAL](shown), format="png")
    return base64.b64encode(held.getvalue()).decode()
