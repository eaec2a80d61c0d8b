"""Two ways on the same queries: how much more the one finds, how sure that is."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 2000


@dataclass(frozen=True)
class Pair:
    """By how much the first way's accuracy is larger, its 95 % interval, and a sign test.

    `better` and `worse` are queries that only the first way, or only the second, answers.
    """

    difference: float
    low: float
    high: float
    better: int
    worse: int
    p: float


def paired(
    first: Sequence[bool], second: Sequence[bool], groups: Sequence[Hashable], *, seed: int = 0
) -> Pair:
    """Return how two ways differ on the same queries.

    The interval is of a bootstrap over groups: queries about one document are drawn together. The
    sign test is exact and over queries that the ways answer differently.
    """
    if not len(first) == len(second) == len(groups) > 0:
        raise ValueError(
            f"paired: expected as many answers as groups, got {len(first)}, {len(second)} and "
            f"{len(groups)}"
        )
    numbers = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    each = np.array([numbers[group] for group in groups])
    gained = np.array(first, dtype=float) - np.array(second, dtype=float)
    sums = np.bincount(each, weights=gained)
    counts = np.bincount(each)
    drawn = np.random.default_rng(seed).integers(len(sums), size=(DRAWS, len(sums)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, (0.025, 0.975))
    better, worse = int((gained > 0).sum()), int((gained < 0).sum())
    return Pair(
        float(gained.mean()), float(low), float(high), better, worse, sign_test(better, worse)
    )


def sign_test(better: int, worse: int) -> float:
    """Return how probable so uneven a split is where both are alike (two-sided)."""
    total, least = better + worse, min(better, worse)
    if total == 0:
        return 1.0
    tail = sum(math.comb(total, k) for k in range(least + 1)) / 2**total
    return min(1.0, 2 * tail)
