"""Records of finished runs in; tables, the gate and figures out."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tisa.packages import needed
from tisa.store import Lines, read_json, write_bytes
from tisa.store.seals import line
from tisa.transformer.config import SOURCE
from tisa_lab.record import picture

# Of a run whose record is damaged.
REMEDY = "remove it, and start the run again: it goes on from its last checkpoint"


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone."""

    label: str
    records: list[dict[str, Any]]

    @property
    def losses(self) -> list[float]:
        """The last validation loss of each seed; infinite for one that diverged."""
        return [
            math.inf if "diverged" in record else record["evaluations"][-1]["loss"]
            for record in self.records
        ]

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.losses)

    @property
    def spread(self) -> float | None:
        """The difference between the worst and the best seed, None for one seed."""
        return max(self.losses) - min(self.losses) if len(self.losses) > 1 else None

    def tokens_to(self, level: float) -> float | None:
        """Return the tokens after which the loss is below a level, None if a seed stays above it.

        Between two evaluations the loss is taken as a straight line; the mean over seeds.
        """
        if math.isinf(self.mean):
            return None
        found = [_crossing(record["evaluations"], level) for record in self.records]
        return None if None in found else statistics.fmean(x for x in found if x is not None)


def _crossing(evaluations: list[dict[str, Any]], level: float) -> float | None:
    for before, after in pairwise(evaluations):
        if after["loss"] < level:
            share = (before["loss"] - level) / (before["loss"] - after["loss"])
            return before["tokens"] + share * (after["tokens"] - before["tokens"])
    return None


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of all finished runs in the folders of a folder, or of a file of lines.

    Runs that have a line in its records.jsonl are read from there where their folders are gone.
    """
    if folder.is_file():
        return Lines(folder).read()[0]
    found: dict[str, dict[str, Any]] = {}
    lines = folder / "records.jsonl"
    paths = sorted(folder.glob("*/record.json"))
    for one in (
        *(read_records(lines) if lines.is_file() else ()),
        *(read_json(path, remedy=REMEDY) for path in paths),
    ):
        found[json.dumps(one["config"], sort_keys=True)] = one
    if not found:
        raise ValueError(f"{folder}: expected folders of finished runs, got none")
    return list(found.values())


def lines_of(records: list[dict[str, Any]]) -> str:
    """Return one line for each run."""
    return "".join(f"{line(small(record))}\n" for record in records)


def small(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record small enough to be kept in a line: no losses of single steps."""
    some = {name: value for name, value in record.items() if name != "loss"}
    if some.get("curves"):
        some["curves"] = some["curves"] | {"scores": _rounded(some["curves"]["scores"])}
    return some


def _rounded(value: Any) -> Any:
    return [_rounded(x) for x in value] if isinstance(value, list) else float(f"{value:.4g}")


def label_of(config: dict[str, Any]) -> str:
    """Return the method with its options and windows, and the schedule if it is not one length."""
    options = [f"{name}={value}" for name, value in config["position_options"].items()]
    if config.get("window") is not None:
        options.append(f"window={config['window']}")
    lengths = [str(length) for length, _ in config["lengths"]]
    if len(lengths) > 1:
        options.append("→".join(lengths))
    return " ".join([config["position"], *options])


def groups_of(records: list[dict[str, Any]]) -> list[Group]:
    """Return the runs by method, the best first; refuse runs of different recipes."""
    recipes = [_recipe(record) for record in records]
    for name in dict.fromkeys(name for recipe in recipes for name in recipe):
        values = sorted({json.dumps(recipe.get(name)) for recipe in recipes})
        if len(values) > 1:
            raise ValueError(f"records: expected runs of one {name}, got {', '.join(values)}")
    found: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        found.setdefault(label_of(record["config"]), []).append(record)
    for label, some in found.items():
        seeds = [record["config"]["seed"] for record in some]
        lengths = {json.dumps(record["config"]["lengths"]) for record in some}
        if len(set(seeds)) < len(seeds) or len(lengths) > 1:
            raise ValueError(
                f"records: expected runs of {label} that differ in their seed alone, got seeds "
                f"{seeds} and lengths {', '.join(sorted(lengths))}"
            )
    return sorted((Group(label, some) for label, some in found.items()), key=lambda g: g.mean)


def _recipe(record: dict[str, Any]) -> dict[str, Any]:
    """Return what runs in one table have in common: all but method, seed and schedule."""
    config = record["config"]
    own = ("position", "position_options", "window", SOURCE, "seed", "lengths")
    # Validation rows are as long as the last phase's.
    recipe = {"last length": config["lengths"][-1][0]}
    recipe |= {name: value for name, value in config.items() if name not in own}
    # The first records had the tokenizer alone.
    kept = ("tokenizer", "corpus", "validation", "precision")
    return recipe | {name: record.get(name) for name in kept}


