"""The page: one self-contained HTML file, made of the numbers of demo.json and three maps.

Its sentences are in page.html: `{{key as form}}` there is a number of demo.json, `{{name}}` a part
that is made here.
"""

import json
import re
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from tisa_lab.criteria.paper import CRITERIA
from tisa_lab.criteria.report import disagreements, mark
from tisa_lab.demo.showing import bars, legend, map_card, number, race_chart, tile

STAGES = {
    "original": ("as it came", "removed.original"),
    "zeroed": ("table removed", "removed.zeroed"),
    "mean": ("only its mean kept", "removed.mean"),
    "kernels": ("kernels, fitted", "kernels"),
    "distilled": ("kernels, distilled", "distilled"),
}
# Measure, its heading, chance, what it is, and what is said when it went up or down.
MEASURES = (
    ("closeness", "Sentence vectors kept", None,
     "Mean cosine to the original's vectors, for sentences never trained on.",
     "the vectors are closer", "the vectors are less close"),
    ("orders", "Word order recognised", 0.25,
     "Four orders of a sentence's words: is the vector nearest to the original's of the same "
     "order? Broken line: chance.",
     "more word orders are recognised", "fewer word orders are recognised"),
    ("pairs", "Who did what to whom", 0.5,
     "Dog bites man, man bites dog: is the vector nearer to the original's of the same sentence "
     "than of the other? Broken line: chance.",
     "more pairs are told apart", "fewer pairs are told apart"),
)  # fmt: skip
MAPS = (
    ("table", "inner products of the position vectors",
     "<b>This model.</b> How alike the vectors of any two places are: brighter is more alike."),
    ("fit", "the mean of each diagonal",
     "<b>Distance alone.</b> Each diagonal replaced by its mean: all that a rule about distance "
     "can say."),
    ("chance", "the same for random numbers",
     "<b>Chance.</b> The same picture for random numbers, a table of the same size."),
)  # fmt: skip
# From here on distance is said to explain much: R² off the diagonal above that of chance.
MUCH = 0.2


def page_of(demo: dict[str, Any], maps: Mapping[str, str]) -> str:
    """Return the page; `demo` is what demo.json holds, `maps` are PNG pictures in base64."""
    heads = demo["curves"]["heads"]
    widest = max(range(len(heads)), key=lambda i: heads[i]["spread"])
    data = {"reach": demo["curves"]["reach"], "heads": heads, "first": widest}
    race = demo["race"]
    parts = {
        "css": _part("page.css"),
        "js": _part("page.js"),
        # "<" could end the script that holds the data.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "maps": "".join(map_card(maps[key], shows, said) for key, shows, said in MAPS),
        "positions_verdict": _verdict(demo["positions"]),
        "removed_bars": _measured(demo, ["original", "zeroed", "mean"]),
        "removed_pairs": _pairs(demo, ["original", "zeroed"]),
        "kernels_bars": _measured(demo, ["original", "mean", "kernels"]),
        "distilled_told": _distilled(demo),
        "distilled_bars": _measured(demo, ["original", "mean", "kernels", "distilled"]),
        "distilled_pairs": _pairs(demo, ["original", "zeroed", "kernels", "distilled"]),
        "heads": _heads(demo["curves"]),
        "marks": _marks(demo["table1"]),
        "differences": _differences(demo["table1"]),
        "race_charts": _race_charts(demo),
        "race_legend": legend(list(dict.fromkeys(row["method"] for row in race["rows"]))),
        "answers": _answers(demo),
        "times": ", ".join(
            f"{name} {number(demo, f'seconds.{name}', 'seconds')}" for name in demo["seconds"]
        ),
        "quick": "<p class='warn'><strong>Made with --quick:</strong> everything ran, and its "
        "numbers say little.</p>" if demo["settings"]["quick"] else "",
    } | _model(demo)  # fmt: skip

    def filled(found: re.Match[str]) -> str:
        name, _, form = found[1].partition(" as ")
        return number(demo, name, form) if form else parts[name]

    # In one pass: what is put in may itself hold braces.
    return re.sub(r"\{\{(.+?)\}\}", filled, _part("page.html"))


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _model(demo: dict[str, Any]) -> dict[str, str]:
    model = demo["model"]
    name = escape(model["name"])
    if model["kind"] == "small":
        title = "A small model, trained on the spot"
        told = (
            "<p class='warn'><strong>No pretrained model could be had</strong> "
            f"({escape(model['why'])}). What follows is about {name}: "
            f"{number(demo, 'model.steps', 'count')} training steps on the demo's own sentences. "
            "It shows how things work, not what they are worth. With a network, "
            "<code>tisa-lab demo</code> takes a pretrained one.</p>"
        )
    elif model["kind"] == "wheel":
        title = f"A real pretrained model: {name}"
        told = (
            "<p>It turns an English sentence into a vector, so that sentences of the same meaning "
            f"lie close together. It came in the PyPI package <code>{escape(model['package'])}"
            f"</code> ({number(demo, 'model.megabytes', 'count')} MB, {escape(model['licence'])}), "
            "whose checksum was compared before it was opened.</p>"
        )
    else:
        title = f"Your model: {name}"
        told = "<p>Read from the folder that was named.</p>"
    return {"model_title": title, "model_told": told}


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


