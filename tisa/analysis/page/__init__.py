"""One self-contained HTML page: analyses in, the page's text out; it asks the network for nothing.

The page holds the tables themselves, packed in 16 bits, and computes what it shows: P from E_P,
and F̂_P of any head as Z M Zᵀ, with Z the strongest dimensions of the table and M one small matrix
per head. Its parts lie here as files of their own kind: page.html, page.css, data.js (what is
embedded, decoded), draw.js (maps and charts), report.js (the report's panels), playground.js.

    packing.py   arrays as text: what of an analysis the page holds
"""

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from tisa.analysis.page.packing import colours, packed_model
from tisa.analysis.whole import Analysis

SCRIPTS = ("data.js", "draw.js", "report.js", "playground.js")


def page_of(found: Sequence[Analysis], numbers: dict[str, Any]) -> str:
    """Return the page; `numbers` is what numbers.json holds, and what the page shows."""
    data = {
        "about": numbers["about"],
        "colours": colours(),
        "models": [
            packed_model(one, plain) for one, plain in zip(found, numbers["models"], strict=True)
        ],
    }
    # "<" could end the script that holds the data, whatever a model is called.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    title = ", ".join(one.name for one in found).replace("&", "&amp;").replace("<", "&lt;")
    parts = {
        "title": title,
        "css": _part("page.css"),
        "js": "\n".join(_part(name) for name in SCRIPTS),
        "data": text.replace("<", "\\u003c"),
    }
    page = _part("page.html")
    before = 0
    pieces = []
    # In one pass: what is put in may itself hold braces.
    for name in ("title", "css", "data", "js"):
        at = page.index("{{" + name + "}}", before)
        pieces += [page[before:at], parts[name]]
        before = at + len(name) + 4
    return "".join([*pieces, page[before:]])


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