def gate(groups: list[Group], *, times: float = 5.0) -> dict[str, Any]:
    """Return whether none and absolute differ by more than 5 × the larger of their spreads."""
    by_label = {group.label: group for group in groups}
    if not {"none", "absolute"} <= set(by_label):
        raise ValueError("gate: expected runs of none and of absolute, got not both")
    none, absolute = by_label["none"], by_label["absolute"]
    spreads = [group.spread for group in (none, absolute)]
    if None in spreads:
        raise ValueError("gate: expected at least two seeds of none and of absolute")
    spread = max(s for s in spreads if s is not None)
    difference = none.mean - absolute.mean
    return {
        "none": none.losses,
        "absolute": absolute.losses,
        "difference": difference,
        "spread": spread,
        "ratio": abs(difference) / spread if spread else float("inf"),
        "passed": abs(difference) > times * spread,
    }


def markdown(groups: list[Group]) -> str:
    """Return a line for each method: loss, spread, seeds, how soon it beats a model without.

    "Passes none after": the million tokens after which it is below the last loss of `none`.
    """
    none = next((group.mean for group in groups if group.label == "none"), None)
    lines = [
        "| method | validation loss | seeds (max − min) | better than none by | passes none after "
        "| positional parameters | step |",
        "|---" * 7 + "|",
    ]
    for group in groups:
        spread = "1" if group.spread is None else f"{len(group.records)} ({group.spread:.4f})"
        mean, gain = f"{group.mean:.4f}", "–" if none is None else f"{none - group.mean:+.4f}"
        if math.isinf(group.mean):
            mean, gain = f"diverged ({group.losses.count(math.inf)} of {len(group.losses)})", "–"
            spread = str(len(group.records))
        passes = None if none is None or group.label == "none" else group.tokens_to(none)
        after = "–" if passes is None else f"{passes / 1e6:.1f} M"
        speeds = [r["speed"].get("step_seconds") for r in group.records]
        known = [s for s in speeds if s is not None]
        step = f"{1000 * min(known):.1f} ms" if known else "–"
        parameters = group.records[0]["parameters"]["positional"]
        lines.append(
            f"| {group.label} | {mean} | {spread} | {gain} | {after} | {parameters:,} | {step} |"
        )
    return "\n".join(lines) + "\n"


def tables_over_time(groups: list[Group]) -> str:
    """Return the Toeplitz R² of P as training goes on, beside chance, for methods with a table."""
    # Not before it is needed: it brings the whole of the analysis.
    from tisa.analysis.toeplitz import written

    lines = []
    for group in groups:
        seen = group.records[0]["evaluations"]
        if not seen[-1].get("position"):
            continue
        lines += [
            f"### {group.label}",
            "",
            "| step | R² of P (chance) | off the diagonal (chance) "
            "| block of 128: means | squares |",
            "|---|---|---|---|---|",
        ]
        for evaluation in seen:
            p = evaluation["position"]
            block, squares = (
                f"{p[name]:.3f}" if name in p else "–" for name in ("block", "block_squares")
            )
            lines.append(
                f"| {evaluation['step']:,} | {written(p['r2'])} ({p['chance']:.3f}) | "
                f"{written(p['r2_off_diagonal'])} ({p['chance_off_diagonal']:.3f}) "
                f"| {block} | {squares} |"
            )
        lines.append("")
    return "\n".join(lines)


def loss_curves(groups: Sequence[Group]) -> Any:
    """Return validation loss against tokens, a line for each method."""
    made, axis = _figure(7.5, 4.4)
    colours = _colours(len(groups))
    for group, colour in zip(groups, colours, strict=True):
        for number, record in enumerate(group.records):
            points = [(e["tokens"] / 1e6, e["loss"]) for e in record["evaluations"] if e["step"]]
            if not points:  # It diverged before the first evaluation.
                continue
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
        write_bytes(written[-1], picture(figure, dpi=110))
    return written


def _slug(label: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in label).strip("-")


def _figure(width: float, height: float, panels: int = 1) -> tuple[Any, Any]:
    figures = needed("matplotlib.figure", "figures", "tisa-lab")
    made = figures.Figure(figsize=(width, height), layout="constrained")
    return made, made.subplots(1, panels)


def _colours(count: int) -> list[Any]:
    from matplotlib import colormaps

    # tab20 is pairs of a dark colour and a light one: neighbours are to differ.
    return [colormaps["tab20"](2 * number % 20 + number // 10 % 2) for number in range(count)]
