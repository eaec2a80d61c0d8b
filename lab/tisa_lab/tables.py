"""Rows of texts as a table: Markdown, LaTeX, CSV. Each way of writing one stands here, once."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

# A cell may hold anything that a person can name a folder.
TEX = str.maketrans({
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    **{sign: f"\\{sign}" for sign in "%_&#${}"}, "Δ": r"$\Delta$", "–": "--",
})  # fmt: skip
RULES = {"l": "---", "c": ":---:", "r": "---:"}


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], align: str = "") -> str:
    """Return a table as Markdown, without the last line's end; `align` has l, c or r by column."""
    align = align or "l" * len(header)
    lines = [
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
        for row in (header, *rows)
    ]
    lines[0] = lines[0].replace("|  |", "| |")
    return "\n".join([lines[0], "|" + "|".join(RULES[a] for a in align) + "|", *lines[1:]])


def latex(
    header: Sequence[str], rows: Sequence[Sequence[str]], caption: str, align: str = ""
) -> str:
    """Return a table over two columns as LaTeX, for which booktabs is needed."""
    align = align or "l" + "c" * (len(header) - 1)
    top, *lines = (" & ".join(map(escaped, row)) + r" \\" for row in (header, *rows))
    return "\n".join([
        r"\begin{table*}", r"\centering\small", rf"\caption{{{escaped(caption)}}}",
        rf"\begin{{tabular}}{{{align}}}", r"\toprule", top, r"\midrule", *lines, r"\bottomrule",
        r"\end{tabular}", r"\end{table*}",
    ])  # fmt: skip


def comma_separated(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows with the same names as CSV: None is empty, a number has four decimals."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(
        [*([rows[0]] if rows else []), *([_plain(v) for v in r.values()] for r in rows)]
    )
    return text.getvalue()


def escaped(text: str) -> str:
    """Return a text in which LaTeX sees no commands."""
    return text.translate(TEX)


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return "" if value is None else str(value)
