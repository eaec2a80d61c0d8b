"""The page: one self-contained HTML file, made of the numbers of demo.json and three maps.

Its sentences are in page.html, where `n("removed.zeroed.closeness", "three")` is a number of
demo.json in that form.
"""

from collections.abc import Callable, Mapping
from typing import Any

from markupsafe import Markup

from tisa.pages import moving_phrase, page
from tisa.pages.kit import minus
from tisa_lab.criteria.report import disagreements

# How a number is written; `data-key` beside it says which one of demo.json it is.
FORMS: dict[str, Callable[[Any], str]] = {
    "count": lambda v: f"{v:,}",
    "how many": lambda v: f"{len(v):,}",
    "two": lambda v: f"{v:.2f}",
    "three": lambda v: f"{v:.3f}",
    "share": lambda v: f"{100 * v:.0f} %",
    "tenth": lambda v: f"{100 * v:.1f} %",
    "seconds": lambda v: f"{v:.0f} s",
    "text": str,
}
# A stage of the model, what the page calls it, and where demo.json has what was measured.
STAGES = {
    "original": ("as it came", "removed.original"),
    "zeroed": ("table removed", "removed.zeroed"),
    "mean": ("only its mean kept", "removed.mean"),
    "kernels": ("kernels, fitted", "kernels"),
    "distilled": ("kernels, distilled", "distilled"),
}
# Measure, its heading, chance, and what it is.
MEASURES = (
    ("closeness", "Sentence vectors kept", None,
     "Mean cosine to the original's vectors, for sentences never trained on."),
    ("orders", "Word order recognised", 0.25,
     "Four orders of a sentence's words: is the vector nearest to the original's of the same "
     "order? Broken line: chance."),
    ("pairs", "Who did what to whom", 0.5,
     "Dog bites man, man bites dog: is the vector nearer to the original's of the same sentence "
     "than of the other? Broken line: chance."),
)  # fmt: skip
# What is said when a measure went up, and when it went down.
CHANGES = {
    "closeness": ("the vectors are closer", "the vectors are less close"),
    "orders": ("more word orders are recognised", "fewer word orders are recognised"),
    "pairs": ("more pairs are told apart", "fewer pairs are told apart"),
}
# From here on distance is said to explain much: R² off the diagonal above that of chance.
MUCH = 0.2


def page_of(demo: dict[str, Any], maps: Mapping[str, str]) -> str:
    """Return the page; `demo` is what demo.json holds, `maps` are PNG pictures in base64."""
    curves, race = demo["curves"], demo["race"]
    heads = [head | {"still": head["spread"] < curves["threshold"]} for head in curves["heads"]]
    widest = max(range(len(heads)), key=lambda i: heads[i]["spread"])
    tasks = list(dict.fromkeys(row["task"] for row in race["rows"]))

    def number(key: str, form: str, tag: str = "span") -> Markup:
        value = value_at(demo, key)
        text = "–" if value is None else FORMS[form](value)
        if form != "text":
            text = minus(text)
        return Markup(f'<{tag} data-key="{{}}">{{}}</{tag}>').format(key, text)

    return page(
        "tisa_lab.demo/page.html",
        data={
            "curves": {"reach": curves["reach"], "heads": heads, "first": widest},
            "names": list(dict.fromkeys(row["method"] for row in race["rows"])),
            "charts": {task: _chart(race, task) for task in tasks},
        },
        demo=demo,
        n=number,
        width=lambda key: round(max(0.0, min(100.0, 100 * value_at(demo, key))), 2),
        maps=maps,
        moving=_moving(demo),
        stages=STAGES,
        measures=MEASURES,
        verdict=_verdict(demo["positions"]),
        distilled=_distilled(demo["kernels"], demo["distilled"]),
        differences=disagreements(demo["table1"]),
        tasks=tasks,
    )


def value_at(demo: Any, key: str) -> Any:
    """Return the value at a key such as "removed.zeroed.closeness" or "race.rows.3.seconds"."""
    for part in key.split("."):
        demo = demo[int(part)] if isinstance(demo, list) else demo[part]
    return demo


def _moving(demo: dict[str, Any]) -> Markup | None:
    """Return the phrase that is moved; None where the model could not read its sentence."""
    found, gain = demo["curves"]["phrase"], demo["gain"]
    if found is None:
        return None
    return moving_phrase(
        found, model=demo["model"]["name"], before=gain["before"], after=gain["after"]
    )


def _verdict(found: dict[str, Any]) -> str:
    if found["off_diagonal"] is None:
        return (
            "All places are alike in this table: there is no variance that distance could explain."
        )
    if found["off_diagonal"] - found["off_diagonal_null"] > MUCH:
        return (
            "So a good part of what the model learned about places, number by number, is about "
            "distance. That part one curve can say."
        )
    return (
        "So in this table distance alone explains little more than chance would. What the heads "
        "make of it is another question: see below."
    )


def _distilled(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return what distillation brought in this run, and what it cost."""
    better = [up for measure, (up, _) in CHANGES.items() if after[measure] > before[measure]]
    worse = [down for measure, (_, down) in CHANGES.items() if after[measure] < before[measure]]
    told = f"In this run {_list(better)}." if better else "In this run it brought nothing more."
    return told + (f" But {_list(worse)}." if worse else "")


def _list(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def _chart(race: dict[str, Any], task: str) -> dict[str, Any]:
    """Return right answers against length, a line for each method."""
    lengths = race["lengths"]
    lines = [
        {"name": row["method"], "xs": lengths, "ys": list(row["accuracy"].values())}
        for row in race["rows"]
        if row["task"] == task
    ]
    return {
        "width": 460, "height": 280, "x": [lengths[0], lengths[-1]], "y": [0, 1], "percent": True,
        "xLog": True, "xTicks": lengths, "yTicks": [0, 0.25, 0.5, 0.75, 1], "xName": "tokens",
        "lines": lines, "label": f"right answers in {task} against tokens",
    }  # fmt: skip
