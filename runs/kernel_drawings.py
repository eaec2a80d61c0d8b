"""The drawings of docs/attention.md: tiles, diagonal sums and launch order of the fused kernels.

    python runs/kernel_drawings.py --out docs/figures

What is drawn is computed from the definitions (which distances a tile has, whose turn it is), not
painted: `kinds` and `turns` are what `tisa/ops/triton/` does in tiles.py and
backward_query.py, and tests/ops/test_drawings.py holds them
to it.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

from tisa.analysis.colours import BLUE, GOLD, GREEN, INK, ORANGE, PALE, PINK, SKY
from tisa.analysis.plots.style import STYLE

SKIPPED, BELOW, BAND, ABOVE, EDGE = range(5)
NAMES = (
    "not visited: every key is hidden", "one number: the score left of the band",
    "scores gathered from the vector", "one number: the score right of the band",
    "scores gathered, some keys hidden",
)  # fmt: skip
COLOURS = ("#ececee", SKY, ORANGE, GREEN, GOLD)


def kinds(length: int, block: int, band: tuple[int, int], *, causal: bool) -> list[list[int]]:
    """Return what each tile of a sequence needs, row by row."""
    low, high = band
    count = -(-length // block)
    rows = []
    for row in range(count):
        tiles = []
        for column in range(count):
            # Distances key − query in the tile run from `least` to `most`.
            least, most = (column - row - 1) * block + 1, (column - row + 1) * block - 1
            ragged = (column + 1) * block > length
            if causal and least > 0:
                tiles.append(SKIPPED)
            elif ragged or (causal and most > 0):
                tiles.append(EDGE)
            elif most <= low:
                tiles.append(BELOW)
            elif least >= high:
                tiles.append(ABOVE)
            else:
                tiles.append(BAND)
        rows.append(tiles)
    return rows


def turns(tiles: int, programs: int) -> list[tuple[int, int]]:
    """Return for each row of tiles of a causal sequence its program and at which turn it comes.

    From the longest row on, there and back again.
    """
    found = [(0, 0)] * tiles
    for begin in range(0, tiles, programs):
        turn = begin // programs
        for number in range(programs):
            item = begin + (programs - 1 - number if turn % 2 else number)
            if item < tiles:
                found[tiles - 1 - item] = (number, turn)
    return found


def plain_share(length: int, block: int, band: tuple[int, int], *, causal: bool) -> float:
    """Return the share of the visited tiles that need one number."""
    visited = [k for row in kinds(length, block, band, causal=causal) for k in row if k != SKIPPED]
    return sum(kind in (BELOW, ABOVE) for kind in visited) / len(visited)


def score_matrix():
    """Return the drawing of which tile needs what."""
    length, block, band = 1000, 64, (-90, 130)
    figure, axes = plt.subplots(1, 2, figsize=(10.4, 6.0), layout="constrained")
    colours = ListedColormap(COLOURS)
    for ax, causal in zip(axes, (False, True), strict=True):
        ax.imshow(kinds(length, block, band, causal=causal), cmap=colours, vmin=0, vmax=4,
                  extent=(0, 1024, 1024, 0))  # fmt: skip
        for at in range(0, 1025, block):
            ax.axhline(at, color="white", linewidth=0.8)
            ax.axvline(at, color="white", linewidth=0.8)
        # Where the curve itself leaves the band: the tiles follow it.
        for end in band:
            ax.plot((0, 1024), (-end, 1024 - end), color=INK, linewidth=1, linestyle="--")
        ax.plot((0, 1024), (0, 1024), color=INK, linewidth=0.8)
        ax.set(xlim=(0, 1024), ylim=(1024, 0), xlabel="key j", ylabel="query i")
        plain = plain_share(8192, block, band, causal=causal)
        seen = "Causal" if causal else "Every token sees every other"
        ax.set_title(f"{seen}\nat 8,192 tokens {100 * plain:.0f} % of the tiles need one number")
    handles = [Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in (1, 2, 3, 4, 0)]
    handles.append(plt.Line2D([], [], color=INK, linestyle="--", label="ends of the band"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    figure.suptitle(f"Tiles of {block} × {block}, {length:,} tokens, a curve that is constant "
                    f"outside {band[0]} ≤ k ≤ {band[1]}")  # fmt: skip
    return figure


def diagonal_sum():
    """Return the drawing of how a tile's diagonals are added up."""
    n = 5
    line = [plt.get_cmap("viridis")(0.08 + 0.9 * d / (2 * n - 2)) for d in range(2 * n - 1)]
    figure, ax = plt.subplots(figsize=(10.4, 3.6), layout="constrained")

    def cell(x, y, d, text, size=8.5):
        ax.add_patch(Rectangle((x, y), 1, 1, facecolor=line[d], edgecolor="white"))
        dark = sum(line[d][:3]) < 1.5
        ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=size,
                color="white" if dark else INK)  # fmt: skip

    for i in range(n):
        for j in range(n):
            cell(j, i, j - i + n - 1, f"{j - i:+d}" if j != i else "0")
            # Row i turned by i places: entry (i, j) stands in column j − i, wrapped.
            cell(8 + (j - i) % n, i, j - i + n - 1, f"{j - i:+d}" if j != i else "0")
    for column in range(n):
        lower, upper = column - n, column
        cell(16 + column, 0.6, upper + n - 1, f"Σ {upper:+d}" if upper else "Σ 0")
        if lower >= -(n - 1):
            cell(16 + column, 3.4, lower + n - 1, f"Σ {lower:+d}")
    for start, end in ((5.3, 7.7), (13.3, 15.7)):
        ax.add_patch(FancyArrowPatch((start, 2.5), (end, 2.5), arrowstyle="-|>",
                                     mutation_scale=16, color=PALE))  # fmt: skip
    ax.text(2.5, -0.5, "dS of one tile, in registers", ha="center")
    ax.text(2.5, 5.6, "numbers: distance from the\ntile's own diagonal", ha="center", va="top")
    ax.text(10.5, -0.5, "each row turned by its number", ha="center")
    ax.text(10.5, 5.6, "a column has one diagonal, and\nthe one that is wrapped into it",
            ha="center", va="top")  # fmt: skip
    ax.text(18.5, -0.5, "each column added up, twice", ha="center")
    ax.text(18.5, 1.9, "0 and right: the next tile of the row has\nthem too, so they wait for it",
            ha="center", va="top")  # fmt: skip
    ax.text(18.5, 4.7, "left: with what waited from the tile before,\nadded to the program's sums",
            ha="center", va="top")  # fmt: skip
    ax.set(xlim=(-0.5, 22.5), ylim=(6.9, -1), aspect="equal")
    ax.axis("off")
    return figure


