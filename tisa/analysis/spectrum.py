"""How a position table lies in its space: principal components, and whether they turn.

Where P is exactly Toeplitz, one orthogonal map takes every row to the next one: the rows lie on an
orbit, each pair of dimensions turning at its own frequency. How far this holds is measured twice:
by how much of each component is one frequency, and by the best orthogonal step (Procrustes) from
all rows to their successors, beside what standing still explains.
"""

import math
from dataclasses import dataclass

import torch

from tisa.analysis.toeplitz import centred
from tisa.shapes import Float, Tensor


@dataclass(frozen=True)
class Spectrum:
    """Principal components of E_P around its mean.

    variance: share of each component; trajectories: its value at each position, for the first ones.
    frequencies: each shown component's strongest frequency in cycles over the table;
    purity: the share of the component's variance at that frequency and its two neighbours.
    step_r2: variance of E_P[i + 1] explained by the best orthogonal map of E_P[i], within the
    dimensions for 90 %; still_r2: the same with the identity.
    periods: the turning periods of that map in positions, by the share of variance that turns so.
    """

    variance: Float[Tensor, " components"]
    trajectories: Float[Tensor, "positions shown"]
    frequencies: Float[Tensor, " shown"]
    purity: Float[Tensor, " shown"]
    step_r2: float
    still_r2: float
    periods: list[tuple[float, float]]

    def dimensions(self, share: float = 0.9) -> int:
        """Return how many components carry this share of the variance."""
        return _reaching(self.variance, share)


def principal_components(table: Float[Tensor, "positions width"], *, shown: int = 8) -> Spectrum:
    """Return the spectrum of E_P around its mean, and how far its components turn."""
    table = centred(table.double())
    values, directions = components(table)
    variance = values**2 / (values**2).sum().clamp_min(1e-300)
    dimensions = _reaching(variance, 0.9)
    shown = min(shown, len(values))
    scores = table @ directions[:, : max(2, dimensions, shown)]
    # Signs of components are arbitrary: the largest entry is positive, so that figures repeat.
    lowest, highest = scores.aminmax(dim=0)
    scores *= torch.where(highest < -lowest, -1.0, 1.0)
    frequencies, purity = _frequencies(scores[:, :shown])
    step, still, periods = _turning(scores[:, : max(2, dimensions)])
    return Spectrum(
        variance.float(), scores[:, :shown].float(), frequencies, purity, step, still, periods
    )


def components(
    table: Float[Tensor, "positions width"],
) -> tuple[Float[Tensor, " components"], Float[Tensor, "width components"]]:
    """Return the table's singular values and right singular vectors, in float64.

    Those of R of its QR decomposition, in which the table is taken some rows at a time.
    """
    triangle = table[:0].double()
    for rows in table.split(4096):
        triangle = torch.linalg.qr(torch.cat((triangle, rows.double())), mode="r").R
    _, values, directions = torch.linalg.svd(triangle, full_matrices=False)
    return values, directions.T


def _reaching(variance: Tensor, share: float) -> int:
    if not variance.any():
        return 0  # a table of equal rows
    return int((variance.cumsum(0) < share - 1e-9).sum()) + 1


def _frequencies(scores: Tensor) -> tuple[Tensor, Tensor]:
    power = torch.fft.rfft(scores, dim=0).abs() ** 2
    power[0] = 0
    strongest = power.argmax(0)
    near = torch.stack([strongest - 1, strongest, strongest + 1]).clamp(0, power.shape[0] - 1)
    kept = torch.zeros_like(power).scatter_(0, near, power.gather(0, near))
    return strongest.float(), (kept.sum(0) / power.sum(0).clamp_min(1e-300)).float()


def _turning(scores: Tensor) -> tuple[float, float, list[tuple[float, float]]]:
    here, there = scores[:-1], scores[1:]
    if len(here) < 2:
        return 0.0, 0.0, []
    product = here.T @ there
    u, found, vh = torch.linalg.svd(product)
    total = there.var(0, correction=0).sum() * len(there)
    if total == 0:
        return math.nan, math.nan, []
    values, vectors = torch.linalg.eig(u @ vh)
    # How much of the table's variance turns with each pair of eigenvalues: components are
    # uncorrelated, so what lies along a vector is the sum of what lies along its parts.
    weight = torch.linalg.vector_norm(scores, dim=0) ** 2 @ vectors.abs() ** 2
    weight = weight / weight.sum()
    periods = []
    for value, part in zip(values, weight, strict=True):
        angle = float(torch.angle(value))
        if angle > 1e-6:
            periods.append((2 * torch.pi / angle, 2 * float(part)))
    periods.sort(key=lambda pair: -pair[1])
    # A rotation keeps lengths, so Σ (there − here · step)² needs no more than these and `found`.
    lengths = sum(torch.linalg.vector_norm(part) ** 2 for part in (here, there))
    r2 = [float(1 - (lengths - 2 * met) / total) for met in (found.sum(), product.trace())]
    return r2[0], r2[1], periods
