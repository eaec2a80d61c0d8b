"""Finished chapters, kept in a folder: an interrupted demo goes on where it stopped."""

import json
import shutil
from pathlib import Path
from typing import Any

from tisa import store
from tisa_lab.demo.settings import AGAIN

KEY = "made_with.json"


class Parts:
    """The folder of finished chapters, all of one model and one set of settings."""

    def __init__(self, folder: Path, made_with: dict[str, Any], *, fresh: bool = False) -> None:
        self.folder = folder
        made_with = json.loads(json.dumps(made_with))
        begun = not store.is_unused(folder)
        self.begun_anew = begun and (fresh or self._read(KEY) != made_with)
        if self.begun_anew:
            self._remove()
        store.write_json(folder / KEY, made_with)

    def read(self, chapter: str) -> dict[str, Any] | None:
        """Return what a finished chapter found; None where it is not finished."""
        return self._read(f"{chapter}.json")

    def write(self, chapter: str, found: dict[str, Any]) -> None:
        """Keep what a chapter found."""
        store.write_json(self.folder / f"{chapter}.json", found, indent=None)

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self.folder / name
        return store.read_json(path, remedy=AGAIN) if path.is_file() else None

    def _remove(self) -> None:
        if not (self.folder / KEY).is_file():
            raise ValueError(
                f"out must be a folder of the demo's own, got files in {self.folder} that the "
                "demo did not write; name another folder"
            )
        shutil.rmtree(self.folder)