def launch_order():
    """Return the drawing of who takes which row of tiles, and in what order."""
    tiles, programs = 16, 4
    order = turns(tiles, programs)
    colours = (BLUE, ORANGE, GREEN, PINK)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10.4, 4.9), layout="constrained", width_ratios=(1.25, 1)
    )
    for row, (program, turn) in enumerate(order):
        for column in range(row + 1):
            left.add_patch(Rectangle((column, row), 1, 1, facecolor=colours[program],
                                     edgecolor="white", alpha=1 - 0.17 * turn))  # fmt: skip
        left.text(tiles + 0.6, row + 0.5, f"program {program + 1}, turn {turn + 1}",
                  va="center", color=colours[program], fontsize=8)  # fmt: skip
    # One row in full: first the tiles that need one number, then those with scores.
    row, band = 13, (-90, 130)
    kind = kinds(tiles * 64, 64, band, causal=True)[row]
    plain = [c for c, k in enumerate(kind) if k == BELOW]
    others = [c for c, k in enumerate(kind) if k in (BAND, EDGE)]
    for number, column in enumerate(plain + others, 1):
        left.text(column + 0.5, row + 0.5, str(number), ha="center", va="center", color="white",
                  fontsize=8, fontweight="bold" if column in others else "normal")  # fmt: skip
    left.set(xlim=(0, tiles + 6), ylim=(tiles, 0), xlabel="tile of keys", ylabel="tile of queries",
             aspect="equal", xticks=range(0, 17, 4))  # fmt: skip
    left.set_title("Rows of tiles of a causal head")
    left.text(tiles / 2 + 3, 2.6, f"numbers: order within a row;\n{len(others)} bold ones with "
              "scores", ha="center", fontsize=8)  # fmt: skip
    there = [0] * programs
    straight = [0] * programs
    for row, (program, _) in enumerate(order):
        there[program] += row + 1
        straight[(tiles - 1 - row) % programs] += row + 1
    for number in range(programs):
        right.barh(number - 0.2, there[number], 0.36, color=colours[number])
        right.barh(number + 0.2, straight[number], 0.36, color=colours[number], alpha=0.35)
        right.text(there[number] + 0.4, number - 0.2, str(there[number]), va="center", fontsize=8)
        right.text(straight[number] + 0.4, number + 0.2, str(straight[number]), va="center",
                   fontsize=8)  # fmt: skip
    right.set(yticks=range(programs), yticklabels=[f"program {p + 1}" for p in range(programs)],
              xlabel="tiles", ylim=(programs - 0.4, -0.6))  # fmt: skip
    right.legend(
        handles=[Patch(color=INK, label="there and back again (as it is)"),
                 Patch(color=INK, alpha=0.35, label="always in the same order")],
        loc="upper center", bbox_to_anchor=(0.5, -0.14),
    )  # fmt: skip
    right.set_title("What each has to do")
    return figure


DRAWINGS = {
    "kernel-tiles": score_matrix,
    "kernel-diagonals": diagonal_sum,
    "kernel-order": launch_order,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        for name, draw in DRAWINGS.items():
            figure = draw()
            figure.savefig(out / f"{name}.png", dpi=120)
            plt.close(figure)
            print(out / f"{name}.png")


if __name__ == "__main__":
    main()
