"""The folder that `tisa analyze` writes: page, figures and numbers, whole or not at all."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tisa.analysis.numbers import numbers_of
from tisa.analysis.whole import Analysis


def write_report(
    found: Sequence[Analysis],
    out: Path,
    *,
    scores: Mapping[str, float] | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[Path]:
    """Return the files of the report: index.html, numbers.json, and every figure as PNG and SVG.

    Everything is written to a folder beside `out` first and moved when all of it is there.
    """
    from tisa.analysis.figures import figures_of, figures_of_all
    from tisa.analysis.page import page_of

    check_folder(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    tell = progress or (lambda step: None)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        for number, one in enumerate(found):
            folder = partial / "figures" / folder_name(found, number)
            for name, shows, figure in figures_of(one):
                tell(f"figure {name}")
                _save(figure, folder / name, shows)
        for name, shows, figure in figures_of_all(found, scores):
            tell(f"figure {name}")
            _save(figure, partial / "figures" / name, shows)
        tell("page")
        numbers = numbers_of_all(found, settings=settings, scores=scores)
        text = json.dumps(numbers, indent=1, ensure_ascii=False, allow_nan=False)
        (partial / "numbers.json").write_text(text + "\n", encoding="utf-8")
        (partial / "index.html").write_text(page_of(found, numbers), encoding="utf-8")
        return _move(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_folder(out: Path) -> None:
    """Refuse a place for the report that is no folder."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out: expected a folder, got the file {str(out)!r}")


def numbers_of_all(
    found: Sequence[Analysis],
    *,
    settings: Mapping[str, Any] | None = None,
    scores: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return what numbers.json holds: settings, and every number of every model."""
    import torch

    import tisa

    about = {"tisa": tisa.__version__, "torch": torch.__version__} | dict(settings or {})
    numbers: dict[str, Any] = {"about": about, "models": [numbers_of(one) for one in found]}
    if scores:
        numbers["scores"] = dict(scores)
    return numbers


def folder_name(found: Sequence[Analysis], number: int) -> str:
    """Return a folder for this model's figures: its name, numbered where two have the same."""
    name = re.sub(r"[^\w.-]+", "-", found[number].name)
    before = sum(one.name == found[number].name for one in found[:number])
    return f"{name}-{before + 1}" if before else name


def _save(figure: Any, path: Path, shows: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path.with_suffix(".png"), metadata={"Description": shows, "Software": None})
    figure.set_layout_engine("none")  # its places are found
    # Without a date, and with fixed names for its parts, the same figure is the same file.
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "tisa", "svg.fonttype": "none"}):
        figure.savefig(path.with_suffix(".svg"), metadata={"Description": shows, "Date": None})


def _move(partial: Path, out: Path) -> list[Path]:
    files = sorted(p.relative_to(partial) for p in partial.rglob("*") if p.is_file())
    for file in files:
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        os.replace(partial / file, out / file)
    return [out / file for file in files]
