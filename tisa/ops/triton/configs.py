"""Tile sizes, by the width of heads and of numbers; benchmarks/tiles.py measures them."""

from dataclasses import dataclass

# In queries.
TALLEST_TILE = 128


@dataclass(frozen=True)
class Tiles:
    """How one kernel is launched."""

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2
    # Registers per thread; None leaves it to the compiler.
    maxnreg: int | None = None
    # Programs that run on one multiprocessor at once; where they must be as many as run at once.
    resident: int = 1

    @property
    def parts(self) -> int:
        """Threads that share a diagonal of a square tile (`scores.diagonal_sums`)."""
        # Two diagonals for each thread.
        return min(64 * self.num_warps // self.block_n, self.block_m // 2)


@dataclass(frozen=True)
class Config:
    """The tiles of every kernel.

    The backward kernels read for each query what a kernel with larger tiles has written, up to the
    end of its last tile: forward.block_m ≥ query.block_m ≥ key.block_m. The tiles of the query
    kernel are square, so that their diagonals lie alike.
    """

    forward: Tiles
    query: Tiles
    key: Tiles
    # The query kernel where the scores have a gradient, which takes shared memory too.
    trained: Tiles
    # One loop in the key kernel, or one over the plain tiles and one over the others.
    one_key_loop: bool = False

    def __post_init__(self) -> None:
        assert TALLEST_TILE >= self.forward.block_m >= self.query.block_m >= self.key.block_m
        assert (
            self.query.block_m == self.query.block_n == self.trained.block_m == self.trained.block_n
        )


def config(
    width: int, bytes_per_number: int, keys: int, *, causal: bool, copy_engine: bool
) -> Config:
    """Return the tiles for heads of that padded width (16 … 256) and so many keys.

    Without Hopper's copy engine (`copy_engine`) a descriptor is taken apart into addresses, which
    fill the registers; float32 does, because each product is three. Both take small tiles.
    """
    if bytes_per_number == 4 or not copy_engine:
        size = 16 if bytes_per_number == 4 and width > 64 else 32
        warps = 8 if bytes_per_number == 4 or width > 64 else 4
        square = Tiles(size, size, warps, 1)
        # The backward kernels compute the weights again; in float32 with the same instruction, for
        # there the last digit of a logit of 60 is more than is allowed. From 64 queries on it would
        # be another one on Hopper.
        tall = 32 if bytes_per_number == 4 or width > 64 else 64
        taller = Tiles(tall, size, 8, 1)
        return Config(taller, square, square, square, one_key_loop=width <= 64)
    if width <= 64:
        return Config(
            forward=Tiles(64, 64 if keys <= 1024 or causal else 128, 4, 2),
            query=Tiles(64, 64, 4, 3, maxnreg=168),
            key=Tiles(64, 64, 4, 3, maxnreg=168),
            trained=Tiles(64, 64, 4, 3, maxnreg=168, resident=3),
            # The assembler serialises the matrix units in one loop for other widths.
            one_key_loop=width == 64,
        )
    if width <= 128:
        return Config(
            forward=Tiles(128, 64, 4, 2),
            query=Tiles(64, 64, 4, 2),
            key=Tiles(64, 64, 4, 2),
            trained=Tiles(64, 64, 4, 2, resident=2),
        )
    square = Tiles(64, 64, 8, 1)
    return Config(Tiles(128, 64, 8, 2), square, square, square)


# For sequences that fit one tile (small.py), by its height.
SMALL = {64: Tiles(64, 64, 4, 2), 128: Tiles(128, 128, 8, 2)}
