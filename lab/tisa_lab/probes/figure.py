"""The answers of the race: accuracy against length, a panel for each task, a line for a method."""

from typing import Any

CHANCE = {"order": 1 / 2}


def figure(record: dict[str, Any]) -> Any:
    """Return the figure."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ImportError(
            'figures are drawn with matplotlib, which is not installed; run: pip install "tisa-lab"'
        ) from missing
    rows, config = record["rows"], record["config"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    made = Figure(figsize=(2.6 * len(tasks) + 1.6, 3.4), layout="constrained")
    axes = made.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    lengths = [factor * config["length"] for factor in config["factors"]]
    for axis, task in zip(axes, tasks, strict=True):
        for number, method in enumerate(methods):
            (row,) = [r for r in rows if (r["method"], r["task"]) == (method, task)]
            points = [
                (length, row["accuracy"][str(factor)])
                for length, factor in zip(lengths, config["factors"], strict=True)
                if row["accuracy"][str(factor)] is not None
            ]
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3.5, linewidth=1.4,
                      color=colormaps["tab10"](number % 10),
                      linestyle="-" if number < 10 else "--", label=method)  # fmt: skip
        axis.axvline(config["length"], color="0.4", linewidth=0.9, linestyle="--")
        axis.axhline(CHANCE.get(task, 1 / 16), color="0.7", linewidth=0.9, linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [str(length) for length in lengths], fontsize=8)
        axis.set_title(task, fontsize=10)
        axis.set_xlabel("tokens", fontsize=9)
        axis.grid(alpha=0.25, linewidth=0.5)
    axes[0].set_ylabel("right answers")
    axes[0].set_ylim(-0.02, 1.03)
    made.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    return made
