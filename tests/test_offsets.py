import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tisa import offsets

LENGTHS = [(1, 1), (5, 5), (1, 7), (7, 1), (4, 9), (9, 4), (0, 3), (3, 0), (0, 0), (0, 1), (1, 0)]


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
@pytest.mark.parametrize("start", [None, 0, 3, -2])
def test_entry_of_the_vector_is_key_minus_query(queries, keys, start):
    vector = offsets.offset_range(queries, keys, query_start=start)
    assert len(vector) == max(0, queries + keys - 1)
    matrix = offsets.to_matrix(vector.double(), queries, keys)
    assert matrix.shape == (queries, keys)
    first = keys - queries if start is None else start
    for i in range(queries):
        for j in range(keys):
            assert matrix[i, j] == j - (i + first)


def test_default_range_is_the_documented_one():
    assert offsets.offset_range(3, 5).tolist() == [-4, -3, -2, -1, 0, 1, 2]
    assert offsets.offset_range(4, 4).tolist() == [-3, -2, -1, 0, 1, 2, 3]


def test_start_may_live_on_the_device():
    by_tensor = offsets.offset_range(3, 5, query_start=torch.tensor(7))
    assert torch.equal(by_tensor, offsets.offset_range(3, 5, query_start=7))


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 2**31))
def test_sum_diagonals_is_the_adjoint(queries, keys, seed):
    generator = torch.Generator().manual_seed(seed)
    length = offsets.span(queries, keys)
    vector = torch.randn(2, length, dtype=torch.float64, generator=generator)
    matrix = torch.randn(2, queries, keys, dtype=torch.float64, generator=generator)
    left = (offsets.to_matrix(vector, queries, keys) * matrix).sum()
    right = (vector * offsets.sum_diagonals(matrix)).sum()
    torch.testing.assert_close(left, right)


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_sum_diagonals_adds_each_diagonal(queries, keys):
    matrix = torch.randn(3, queries, keys, dtype=torch.float64)
    summed = offsets.sum_diagonals(matrix)
    for t in range(offsets.span(queries, keys)):
        expected = matrix.new_zeros(3)
        if queries and keys:
            expected = matrix.diagonal(t - (queries - 1), dim1=-2, dim2=-1).sum(-1)
        torch.testing.assert_close(summed[:, t], expected)


def test_matrix_is_exact_and_differentiable_twice():
    vector = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: offsets.to_matrix(v, 3, 4), vector)
    assert torch.autograd.gradgradcheck(lambda v: offsets.to_matrix(v, 3, 4) ** 2, vector)
    (gradient,) = torch.autograd.grad(offsets.to_matrix(vector, 3, 4).sum(), vector)
    assert gradient[0].tolist() == [1, 2, 3, 3, 2, 1]


def test_hold_outside_repeats_the_edges():
    scores = torch.arange(9.0).repeat(3, 1)
    band = torch.tensor([[-1, 2], [-9, 9], [3, -2]], dtype=torch.int32)
    held = offsets.hold_outside(scores, band, offsets.offset_range(5, 5))
    assert held[0].tolist() == [3, 3, 3, 3, 4, 5, 6, 6, 6]
    assert held[1].tolist() == list(range(9))
    # Ends in the wrong order mean the same band, not a wrong number.
    assert held[2].tolist() == [2, 2, 2, 3, 4, 5, 6, 7, 7]


@pytest.mark.parametrize(("start", "held_entry"), [(-100, 0), (100, -1)])
def test_hold_outside_of_a_band_that_the_vector_does_not_reach(start, held_entry):
    scores = torch.arange(9.0).unsqueeze(0)
    band = torch.tensor([[-2, 2]], dtype=torch.int32)
    held = offsets.hold_outside(scores, band, offsets.offset_range(5, 5, query_start=start))
    assert (held == scores[:, held_entry]).all()


def test_hold_outside_sends_the_held_gradient_to_the_edge():
    scores = torch.zeros(1, 9, requires_grad=True)
    band = torch.tensor([[-1, 2]], dtype=torch.int32)
    held = offsets.hold_outside(scores, band, offsets.offset_range(5, 5))
    held.backward(torch.ones_like(held))
    assert scores.grad is not None
    assert scores.grad[0].tolist() == [0, 0, 0, 4, 1, 1, 3, 0, 0]