def _measured(demo: dict[str, Any], stages: list[str]) -> str:
    """Return the three measures as bars, a row for each stage."""
    cards = []
    for measure, title, chance, words, _, _ in MEASURES:
        rows = [(s, STAGES[s][0], f"{STAGES[s][1]}.{measure}") for s in stages]
        cards.append(
            f'<figure class="card"><h3>{title}</h3>{bars(demo, title, rows, chance)}'
            f"<figcaption>{words}</figcaption></figure>"
        )
    return f'<div class="row">{"".join(cards)}</div>'


def _pairs(demo: dict[str, Any], stages: list[str]) -> str:
    """Return how alike each model finds two sentences of the same words."""
    header = "".join(f"<th>{STAGES[s][0]}</th>" for s in stages)
    rows = "".join(
        f"<tr><td>{escape(one)}<br>{escape(other)}</td>"
        + "".join(number(demo, f"{STAGES[s][1]}.alike.{i}", "three", "td") for s in stages)
        + "</tr>"
        for i, (one, other) in enumerate(demo["removed"]["pairs"][:4])
    )
    return (
        '<figure class="card"><h3>How alike are these two?</h3><div class="scroll">'
        '<table class="sentences"><thead>'
        f"<tr><th></th>{header}</tr></thead><tbody>{rows}</tbody></table></div><figcaption>Cosine "
        "of the two vectors; at 1 the model cannot tell them apart.</figcaption></figure>"
    )


def _distilled(demo: dict[str, Any]) -> str:
    """Return what distillation brought in this run, and what it cost."""
    before, after, back = demo["kernels"], demo["distilled"], demo["given_back"]
    better = [up for measure, *_, up, _ in MEASURES if after[measure] > before[measure]]
    worse = [down for measure, *_, down in MEASURES if after[measure] < before[measure]]
    told = f"In this run {_list(better)}." if better else "In this run it brought nothing more."
    if worse:
        told += f" But {_list(worse)}."
    if back["distilled"] is not None:
        told += (
            " Of what removing the table cost the vectors, "
            f"{number(demo, 'given_back.distilled', 'share')} is back "
            f"({number(demo, 'given_back.kernels', 'share')} before this step)."
        )
    return told


def _list(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def _heads(curves: dict[str, Any]) -> str:
    layers: dict[int, list[str]] = {}
    for head in curves["heads"]:
        cares = head["spread"] >= curves["threshold"]
        layers.setdefault(head["layer"], []).append(tile(head, cares))
    return "".join(
        f'<div class="layer" style="--heads:{len(tiles)}"><span>layer {layer}</span>'
        f"{''.join(tiles)}</div>"
        for layer, tiles in layers.items()
    )


def _marks(table: dict[str, Any]) -> str:
    header = "".join(f"<th>{criterion}</th>" for criterion in CRITERIA)
    rows = []
    for row in table["rows"]:
        cells = []
        for criterion in CRITERIA:
            cell = row["cells"][criterion]
            differs = cell["paper"] is not None and cell["mark"] != cell["paper"]
            kind = ("yes" if cell["mark"] else "no") + (" differs" if differs else "")
            seen = escape(cell["evidence"])
            cells.append(f'<td class="{kind}" title="{seen}">{mark(cell["mark"])}</td>')
        ours = ' class="ours"' if row["method"] == "tisa" else ""
        rows.append(f"<tr{ours}><td>{escape(row['row'])}</td>{''.join(cells)}</tr>")
    return (
        f'<table id="marks"><thead><tr><th>method</th>{header}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _differences(table: dict[str, Any]) -> str:
    others = "".join(
        f"<li><strong>{escape(row)}, {criterion}</strong>: measured {mark(cell['mark'])}, the "
        f"paper has {mark(cell['paper'])}. {escape(cell['evidence'])}.</li>"
        for row, criterion, cell in disagreements(table)
    )
    if not others:
        return ""
    return f"<details><summary>Where they differ, and why</summary><ul>{others}</ul></details>"


def _race_charts(demo: dict[str, Any]) -> str:
    offset = number(demo, "race.offset", "count")
    about = {
        "find": f"<b>find</b>: which letter stands {offset} places before me?",
        "reverse": "<b>reverse</b>: write the letters again, from the last to the first.",
    }
    return "".join(
        f'<figure class="card">{race_chart(demo["race"], task)}<figcaption>'
        f"{about.get(task, f'<b>{task}</b>.')} Right answers against tokens in the input."
        "</figcaption></figure>"
        for task in dict.fromkeys(row["task"] for row in demo["race"]["rows"])
    )


def _answers(demo: dict[str, Any]) -> str:
    race = demo["race"]
    tasks = list(dict.fromkeys(row["task"] for row in race["rows"]))
    header = "".join(f"<th>{task}<br>{n} tokens</th>" for task in tasks for n in race["lengths"])
    rows = []
    for method in dict.fromkeys(row["method"] for row in race["rows"]):
        cells = "".join(
            number(demo, f"race.rows.{i}.accuracy.{factor}", "share", "td")
            for i, row in enumerate(race["rows"])
            if row["method"] == method
            for factor in row["accuracy"]
        )
        kind = ' class="ours"' if method in ("tisa", "near-far") else ""
        rows.append(f"<tr{kind}><td>{escape(method)}</td>{cells}</tr>")
    return (
        f'<table id="answers"><thead><tr><th>method</th>{header}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )
