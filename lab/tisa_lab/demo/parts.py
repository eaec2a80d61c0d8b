"""Finished chapters, kept in a folder: an interrupted demo goes on where it stopped."""

import json
import shutil
from pathlib import Path
from typing import Any

from tisa import store

KEY = "made_with.json"


class Parts:
    """The folder of finished chapters, all of one model and one set of settings."""

    def __init__(self, folder: Path, made_with: dict[str, Any], *, fresh: bool = False) -> None:
        self.folder = folder
        key = json.dumps(made_with, sort_keys=True, ensure_ascii=False)
        self.begun_anew = folder.is_dir() and (fresh or self._text(KEY) != key)
        if self.begun_anew:
            self._remove()
        store.write_text(folder / KEY, key)

    def read(self, chapter: str) -> dict[str, Any] | None:
        """Return what a finished chapter found; None where it is not finished."""
        text = self._text(f"{chapter}.json")
        return None if text is None else json.loads(text)

    def write(self, chapter: str, found: dict[str, Any]) -> None:
        """Keep what a chapter found."""
        text = json.dumps(found, ensure_ascii=False, allow_nan=False)
        store.write_text(self.folder / f"{chapter}.json", text)

    def _text(self, name: str) -> str | None:
        path = self.folder / name
        return path.read_text(encoding="utf-8") if path.is_file() else None

    def _remove(self) -> None:
        if self._text(KEY) is None and any(self.folder.iterdir()):
            raise ValueError(
                f"out must be a folder of the demo's own, got files in {self.folder} that the "
                "demo did not write; name another folder"
            )
        shutil.rmtree(self.folder)
