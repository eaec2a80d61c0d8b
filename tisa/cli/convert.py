"""`tisa convert`: give a Hugging Face model scores of the offset."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from tisa.cli.options import KeywordsOf
from tisa.store import alone, check_new_folder

OWN = ("texts", "measured", "window", "progress", "finish")


def command(
    model: str,
    /,
    *,
    out: Path,
    text: Path | None = None,
    report: bool = False,
    score: str = "",
    window: int | None = None,
    sinks: Literal["ends", "global"] | None = None,
    as_json: bool = False,
    dry_run: bool = False,
    **options: Annotated[Any, KeywordsOf("tisa.hf.folder:convert_folder", without=OWN)],
) -> None:
    """Convert a Hugging Face model and save it like any other.

    Example: `tisa convert sentence-transformers/all-MiniLM-L6-v2 --out minilm-tisa --report`

    Args:
        model: A model's folder, or its name on the hub.
        out: The folder to write; a new one.
        text: Text to fit on, one input per line; half is held out.
        report: Measure before and after; write report.html.
        score: A score of your own: module:function of (model, tokenizer).
        window: How far a token sees, to both sides; by default without limit.
        sinks: With a window: the first and last token are seen by all (ends), and see all (global).
        as_json: Print the numbers as JSON.
        dry_run: Say what would be done; write nothing.
        **options: As `tisa.hf.folder.convert_folder` has them.
    """
    from tisa import hf
    from tisa.analysis.text import read_text
    from tisa.hf.conversion import Window
    from tisa.hf.folder import convert_folder
    from tisa.hf.saving import load_stock

    texts = None
    if text is not None:
        texts = [line.strip() for line in read_text(text).splitlines() if line.strip()]
    function = _function(score) if score else None
    check_new_folder(out)
    if dry_run:
        stock, *_ = load_stock(model, trust_remote_code=options["trust_remote_code"])
        reason = hf.families.reason_against(stock, options["positions"])
        if reason is not None:
            raise ValueError(f"{model} cannot be converted: {reason}")
        layers = len(hf.families.attention_modules(stock)) * hf.families.passes(stock)
        plan = {"model": model, "class": type(stock).__name__, "layers": layers, "out": str(out)}
        line = f"{model}: {plan['class']}, {layers} layers; would be written to {out}"
        print(json.dumps(plan) if as_json else line)
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with alone(out), Progress(console=console, transient=True) as bar:
        task = bar.add_task("fit", total=None)
        done = convert_folder(
            model, out, texts=texts, measured=function or report,
            window=None if window is None and sinks is None else Window(window, sinks),
            progress=lambda at, of: bar.update(task, completed=at, total=of),
            finish=_report if report else None, **options,
        )  # fmt: skip
    _print(done, out, as_json)


def _report(done: Any, folder: Path) -> None:
    from tisa.hf.card import seal
    from tisa.hf.report import write_report

    write_report(done, folder / "report.html")
    # Again, now that the page lies there.
    seal(done.converted, folder)


def _print(done: Any, out: Path, as_json: bool) -> None:
    if as_json:
        numbers = {"out": str(out), "before": done.before, "after": done.after}
        print(json.dumps(numbers | {"verdict": done.verdict.told()}))
        return
    from rich.console import Console
    from rich.table import Table

    if done.before:
        table = Table("", "before", "after")
        for key, value in done.before.items():
            table.add_row(key, f"{value:.4f}", f"{done.after[key]:.4f}")
        Console().print(table)
    for line in done.verdict.told():
        print(line)
    print(f"written to {out}")


def _function(name: str) -> Any:
    from importlib import import_module

    module, colon, function = name.partition(":")
    if not (module and colon):
        raise ValueError(f"score: expected module:function, got {name!r}")
    # An installed program does not look for modules where it is called, as `python` does.
    sys.path.append(str(Path.cwd()))
    try:
        found = getattr(import_module(module), function, None)
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{module}.".startswith(f"{missing.name}."):
            raise
        raise ValueError(
            f"score: no module {missing.name} here or among the installed packages; run it "
            f"from the folder of {missing.name}.py"
        ) from None
    if not callable(found):
        raise ValueError(f"score: {module} has no function {function!r}")
    return found
