"""`tisa convert`: give a Hugging Face model scores of the offset."""

import json
import sys
from pathlib import Path
from typing import Any, cast


def command(
    model: str,
    /,
    *,
    out: Path,
    positions: str = "replace",
    init: str = "fit",
    num_kernels: int = 5,
    fold: bool = True,
    shared: bool = False,
    text: Path | None = None,
    lengths: str = "",
    distil: float | None = None,
    report: bool = False,
    score: str = "",
    device: str = "cpu",
    seed: int = 0,
    as_json: bool = False,
    dry_run: bool = False,
) -> None:
    """Convert a Hugging Face model and save it like any other.

    Example: `tisa convert sentence-transformers/all-MiniLM-L6-v2 --out minilm-tisa --report`

    Args:
        model: A model's folder, or its name on the hub.
        out: The folder to write; a new one.
        positions: "replace" the position table, or "keep" it and add scores.
        init: "fit", "zero" or "reference".
        num_kernels: Kernels per head.
        fold: Keep what positions say besides the order.
        shared: ALBERT: one function for all passes.
        text: Text to fit on, one input per line; half is held out.
        lengths: Calibrate on pieces of so many tokens, as in 8-384.
        distil: Train the scores towards the original: minutes.
        report: Measure before and after; write report.html.
        score: A score of your own: module:function of (model, tokenizer).
        device: Where to compute.
        seed: Of pieces and distillation.
        as_json: Print the numbers as JSON.
        dry_run: Say what would be done; write nothing.
    """
    texts = _lines(text) if text is not None else None
    span = _range(lengths) if lengths else None
    from tisa import hf
    from tisa.hf.folder import convert_folder
    from tisa.hf.saving import load_stock

    if dry_run:
        stock, _ = load_stock(model)
        reason = hf.families.reason_against(stock, positions)
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
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("fit", total=None)
        done = convert_folder(
            model, out, positions=cast(Any, positions), init=cast(Any, init),
            num_kernels=num_kernels, fold=fold,
            shared=shared, texts=texts, lengths=span, distil_minutes=distil, device=device,
            seed=seed, measured=report or bool(score), score=_function(score) if score else None,
            progress=lambda at, of: bar.update(task, completed=at, total=of),
        )  # fmt: skip
    if report:
        from tisa.hf.report import write_report

        write_report(done, out / "report.html")
    _print(done, out, as_json)


def _print(done: Any, out: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"out": str(out), "before": done.before, "after": done.after}))
        return
    from rich.console import Console
    from rich.table import Table

    if done.before:
        table = Table("", "before", "after")
        for key, value in done.before.items():
            table.add_row(key, f"{value:.4f}", f"{done.after[key]:.4f}")
        Console().print(table)
    print(f"written to {out}")


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"--text: expected UTF-8 text, got something else in {path}") from None
    lines = [x.strip() for x in text.splitlines() if x.strip()]
    if not lines:
        raise ValueError(f"--text: {path} has no text in it; one input per line")
    return lines


def _range(lengths: str) -> tuple[int, int]:
    first, dash, last = lengths.partition("-")
    if not (dash and first.isdigit() and last.isdigit()):
        raise ValueError(f"--lengths: expected two numbers as in 8-384, got {lengths!r}")
    return int(first), int(last)


def _function(name: str) -> Any:
    from importlib import import_module

    module, colon, function = name.partition(":")
    if not (module and colon):
        raise ValueError(f"--score: expected module:function, got {name!r}")
    # An installed program does not look for modules where it is called, as `python` does.
    sys.path.append(str(Path.cwd()))
    try:
        found = getattr(import_module(module), function, None)
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{module}.".startswith(f"{missing.name}."):
            raise
        raise ValueError(
            f"--score: no module {missing.name} here or among the installed packages; run it "
            f"from the folder of {missing.name}.py"
        ) from None
    if not callable(found):
        raise ValueError(f"--score: {module} has no function {function!r}")
    return found
