"""For `make docs`: formulas become drawings inside the page, which need no network and no script.

A page has TeX between dollar signs, as GitHub shows it; `arithmatex` marks it in the HTML. Here
matplotlib sets it, and its outlines take the colour of the text around them, in either theme.
"""

import html
import re
from math import ceil, floor

from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import MathTextParser
from matplotlib.path import Path
from matplotlib.textpath import TextPath

MARKED = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)
# What TeX and GitHub know and matplotlib does not.
OTHER_WORDS = {r"\tfrac": r"\frac", r"\lvert": r"\vert", r"\rvert": r"\vert"}
# How an outline's steps are called in SVG, and how many points each takes.
STEPS = {Path.MOVETO: ("M", 1), Path.LINETO: ("L", 1), Path.CURVE3: ("Q", 2), Path.CURVE4: ("C", 3)}
SIZE = 100


def outline(path: Path) -> str:
    """Return an outline as the data of an SVG path, y downwards."""
    steps, at = [], 0
    while at < len(path.vertices):
        code = path.codes[at]
        if code == Path.CLOSEPOLY:
            steps.append("Z")
            at += 1
            continue
        letter, points = STEPS[code]
        numbers = (f"{x:.0f} {-y:.0f}" for x, y in path.vertices[at : at + points])
        steps.append(letter + " ".join(numbers))
        at += points
    return "".join(steps)


def drawn(tex: str) -> str:
    """Return a formula as SVG, as large as the text around it."""
    for word, other in OTHER_WORDS.items():
        tex = tex.replace(word, other)
    font = FontProperties(size=SIZE, math_fontfamily="stix")
    width, height, depth, *_ = MathTextParser("path").parse(f"${tex}$", 72, font)
    path = TextPath((0, 0), f"${tex}$", prop=font)
    # The box that TeX gives a formula, and what leans out of it, as an f does.
    inked = path.get_extents()
    left, right = floor(min(0, inked.x0)) - 1, ceil(max(width, inked.x1)) + 1
    bottom, top = floor(min(-depth, inked.y0)) - 1, ceil(max(height - depth, inked.y1)) + 1
    return (
        f'<svg class="formula" role="img" aria-label="{html.escape(tex)}"'
        f' viewBox="{left} {-top} {right - left} {top - bottom}"'
        f' style="width:{(right - left) / SIZE:.2f}em;height:{(top - bottom) / SIZE:.2f}em;'
        f'vertical-align:{bottom / SIZE:.2f}em"><path d="{outline(path)}"/></svg>'
    )


def on_page_content(content, page, config, files):
    """Return the page's HTML with its formulas drawn."""

    def replaced(found):
        formula = drawn(" ".join(html.unescape(found["tex"]).split()))
        return formula if found["tag"] == "span" else f'<div class="formula">{formula}</div>'

    return MARKED.sub(replaced, content)
