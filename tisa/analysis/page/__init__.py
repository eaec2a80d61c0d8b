"""One self-contained HTML page: analyses in, the page's text out; it asks the network for nothing.

The page holds the tables themselves, packed in 16 bits, and computes what it shows: P from E_P,
and F̂_P of any head as Z M Zᵀ, with Z the strongest dimensions of the table and M one small matrix
per head. Type, colours and charts are those of `tisa.pages`.

    packing.py      arrays as text: what of an analysis the page holds
    page.html       its sentences and controls
    data.js         what is embedded, decoded
    maps.js         maps of numbers
    report.js       the report's panels
    playground.js   a head to draw oneself
"""

from collections.abc import Sequence
from typing import Any

from tisa.analysis.page.packing import colours, packed_model
from tisa.analysis.whole import Analysis
from tisa.pages import page


def page_of(found: Sequence[Analysis], numbers: dict[str, Any]) -> str:
    """Return the page; `numbers` is what numbers.json holds, and what the page shows."""
    models = [packed_model(one, plain) for one, plain in zip(found, numbers["models"], strict=True)]
    data = {"about": numbers["about"], "colours": colours(), "models": models}
    return page("tisa.analysis.page/page.html", data=data)
