"""The convention: offset = key − query. Nothing else in this package indexes offsets.

A translation-invariant position method is one vector of scores per head, one score per offset.
Query i stands at position `i + query_start`, key j at position j, so their offset is
`j − i − query_start`; by default `query_start = keys − queries`, which puts the last query beside
the last key (bottom-right), as a cache has it. Entry t of the vector is then the offset

    k = t − (queries − 1) − query_start,        t = 0 … queries + keys − 2,

and entry (i, j) of the matrix is entry `t = j − i + queries − 1` of the vector, whatever
`query_start` is. For `queries = keys = n` the vector runs from −(n − 1) to n − 1.
"""

import torch
from torch.nn.functional import pad

from tisa.shapes import Bool, Float, Int, Int32, Tensor

Window = tuple[int | None, int | None]


def span(query_length: int, key_length: int) -> int:
    """Return how many offsets lie between that many queries and keys."""
    return max(0, query_length + key_length - 1)


def default_query_start(query_length: int, key_length: int) -> int:
    """Return the position of the first query when the last query stands beside the last key."""
    return key_length - query_length


def offset_range(
    query_length: int,
    key_length: int,
    *,
    query_start: int | Int[Tensor, ""] | None = None,
    device: torch.device | None = None,
) -> Int[Tensor, " span"]:
    """Return the offset of every entry of a score vector, in the vector's order."""
    for name, length in (("query_length", query_length), ("key_length", key_length)):
        if isinstance(length, (Tensor, float)):
            raise TypeError(
                f"{name} must be an int, got {type(length).__name__}; "
                "pass the length of the sequence, for example x.shape[-2]"
            )
        if length < 0:
            raise ValueError(f"{name} must be 0 or more, got {length}")
    if query_start is None:
        query_start = default_query_start(query_length, key_length)
    entries = torch.arange(span(query_length, key_length), device=device)
    return entries - (query_length - 1) - query_start


def to_matrix(
    scores: Float[Tensor, "*heads span"], query_length: int, key_length: int
) -> Float[Tensor, "*heads queries keys"]:
    """Return the Toeplitz matrix whose entry (i, j) is the score of query i and key j.

    Rows of the matrix are the vector shifted by one each. Laid end to end, copies of the vector
    with one filler element between them, read again at the vector's own length, are just that:
    no index tensor, and autograd's adjoint is a sum over rows in a fixed order.
    """
    heads, length = scores.shape[:-1], scores.shape[-1]
    if query_length == 0:
        return scores[..., :0].unsqueeze(-1).expand(*heads, 0, key_length)
    copies = pad(scores, (0, 1)).unsqueeze(-2).expand(*heads, query_length, length + 1)
    flat = copies.reshape(*heads, query_length * (length + 1))[..., : query_length * length]
    return flat.reshape(*heads, query_length, length)[..., query_length - 1 :].contiguous()


def skew(rows: Float[Tensor, "*heads queries span"], key_length: int) -> Tensor:
    """Return the matrix (queries, keys) whose row i is row i of `rows`, moved to where it belongs.

    Entry t of a row is what its query has for the t-th offset of the vector; `to_matrix` is the
    case in which all rows are the same.
    """
    heads, (query_length, length) = rows.shape[:-2], rows.shape[-2:]
    if query_length == 0:
        return rows.new_zeros(*heads, 0, key_length)
    flat = pad(rows, (0, 1)).reshape(*heads, query_length * (length + 1))
    moved = flat[..., : query_length * length].reshape(*heads, query_length, length)
    return moved[..., query_length - 1 :]


def unskew(matrix: Float[Tensor, "*heads queries keys"]) -> Tensor:
    """Return rows (queries, span) that hold each query's entries by offset, 0 where it has none.

    The adjoint of `skew`; the sum of its rows is `sum_diagonals`.
    """
    heads, (query_length, key_length) = matrix.shape[:-2], matrix.shape[-2:]
    length = span(query_length, key_length)
    if query_length == 0 or key_length == 0:
        return matrix.new_zeros(*heads, query_length, length)
    rows = pad(matrix, (query_length - 1, 0))
    flat = pad(rows.reshape(*heads, query_length * length), (0, query_length))
    return flat.reshape(*heads, query_length, length + 1)[..., :length]


def to_vector(matrix: Float[Tensor, "*heads queries keys"]) -> Float[Tensor, "*heads span"]:
    """Return the score vector of a Toeplitz matrix: up its first column, then along its first row.

    The inverse of `to_matrix`. Of a matrix that is not Toeplitz it reads those entries only.
    """
    query_length, key_length = matrix.shape[-2:]
    if query_length == 0 or key_length == 0:
        raise ValueError(
            "to_vector: the matrix must have a query and a key, "
            f"got shape {tuple(matrix.shape)}: nothing of the vector is in it"
        )
    return torch.cat((matrix[..., 0].flip(-1), matrix[..., 0, 1:]), dim=-1)


def sum_diagonals(matrix: Float[Tensor, "*heads queries keys"]) -> Float[Tensor, "*heads span"]:
    """Return the sum of each diagonal, in the vector's order: the adjoint of `to_matrix`."""
    return unskew(matrix).sum(-2)


def offset_of(query: Tensor, key: Tensor, query_start: int | Int[Tensor, ""]) -> Tensor:
    """Return the offset of query i and key j."""
    return key - query - query_start


def entry_of(query: Tensor, key: Tensor, query_length: int) -> Tensor:
    """Return the entry of the score vector at which query i and key j meet."""
    return key - query + (query_length - 1)


def visible_keys(
    rows: tuple[int, int], key_length: int, query_start: int, window: Window
) -> tuple[int, int]:
    """Return the first key that one of these queries may look at, and the one after the last."""
    left, right = window
    first = 0 if left is None else max(0, rows[0] + query_start - left)
    last = key_length if right is None else min(key_length, rows[1] + query_start + right)
    return first, max(first, last)


