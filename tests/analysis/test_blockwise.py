"""The analysis never holds P: sums from factors are those of the whole matrix, in any blocks."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import formulas
from test_heads import little_model
from tisa.analysis import toeplitz, whole
from tisa.analysis.grid import grid_fit
from tisa.analysis.heads import analyse_heads, row_deviation
from tisa.analysis.kernels import fit_heads
from tisa.analysis.page.packing import packed_model
from tisa.analysis.reading import read_table
from tisa.analysis.spectrum import components
from tisa.offsets import sum_product_diagonals

SIZES = [1, 2, 3, 8, 9, 16, 17, 33]


@pytest.fixture(autouse=True)
def little_blocks(monkeypatch):
    """Four rows at a time, so that these sizes have borders, and end at one and beside it."""
    monkeypatch.setattr(toeplitz, "ROWS", 4)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 4), (4, 1), (5, 5), (3, 8), (9, 2)])
def test_diagonal_sums_of_products_without_products(queries, keys):
    left, right = torch.randn(2, queries, 6).double(), torch.randn(3, keys, 6).double()
    found = sum_product_diagonals(left, right)
    expected = [[formulas.diagonal_sums((a @ b.T).numpy()) for b in right] for a in left]
    np.testing.assert_allclose(found.numpy(), np.array(expected), atol=1e-12)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("causal", [False, True])
def test_sums_are_those_of_the_whole_matrix(n, causal):
    left, right = torch.randn(2, n, 5).double().unbind()
    dense = (left @ right.T).numpy()
    seen = np.tril(np.ones((n, n))) if causal else np.ones((n, n))
    last = n if causal else None
    found = toeplitz.sums_of(left, right, causal=causal)
    np.testing.assert_array_equal(found.counts, formulas.diagonal_sums(seen)[:last])
    np.testing.assert_allclose(found.sums, formulas.diagonal_sums(dense * seen)[:last], atol=1e-12)
    assert float(found.squares) == pytest.approx((dense**2 * seen).sum())
    assert float(found.main) == pytest.approx((dense.diagonal() ** 2).sum())
    for off in (False, True) if n > 2 else ():
        kept = seen * (1 - np.eye(n) * off)
        expected = formulas.toeplitz_r2(dense, kept)
        assert float(found.r2(off_diagonal=off)) == pytest.approx(expected, abs=1e-10)
    spread = [row[: i + 1 if causal else n].var() for i, row in enumerate(dense)]
    strength = row_deviation(left, right, causal=causal)
    assert strength == pytest.approx(np.mean(spread) ** 0.5, abs=1e-7)


@pytest.mark.parametrize("n", [*SIZES, 50])
@pytest.mark.parametrize("width", [3, 64])
def test_pairs_of_blocks_count_as_often_as_drawn(n, width):
    table = torch.randn(n, width, dtype=torch.float64)
    found = toeplitz.diagonals(table)
    blocks, size = found.main.shape[0], (found.sums.shape[-1] + 1) // 2
    weights = torch.randint(3, (blocks, blocks)).double()
    block = np.arange(n) // size
    often = weights.numpy()[block[:, None], block[None]]
    dense = (table @ table.T).numpy()
    surplus = blocks * size - n
    drawn = found.drawn(weights[None])
    for sums, expected in ((drawn.counts, often), (drawn.sums, dense * often)):
        inner = sums[0, surplus : sums.shape[1] - surplus]
        np.testing.assert_allclose(inner, formulas.diagonal_sums(expected), atol=1e-10)
        np.testing.assert_allclose(sums[0, :surplus], 0, atol=1e-10)
    assert float(drawn.squares) == pytest.approx((dense**2 * often).sum())
    assert float(drawn.main) == pytest.approx((dense.diagonal() ** 2 * often.diagonal()).sum())
    assert drawn.zero == drawn.sums.shape[1] // 2


@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (3, 4), (5, 2)])
def test_a_grid_is_fitted_by_step(rows, columns):
    table = torch.randn(rows * columns, 7, dtype=torch.float64)
    fit, whole_r2, off = grid_fit(table, rows, columns)
    dense = (table @ table.T).numpy()
    place = np.arange(len(dense))
    down = place // columns - (place // columns)[:, None] + rows - 1
    right = place % columns - (place % columns)[:, None] + columns - 1
    means = np.array([[dense[(down == d) & (right == r)].mean() for r in range(2 * columns - 1)]
                      for d in range(2 * rows - 1)])  # fmt: skip
    np.testing.assert_allclose(fit, means, rtol=1e-5, atol=1e-5)
    for found, kept in ((whole_r2, dense == dense), (off, ~np.eye(len(dense), dtype=bool))):
        left, seen = (dense - means[down, right])[kept], dense[kept]
        expected = 1 - (left**2).sum() / ((seen - seen.mean()) ** 2).sum()
        assert found == pytest.approx(expected, abs=1e-10)


def test_components_of_many_rows_are_those_of_the_table():
    table = torch.randn(4100, 3) * torch.tensor([3.0, 2.0, 1.0])
    values, directions = components(table)
    _, expected, right = torch.linalg.svd(table.double(), full_matrices=False)
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close((directions.T @ right.T).abs(), torch.eye(3).double())


@pytest.mark.parametrize("eps", [None, 1e-5])
def test_what_many_positions_read_is_counted_out(eps):
    model = long_model(2100, eps=eps)
    reading = read_table(model)
    x = model.positions[:, None] + model.words + model.constant
    x = x if eps is None else torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps)
    torch.testing.assert_close(reading.table[:, :-1], x.mean(1), atol=1e-5, rtol=1e-4)
    words = x.mean(0) - x.mean((0, 1))
    # The sample is the vocabulary in another order.
    torch.testing.assert_close(
        reading.words.sort(0).values, words.sort(0).values, atol=1e-5, rtol=1e-4
    )


class Largest(TorchDispatchMode):
    """Records how many numbers the largest tensor has that any operation returned."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(part, torch.Tensor):
                self.numbers = max(self.numbers, part.numel())
        return result


def long_model(positions, eps=1e-12):
    return replace(little_model(eps), positions=torch.randn(positions, 6))


def test_no_positions_by_positions_tensor_is_made(monkeypatch):
    monkeypatch.undo()  # the blocks that a user has
    # Fits see curves of at most some 2,300 offsets, whatever the table is.
    few = partial(fit_heads, largest=1, reach=8)
    monkeypatch.setattr(whole, "fit_heads", lambda curves, offsets, **_: few(curves, offsets))
    n = 4096
    model = long_model(n)
    with Largest() as seen:
        found = whole._tables(model, 0, lambda step: None)
        packed_model(whole.Analysis("long", "BERT", **found), {"kernels_near": [{}], "kernels": {}})
        analyse_heads(found["reading"].table, model.query[0], model.key[0], causal=True)
        grid_fit(model.positions, 64, 64)
    assert n * 6 < seen.numbers <= n * n // 8
