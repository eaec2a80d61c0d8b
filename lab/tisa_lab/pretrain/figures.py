"""Records of finished runs as figures: loss curves, R² over time, learned curves, P."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tisa_lab.pretrain.summary import Group


def loss_curves(groups: Sequence[Group]) -> Any:
    """Return validation loss against tokens, a line for each method."""
    made, axis = _figure(7.5, 4.4)
    colours = _colours(len(groups))
    for group, colour in zip(groups, colours, strict=True):
        for number, record in enumerate(group.records):
            points = [(e["tokens"] / 1e6, e["loss"]) for e in record["evaluations"] if e["step"]]
            axis.plot(*zip(*points, strict=True), color=colour, linewidth=1.3,
                      label=None if number else group.label)  # fmt: skip
    axis.set_xlabel("million tokens")
    axis.set_ylabel("validation loss")
    axis.grid(alpha=0.25, linewidth=0.5)
    # From top to bottom as the lines end.
    made.legend(loc="outside right center", fontsize=8, reverse=True)
    return made


def toeplitz_over_time(groups: Sequence[Group]) -> Any:
    """Return R² of P against tokens for methods with a table, one line a seed, beside chance."""
    made, axis = _figure(6.5, 4.0)
    shown = [g for g in groups if g.records[0]["evaluations"][-1].get("position")]
    for group, colour in zip(shown, _colours(len(shown)), strict=True):
        for number, record in enumerate(group.records):
            seen = record["evaluations"]
            tokens = [e["tokens"] / 1e6 for e in seen]
            for name, style in (("r2", "-"), ("r2_off_diagonal", "--")):
                told = "off the diagonal" if style == "--" else "whole"
                axis.plot(tokens, [e["position"][name] for e in seen], color=colour,
                          linestyle=style, linewidth=1.4,
                          label=None if number else f"{group.label}, {told}")  # fmt: skip
        for name in ("chance", "chance_off_diagonal"):
            chance = group.records[0]["evaluations"][0]["position"][name]
            axis.axhline(chance, color=colour, linestyle=":", linewidth=0.9)
    axis.set_xlabel("million tokens")
    axis.set_ylabel("Toeplitz R² of P (dotted: chance)")
    axis.set_ylim(0, 1)
    axis.grid(alpha=0.25, linewidth=0.5)
    made.legend(loc="outside right center", fontsize=8)
    return made


def learned_curves(record: dict[str, Any], *, reach: int = 64) -> Any:
    """Return f(k) of every head, a panel for each layer (or the one that all share)."""
    offsets = np.array(record["curves"]["offsets"])
    near = np.abs(offsets) <= reach
    layers = record["curves"]["scores"]
    made, axes = _figure(3.0 * len(layers) + 0.6, 3.0, len(layers))
    for number, (axis, heads) in enumerate(zip(np.atleast_1d(axes), layers, strict=True), 1):
        for head, colour in zip(heads, _colours(len(heads)), strict=True):
            axis.plot(offsets[near], np.array(head)[near], color=colour, linewidth=1.2)
        axis.axhline(0, color="0.6", linewidth=0.7)
        axis.axvline(0, color="0.6", linewidth=0.7)
        shared = record["config"]["position_options"].get("layers") == "shared"
        axis.set_title("all layers" if shared else f"layer {number}", fontsize=9)
        axis.set_xlabel("offset key − query", fontsize=8)
        axis.tick_params(labelsize=7)
    np.atleast_1d(axes)[0].set_ylabel("score f(k)")
    return made


def grams(tables: Mapping[str, npt.NDArray[np.floating]]) -> Any:
    """Return P = E Eᵀ of tables of positions as heat maps, each without its brightest hundredth."""
    made, axes = _figure(3.6 * len(tables) + 0.4, 3.4, len(tables))
    for axis, (title, table) in zip(np.atleast_1d(axes), tables.items(), strict=True):
        product = table.astype(np.float64) @ table.astype(np.float64).T
        off = product[~np.eye(len(product), dtype=bool)]
        low, high = np.quantile(off, [0.01, 0.99])
        image = axis.imshow(product, vmin=low, vmax=high, cmap="viridis", interpolation="nearest")
        made.colorbar(image, ax=axis, shrink=0.8).ax.tick_params(labelsize=7)
        axis.tick_params(labelsize=7)
        axis.set_title(f"P: {title}", fontsize=10)
    return made


def write_figures(groups: Sequence[Group], folder: Path, out: Path) -> list[Path]:
    """Write every figure that the runs in `folder` allow; return their files."""
    out.mkdir(parents=True, exist_ok=True)
    found = {"loss": loss_curves(groups)}
    if any(g.records[0]["evaluations"][-1].get("position") for g in groups):
        found["toeplitz"] = toeplitz_over_time(groups)
    for group in groups:
        if group.records[0].get("curves"):
            found[f"curves-{_slug(group.label)}"] = learned_curves(group.records[0])
    tables = {path.parent.name: np.load(path) for path in sorted(folder.glob("*/table.npy"))}
    if tables:
        found["grams"] = grams(tables)
    written = []
    for name, figure in found.items():
        written.append(out / f"{name}.png")
        figure.savefig(written[-1], dpi=110)
    return written


def _slug(label: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in label).strip("-")


def _figure(width: float, height: float, panels: int = 1) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ImportError(
            'figures are drawn with matplotlib, which is not installed; run: pip install "tisa-lab"'
        ) from missing
    made = Figure(figsize=(width, height), layout="constrained")
    return made, made.subplots(1, panels)


def _colours(count: int) -> list[Any]:
    from matplotlib import colormaps

    # tab20 is pairs of a dark colour and a light one: neighbours are to differ.
    return [colormaps["tab20"](2 * number % 20 + number // 10 % 2) for number in range(count)]