def visible(offsets: Int[Tensor, "*shape"], window: Window) -> Bool[Tensor, "*shape"] | None:
    """Return which offsets satisfy −left ≤ offset ≤ right; None when all do."""
    left, right = window
    seen = None if left is None else offsets >= -left
    if right is not None:
        seen = offsets <= right if seen is None else seen & (offsets <= right)
    return seen


def hold_outside(
    scores: Float[Tensor, "heads span"],
    band: Int32[Tensor, "heads 2"],
    offsets: Int[Tensor, " span"],
) -> Float[Tensor, "heads span"]:
    """Return scores in which every offset outside its head's band has the score of the band's edge.

    A band that the vector does not reach holds the vector's nearest entry. The gradients of the
    held offsets add up in the edge's entry. Tensor operations only: the band never meets the host.
    """
    length = scores.shape[-1]
    if length == 0:
        return scores
    lowest, highest = band.long().amin(-1, keepdim=True), band.long().amax(-1, keepdim=True)
    first_entry = (lowest - offsets[0]).clamp(0, length - 1)
    last_entry = (highest - offsets[0]).clamp(0, length - 1)
    held = torch.where(offsets < lowest, scores.gather(-1, first_entry), scores)
    return torch.where(offsets > highest, scores.gather(-1, last_entry), held)


def recentred(
    scores: Float[Tensor, "heads span"], length: int, new_length: int
) -> Float[Tensor, "heads new_span"]:
    """Return the vector for `new_length` queries and keys out of that for `length` of each.

    A shorter one is a view; a longer one is filled up with zeros.
    """
    before, count = new_length - length, span(new_length, new_length)
    if before <= 0:
        return scores.narrow(-1, -before, count)
    return pad(scores, (before, count - before - scores.shape[-1]))


def block_view(
    scores: Float[Tensor, "heads span"],
    query_length: int,
    rows: tuple[int, int],
    keys: tuple[int, int],
) -> Float[Tensor, "heads rows keys"]:
    """Return the matrix block of those rows and keys, **last row first**, as a view: no copy.

    Upside down, row r and key j meet at entry `r + j` of the vector: strides (1, 1), where the
    right way up would need a negative stride.
    """
    first = query_length - rows[1] + keys[0]
    return scores.as_strided(
        (scores.shape[0], rows[1] - rows[0], keys[1] - keys[0]),
        (scores.stride(0), scores.stride(1), scores.stride(1)),
        scores.storage_offset() + first * scores.stride(1),
    )


def add_block_diagonals(
    total: Float[Tensor, "heads_or_1 span"],
    block: Float[Tensor, "batch heads rows padded"],
    query_length: int,
    rows: tuple[int, int],
    keys: tuple[int, int],
) -> None:
    """Add to `total` the diagonal sums of a block laid out as `block_view` does, in place.

    Each row of the block is followed by as many zeros as the block has rows. Read again with rows
    one element shorter, row r moves r to the right, and diagonals stand below each other.
    """
    count, width = block.shape[-2:]
    assert width == count + keys[1] - keys[0]
    assert block.is_contiguous()
    heads = block[0] if block.shape[0] == 1 else block.sum(0)
    if total.shape[0] == 1:
        heads = heads.sum(0, keepdim=True)
    sheared = heads.as_strided(
        (heads.shape[0], count, width - 1), (heads.stride(0), width - 1, 1), heads.storage_offset()
    )
    first = query_length - rows[1] + keys[0]
    total[:, first : first + width - 1] += sheared.sum(1)


def sum_product_diagonals(
    left: Float[Tensor, "rows queries width"], right: Float[Tensor, "columns keys width"]
) -> Float[Tensor, "rows columns span"]:
    """Return `sum_diagonals` of left[a] · right[b]ᵀ for all a and b, in float64, without products.

    What the entries of a diagonal have in common is their distance: their sum is a correlation of
    columns, which Fourier transforms give. Some columns at a time.
    """
    queries, keys = left.shape[1], right.shape[1]
    length = queries + keys
    step = max(1, 2**21 // (left.shape[0] * length))
    spectrum = left.new_zeros(
        length // 2 + 1, left.shape[0], right.shape[0], dtype=torch.complex128
    )
    for some, others in zip(left.split(step, -1), right.split(step, -1), strict=True):
        of_left = torch.fft.rfft(some.double(), n=length, dim=1)
        of_right = of_left if right is left else torch.fft.rfft(others.double(), n=length, dim=1)
        spectrum += of_left.permute(1, 0, 2).conj() @ of_right.permute(1, 2, 0)
    by_offset = torch.fft.irfft(spectrum, n=length, dim=0)  # offset k is entry k modulo `length`
    return by_offset.roll(queries - 1, 0)[: span(queries, keys)].permute(1, 2, 0)


def join_block_diagonals(
    blocks: Float[Tensor, "rows columns block_span"], weights: Float[Tensor, "draws rows columns"]
) -> Float[Tensor, "draws span"]:
    """Return the diagonal sums of a matrix out of those of its equally large square blocks.

    Block (a, b) of size s lies s·(b − a) offsets away from the main diagonal; it counts as often as
    each draw's weight for it says.
    """
    rows, columns, length = blocks.shape
    size = (length + 1) // 2
    total = blocks.new_zeros(len(weights), (rows + columns) * size - 1)
    for step in range(1 - rows, columns):
        first = (step + rows - 1) * size
        on_step = weights.diagonal(step, 1, 2) @ blocks.diagonal(step, 0, 1).T
        total[:, first : first + length] += on_step
    return total
