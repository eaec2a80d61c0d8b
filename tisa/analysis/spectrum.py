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
    left, values, _ = torch.linalg.svd(centred(table.double()), full_matrices=False)
    variance = values**2 / (values**2).sum().clamp_min(1e-300)
    scores = left * values
    # Signs of components are arbitrary: the largest entry is positive, so that figures repeat.
    signs = torch.sign(scores.gather(0, scores.abs().argmax(0, keepdim=True)))
    scores = scores * torch.where(signs == 0, 1.0, signs)
    shown = min(shown, scores.shape[1])
    frequencies, purity = _frequencies(scores[:, :shown])
    step, still, periods = _turning(scores[:, : max(2, _reaching(variance, 0.9))])
    return Spectrum(
        variance.float(), scores[:, :shown].float(), frequencies, purity, step, still, periods
    )


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
    u, _, vh = torch.linalg.svd(here.T @ there)
    step = u @ vh
    total = ((there - there.mean(0)) ** 2).sum()
    if total == 0:
        return math.nan, math.nan, []
    values, vectors = torch.linalg.eig(step)
    # How much of the table's variance turns with each pair of eigenvalues.
    weight = (scores.to(vectors.dtype) @ vectors.conj()).abs().pow(2).sum(0)
    weight = weight / weight.sum()
    periods = []
    for value, part in zip(values, weight, strict=True):
        angle = float(torch.angle(value))
        if angle > 1e-6:
            periods.append((2 * torch.pi / angle, 2 * float(part)))
    periods.sort(key=lambda pair: -pair[1])
    r2 = [float(1 - ((there - guess) ** 2).sum() / total) for guess in (here @ step, here)]
    return r2[0], r2[1], periods
