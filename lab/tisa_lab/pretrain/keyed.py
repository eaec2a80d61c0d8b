"""Random numbers that depend on nothing but their key: the same in every process, in any order.

A counter goes through the finaliser of splitmix64; numpy does it for whole arrays.
"""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64] | Words


def mixed(words: Words) -> Words:
    """Return splitmix64's finaliser of each word."""
    with np.errstate(over="ignore"):
        words = words + np.uint64(0x9E3779B97F4A7C15)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def key_of(*numbers: int | Numbers) -> Words:
    """Return one word for a sequence of numbers; where some are arrays, one for each entry."""
    word = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        if isinstance(number, int):
            number = np.array([number & (2**64 - 1)], dtype=np.uint64)
        word = mixed(word ^ mixed(number.astype(np.uint64)))
    return word


def words(count: int, *key: int | Numbers) -> Words:
    """Return that many random words for a key; where it has arrays, a row for each entry."""
    with np.errstate(over="ignore"):
        drawn = mixed(
            key_of(*key)[:, None]
            + np.arange(count, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
        )
    return drawn[0] if all(isinstance(number, int) for number in key) else drawn


def uniform(count: int, *key: int | Numbers) -> npt.NDArray[np.float64]:
    """Return that many numbers in [0, 1)."""
    return (words(count, *key) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def shuffled(count: int, *key: int) -> npt.NDArray[np.int64]:
    """Return the numbers 0 … count − 1 in a random order."""
    return np.argsort(words(count, *key), kind="stable")