@pytest.mark.parametrize(("rows", "keys"), [((0, 3), (0, 7)), ((2, 5), (1, 6)), ((4, 5), (0, 7))])
def test_block_view_is_the_block_upside_down(rows, keys):
    scores = torch.randn(2, 11)
    whole = offsets.to_matrix(scores, 5, 7)
    block = offsets.block_view(scores, 5, rows, keys)
    assert torch.equal(block.flip(1), whole[:, slice(*rows), slice(*keys)])
    assert block.data_ptr() >= scores.data_ptr()
    assert block.untyped_storage().data_ptr() == scores.untyped_storage().data_ptr()


@pytest.mark.parametrize(("rows", "keys"), [((0, 3), (0, 7)), ((2, 5), (1, 6)), ((4, 5), (0, 7))])
@pytest.mark.parametrize("heads", [1, 2])
def test_block_diagonals_add_up_to_those_of_the_matrix(rows, keys, heads):
    count = rows[1] - rows[0]
    block = torch.randn(3, 2, count, keys[1] - keys[0], dtype=torch.float64)
    matrix = torch.zeros(2, 5, 7, dtype=torch.float64)
    matrix[:, slice(*rows), slice(*keys)] = block.flip(2).sum(0)
    expected = offsets.sum_diagonals(matrix)
    if heads == 1:
        expected = expected.sum(0, keepdim=True)
    total = torch.ones(heads, 11, dtype=torch.float64)
    padded = torch.nn.functional.pad(block, (0, count)).contiguous()
    offsets.add_block_diagonals(total, padded, 5, rows, keys)
    torch.testing.assert_close(total, expected + 1)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (1, 7), (7, 1), (4, 9), (9, 4)])
def test_vector_and_matrix_are_each_others_inverse(queries, keys):
    vector = torch.randn(2, 3, queries + keys - 1)
    matrix = offsets.to_matrix(vector, queries, keys)
    assert torch.equal(offsets.to_vector(matrix), vector)


def test_an_empty_matrix_has_no_vector():
    with pytest.raises(ValueError, match="must have a query and a key"):
        offsets.to_vector(torch.zeros(0, 3))


@given(
    st.integers(0, 6), st.integers(1, 6), st.integers(0, 12), st.integers(-9, 9),
    st.none() | st.integers(0, 5), st.none() | st.integers(-2, 5),
)  # fmt: skip
def test_visible_keys_are_those_with_a_visible_offset(first, count, keys, start, left, right):
    rows = (first, first + count)
    i, j = torch.arange(*rows)[:, None], torch.arange(keys)[None, :]
    seen = torch.ones(count, keys, dtype=torch.bool)
    if left is not None:
        seen &= offsets.offset_of(i, j, start) >= -left
    if right is not None:
        seen &= offsets.offset_of(i, j, start) <= right
    found = offsets.visible_keys(rows, keys, start, (left, right))
    assert 0 <= found[0] <= found[1]
    columns = seen.any(0).nonzero().flatten().tolist()
    # Nothing visible is left out, and the ends are tight where anything is visible.
    if columns:
        assert found == (columns[0], columns[-1] + 1)


@pytest.mark.parametrize(("length", "new"), [(5, 3), (5, 5), (3, 5), (0, 4), (4, 1)])
def test_recentred_keeps_every_offset_that_both_have(length, new):
    scores = torch.randn(2, offsets.span(length, length))
    found = offsets.recentred(scores, length, new)
    old = dict(zip(offsets.offset_range(length, length).tolist(), scores.T, strict=True))
    zero = torch.zeros(2)
    for k, column in zip(offsets.offset_range(new, new).tolist(), found.T, strict=True):
        assert torch.equal(column, old.get(k, zero))
    if new <= length:
        assert found.untyped_storage().data_ptr() == scores.untyped_storage().data_ptr()


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_skew_moves_offsets_to_keys_and_back(queries, keys):
    rows = torch.randn(2, queries, offsets.span(queries, keys), dtype=torch.float64)
    matrix = offsets.skew(rows, keys)
    assert matrix.shape == (2, queries, keys)
    for i in range(queries):
        for j in range(keys):
            assert torch.equal(matrix[:, i, j], rows[:, i, j - i + queries - 1])
    back = offsets.unskew(matrix)
    assert back.shape == rows.shape
    assert torch.equal(offsets.skew(back, keys), matrix)
    # Its adjoint: what no pair of tokens reads is 0.
    assert (back != 0).sum() == (matrix != 0).sum()
