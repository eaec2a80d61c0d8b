"""The arguments of the kernels, in groups that they share.

Triton compiles a kernel for the properties of every number in a group: one that is 1 or a multiple
of 16 makes another kernel. So numbers that change from call to call (`CHANGING`) stand outside of
groups; compiled for each value's properties, a kernel would be compiled anew again and again.
Descriptors stand outside too: the launcher does not find them in groups.
"""

from typing import Any, NamedTuple

CHANGING = ["queries", "keys", "start", "sequences", "programs", "part", "parts"]


class Strided(NamedTuple):
    """A tensor (batch, heads, length, dim) and its strides; numbers of a row are neighbours."""

    pointer: Any
    batch: int
    head: int
    row: int


class StridedKeys(NamedTuple):
    """A number for each key, (batch, heads, keys), and its strides; a row's are neighbours."""

    pointer: Any
    batch: int
    head: int


class Mask(NamedTuple):
    """The caller's mask and its strides, 0 where one row stands for all."""

    pointer: Any
    batch: int
    head: int
    query: int
    key: int


class Dropout(NamedTuple):
    """Which weights are dropped (`ops.dropout`), and by what the others grow."""

    seed: Any
    threshold: int
    kept_scale: float


class Rules(NamedTuple):
    """How products of queries and keys become weights. None is not there."""

    scores: Any
    band: Any
    mask: Mask | None
    dropout: Dropout | None
    cu_seqlens: Any
    # A tensor with the `start` of the call.
    start: Any
    left: int | None
    right: int | None
    scale: float


class Statistics(NamedTuple):
    """What the forward pass keeps of each query: its logarithm of the sum of weights to base 2.

    `row`: places of a head; `size`: of all heads, after which the second number stands (SPLIT).
    """

    pointer: Any
    row: int
    size: int
    # Nothing in the forward pass, or where the log-sum-exp has no gradient.
    gradient: Any = None


class Returned(NamedTuple):
    """What the forward pass has left for the query kernel, and the gradient that comes back."""

    output: Strided
    gradient: Strided
    statistics: Statistics


class Written(NamedTuple):
    """What the query kernel writes (backward_query.py)."""

    delta: Any
    query: Strided | None
    sums: Any
    sides: Any


class Counts(NamedTuple):
    """What the programs of a kernel are counted by."""

    heads: int
    tiles: int


class Fixed(NamedTuple):
    """What the compiler knows of a kernel: it is compiled anew for other values.

    A tile is BLOCK_M queries × BLOCK_N keys, KEYS_FIRST: keys × queries. Heads are WIDTH wide,
    padded to DIM; those of values VALUE_WIDTH and VALUE_DIM. GROUP query heads share a key head.
    """

    BLOCK_M: int
    BLOCK_N: int
    DIM: int
    VALUE_DIM: int
    WIDTH: int
    VALUE_WIDTH: int
    GROUP: int
    # In float32: the statistics are the largest logit and one over the sum of weights, not one
    # logarithm, and logits have their own unit, not that of log 2.
    SPLIT: bool
    # How float32 is multiplied.
    PRECISION: str
    # The mask has one row for all queries.
    KEY_MASK: bool
    # A tile may hold keys that are not there.
    RAGGED: bool = False
    KEYS_FIRST: bool = False
    # Tiles with the most keys are started first.
    BACKWARDS: bool = False
    # The caller's scale was negative.
    NEGATIVE: bool = False
    # What lies above the band is summed too (scores.py).
    BOTH_SIDES: bool = False
    # Threads that share a diagonal (scores.py).
    PARTS: int = 0
    # Plain and other tiles in one loop (backward_key.py).
    ONE_LOOP: bool = False
    # Delta from the weights, not from the rounded output (backward_query.py).
    EXACT: bool = False
    # Gradients are stored through descriptors (small.py).
    WHOLE: bool = False
