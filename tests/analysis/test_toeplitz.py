"""Toeplitz R², its null and its interval, against truths that are known."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tisa.analysis.grid import grid_fit
from tisa.analysis.resampling import bootstrap_interval, gaussian_null
from tisa.analysis.toeplitz import centred, diagonals, mean_diagonal, toeplitz_r2, written
from tisa.analysis.whole import measure_blocks, measure_invariance

# Whole table and off the main diagonal, as measured with other code by those who gave the models.
REAL = {
    "all-MiniLM-L6-v2": (0.474, 0.477),
    "rxnmapper": (0.215, 0.198),
    "rxnfp": (0.369, 0.351),
}


def sinusoids(positions, width):
    angle = torch.arange(positions)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    return torch.cat((angle.sin(), angle.cos()), 1)


def by_definition(matrix, off_diagonal):
    """R² written out: every diagonal filled with its mean."""
    n = matrix.shape[0]
    fit = torch.zeros_like(matrix)
    for k in range(1 - n, n):
        i = torch.arange(max(0, -k), min(n, n - k))
        fit[i, i + k] = matrix.diagonal(k).mean()
    kept = ~torch.eye(n, dtype=torch.bool) if off_diagonal else torch.ones(n, n, dtype=torch.bool)
    left, seen = (matrix - fit)[kept], matrix[kept]
    return float(1 - (left**2).sum() / ((seen - seen.mean()) ** 2).sum())


@pytest.mark.parametrize("n", [2, 3, 16, 17, 33, 50])
@pytest.mark.parametrize("off_diagonal", [False, True])
def test_r2_is_the_definition(n, off_diagonal):
    left, right = torch.randn(2, n, 7, dtype=torch.float64).unbind()
    expected = by_definition(left @ right.T, off_diagonal)
    assert toeplitz_r2(left, right, off_diagonal=off_diagonal) == pytest.approx(expected, abs=1e-10)


def test_mean_diagonal_is_the_mean_of_each_diagonal():
    left, right = torch.randn(2, 21, 5, dtype=torch.float64).unbind()
    found = mean_diagonal(left, right)
    expected = [(left @ right.T).diagonal(k).mean() for k in range(-20, 21)]
    torch.testing.assert_close(found, torch.stack(expected))


def test_a_sinusoidal_table_is_wholly_translation_invariant():
    table = sinusoids(200, 64)
    found = measure_invariance(table)
    assert found.r2 == pytest.approx(1, abs=1e-6)
    assert found.off_diagonal == pytest.approx(1, abs=1e-6)


def test_without_variance_there_is_no_r2():
    """Nothing is explained where nothing varies: not 1, and chance is what it is at that shape."""
    for table in (torch.zeros(9, 3), torch.ones(9, 3)):
        found = measure_invariance(table)
        assert all(math.isnan(r2) for r2 in (found.r2, found.off_diagonal, *found.interval))
        assert found.null.whole == pytest.approx(gaussian_null(9, 3).whole)
        _, whole, off = grid_fit(table, 3, 3)
        assert math.isnan(whole)
        assert math.isnan(off)
        assert [written(whole), written(None), written(0.5, 2)] == ["–", "–", "0.50"]
    # Different rows at right angles: a diagonal, and nothing off it.
    found = measure_invariance(torch.eye(9))
    assert found.r2 == pytest.approx(1)
    assert math.isnan(found.off_diagonal)


def test_draws_without_variance_are_left_out_of_the_interval():
    """Of four positions some draws are one position four times: nothing off its diagonal."""
    table = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    low, high = bootstrap_interval(diagonals(table), off_diagonal=True)
    assert low <= toeplitz_r2(table, off_diagonal=True) <= high


def test_independent_rows_score_the_null():
    positions, width = 256, 128
    table = torch.randn(positions, width, generator=torch.Generator().manual_seed(7))
    found = measure_invariance(table)
    null = found.null
    assert null.whole == pytest.approx(width / (width + positions), abs=0.01)
    assert null.off_diagonal == pytest.approx(2 / positions, rel=0.1)
    assert found.r2 == pytest.approx(null.whole, abs=5 * null.whole_deviation)
    assert found.off_diagonal == pytest.approx(
        null.off_diagonal, abs=5 * null.off_diagonal_deviation
    )


def test_the_null_of_a_centred_table_is_that_of_centred_tables():
    plain, prepared = gaussian_null(64, 256), gaussian_null(64, 256, prepare=centred)
    assert plain.whole == pytest.approx(256 / (256 + 64), abs=0.01)
    assert prepared.whole != plain.whole


@pytest.mark.parametrize("model", REAL)
def test_numbers_of_real_models(model):
    """The tables are here with 8 bits (real_tables.safetensors says where they come from)."""
    tables = load_file(Path(__file__).parent / "real_tables.safetensors")
    table = tables[f"{model}.rows"].float() * tables[f"{model}.scale"][:, None]
    whole, off = REAL[model]
    assert toeplitz_r2(table) == pytest.approx(whole, abs=0.001)
    assert toeplitz_r2(table, off_diagonal=True) == pytest.approx(off, abs=0.001)


def test_the_interval_holds_the_estimate_and_narrows_with_invariance():
    torch.manual_seed(3)
    noise = torch.randn(128, 64)
    widths = []
    for share in (1.0, 0.1):
        sums = diagonals(sinusoids(128, 64) + share * noise)
        low, high = bootstrap_interval(sums)
        assert low < toeplitz_r2(sinusoids(128, 64) + share * noise) < high
        assert bootstrap_interval(sums) == (low, high)
        widths.append(high - low)
    assert widths[1] < widths[0]


def test_blocks_see_what_the_whole_does_not():
    """Two halves, each invariant in itself, with nothing in common: BERT's 128 block in small."""
    first, second = sinusoids(64, 32), torch.randn(64, 32)
    (one, two) = measure_blocks(torch.cat((first, second)), size=64)
    assert one[:2] == (0, 64)
    assert one[2].off_diagonal == pytest.approx(1, abs=1e-6)
    assert two[2].off_diagonal < 0.1
    assert two[2].null.whole == pytest.approx(32 / (32 + 64), abs=0.03)
    assert two[2].r2 == pytest.approx(two[2].null.whole, abs=0.1)


def test_a_grid_is_invariant_in_two_dimensions_and_not_in_one():
    rows, columns = 6, 5
    place = torch.arange(rows * columns)
    table = torch.cat(
        (sinusoids(rows, 8)[place // columns], sinusoids(columns, 8)[place % columns]), 1
    )
    fit, whole, off = grid_fit(table, rows, columns)
    assert fit.shape == (11, 9)
    assert whole == pytest.approx(1, abs=1e-6)
    assert off == pytest.approx(1, abs=1e-6)
    assert toeplitz_r2(table) < 0.95
    # A step of (1, 0) from anywhere: the mean that the fit holds there.
    gram = table @ table.T
    assert fit[rows, columns - 1] == pytest.approx(float(gram[0, columns]), abs=1e-5)
