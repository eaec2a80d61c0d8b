"""What makes a sentence encoder of a transformer: files beside it, in a folder or on the hub."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
)

from tisa.weights import refuse_links

LIST = "modules.json"
FILES = (LIST, "config_sentence_transformers.json", "sentence_bert_config.json")


def sentence_folder(name: str) -> Path | None:
    """Return where its files lie, the folder or the hub's cache; None if it is no sentence encoder.

    What the cache lacks is downloaded, as transformers does it for the model itself.
    """
    if Path(name).is_dir():
        return Path(name) if (Path(name) / LIST).is_file() else None
    try:
        listed = Path(hf_hub_download(name, LIST))
    except LocalEntryNotFoundError:
        # Or the cache knows that the hub has no such file.
        if try_to_load_from_cache(name, LIST) is None:
            warnings.warn(
                f"{name}: {LIST} is not in the hub's cache, and the hub is not reached; if this is "
                f"a sentence encoder, get all of it first (hf download {name}), or its pooling is "
                "left out",
                stacklevel=3,
            )
        return None
    except (EntryNotFoundError, HFValidationError):
        return None
    modules = _modules(listed.parent)
    wanted = [*FILES, *(f"{module['path']}/*" for module in modules)]
    try:
        # The list's own revision: of one moment with it.
        folder = Path(snapshot_download(name, revision=listed.parent.name, allow_patterns=wanted))
    except LocalEntryNotFoundError:
        folder = listed.parent
    for module in modules:
        # Normalize has no settings, and the hub no empty folders.
        if not (folder / module["path"]).is_dir() and not module["type"].endswith("Normalize"):
            raise ValueError(
                f"{name}: {module['path']} of this sentence encoder is not in the hub's cache, and "
                f"the hub is not reached; get all of it first: hf download {name}"
            )
    return folder


def copy_sentence_files(folder: Path, out: Path, *, max_seq_length: int | None = None) -> None:
    """Copy them beside a converted model, with another limit to the length of its inputs."""
    modules = _modules(folder)
    parts = [folder / module["path"] for module in modules]
    refuse_links(folder)
    refuse_links(folder, [path for part in parts for path in (part, *part.rglob("*"))])
    for name in FILES:
        if (folder / name).is_file():
            shutil.copy(folder / name, out / name)
    for module in modules:
        (out / module["path"]).mkdir(parents=True, exist_ok=True)
        if (folder / module["path"]).is_dir():
            shutil.copytree(folder / module["path"], out / module["path"], dirs_exist_ok=True)
    limits = out / "sentence_bert_config.json"
    if max_seq_length is not None and limits.is_file():
        settings = json.loads(limits.read_text(encoding="utf-8"))
        settings["max_seq_length"] = max_seq_length
        limits.write_text(json.dumps(settings), encoding="utf-8")


def _modules(folder: Path) -> list[dict[str, Any]]:
    """Return the modules that have a folder of their own."""
    listed: list[dict[str, Any]] = json.loads((folder / LIST).read_text(encoding="utf-8"))
    found = [module for module in listed if module.get("path")]
    for module in found:
        path = Path(module["path"])
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{folder / LIST}: {path} is no folder inside the model's own")
    return found
