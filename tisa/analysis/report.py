"""The folder that `tisa analyze` writes: page, figures and numbers, whole or not at all."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tisa import store
from tisa.analysis.numbers import numbers_of
from tisa.analysis.whole import Analysis

PARTS = {"index.html", "numbers.json", "figures", store.MANIFEST}


def write_report(
    found: Sequence[Analysis],
    out: Path,
    *,
    scores: Mapping[str, float] | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[Path]:
    """Return the files of the report: index.html, numbers.json, and every figure as PNG and SVG.

    A report that was there before gives way to it, whole.
    """
    import tisa
    from tisa.analysis.figures import figures_of, figures_of_all
    from tisa.analysis.page import page_of

    check_folder(out)
    tell = progress or (lambda step: None)
    with store.new_folder(out, replace=True) as folder:
        for number, one in enumerate(found):
            for name, shows, figure in figures_of(one):
                tell(f"figure {name}")
                _save(figure, folder / "figures" / folder_name(found, number) / name, shows)
        for name, shows, figure in figures_of_all(found, scores):
            tell(f"figure {name}")
            _save(figure, folder / "figures" / name, shows)
        tell("page")
        numbers = numbers_of_all(found, settings=settings, scores=scores)
        text = json.dumps(numbers, indent=1, ensure_ascii=False, allow_nan=False)
        (folder / "numbers.json").write_text(text + "\n", encoding="utf-8")
        (folder / "index.html").write_text(page_of(found, numbers), encoding="utf-8")
        identity = {"models": ", ".join(one.name for one in found), store.CODE: tisa.__version__}
        store.seal_folder(folder, "analysis", identity)
    return sorted(path for path in out.rglob("*") if path.is_file())


def check_folder(out: Path) -> None:
    """Refuse a place for the report that is no folder, or a folder with files of others."""
    store.check_new_folder(out, own=("numbers.json",))
    others = {path.name for path in out.iterdir()} - PARTS if out.is_dir() else set()
    if others:
        raise ValueError(
            f"out must be a new folder or one with a report in it, got {str(out)!r} with "
            f"{min(others)!r} in it; name another folder"
        )


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
