"""Records of finished runs in, the numbers of the tables out."""

import json
import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tisa.analysis.toeplitz import written


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone."""

    label: str
    records: list[dict[str, Any]]

    @property
    def losses(self) -> list[float]:
        """The last validation loss of each seed."""
        return [record["evaluations"][-1]["loss"] for record in self.records]

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
        found = [_crossing(record["evaluations"], level) for record in self.records]
        return None if None in found else statistics.fmean(x for x in found if x is not None)


def _crossing(evaluations: list[dict[str, Any]], level: float) -> float | None:
    for before, after in pairwise(evaluations):
        if after["loss"] < level:
            share = (before["loss"] - level) / (before["loss"] - after["loss"])
            return before["tokens"] + share * (after["tokens"] - before["tokens"])
    return None


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of all finished runs in the folders of a folder, or of a file of lines."""
    if folder.is_file():
        return [json.loads(line) for line in folder.read_text().splitlines()]
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*/record.json"))]
    if not found:
        raise ValueError(f"{folder}: expected folders of finished runs, got none")
    return found


def lines_of(records: list[dict[str, Any]]) -> str:
    """Return one line for each run, small enough to be kept: no losses of single steps."""
    kept = []
    for record in records:
        some = {name: value for name, value in record.items() if name != "loss"}
        if some.get("curves"):
            some["curves"] = some["curves"] | {"scores": _rounded(some["curves"]["scores"])}
        kept.append(json.dumps(some) + "\n")
    return "".join(kept)


def _rounded(value: Any) -> Any:
    return [_rounded(x) for x in value] if isinstance(value, list) else float(f"{value:.4g}")


def label_of(config: dict[str, Any]) -> str:
    """Return the method with its options, and the schedule where it is not one length."""
    options = [f"{name}={value}" for name, value in config["position_options"].items()]
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
    own = ("position", "position_options", "seed", "lengths")
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
        gain = "–" if none is None else f"{none - group.mean:+.4f}"
        passes = None if none is None or group.label == "none" else group.tokens_to(none)
        after = "–" if passes is None else f"{passes / 1e6:.1f} M"
        speeds = [r["speed"].get("step_seconds") for r in group.records]
        known = [s for s in speeds if s is not None]
        step = f"{1000 * min(known):.1f} ms" if known else "–"
        parameters = group.records[0]["parameters"]["positional"]
        lines.append(
            f"| {group.label} | {group.mean:.4f} | {spread} | {gain} | {after} "
            f"| {parameters:,} | {step} |"
        )
    return "\n".join(lines) + "\n"


def tables_over_time(groups: list[Group]) -> str:
    """Return the Toeplitz R² of P as training goes on, beside chance, for methods with a table."""
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
