"""A model's config and tensors, from disk or the hub: no model class, no forward pass, no code.

A folder, a bare weight file beside its `config.json`, or a name on the hub. Local paths never touch
the network. Pickles are read with `weights_only=True`, always: what wants to run code is refused.
"""

import json
import os
import re
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tisa.packages import needed
from tisa.shapes import Tensor

# In the order in which a folder is searched: what is safe to read first.
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Checkpoint:
    """A model's name, its config (empty where there is none) and its tensors by name."""

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    folder: Path

    def read(self, name: str) -> Tensor:
        """Return a tensor in float32; one that holds no finite numbers is refused."""
        tensor = self.tensors[name].detach()
        if not tensor.is_floating_point():
            raise ValueError(
                f"{self.name}: {name!r} holds {tensor.dtype}, quantised weights; "
                "analyse the model that they were made from"
            )
        tensor = tensor.to(torch.float32)
        # `isfinite` of a table of words would copy it; NaN passes into both ends.
        if tensor.numel() and not all(end.isfinite() for end in tensor.aminmax()):
            raise ValueError(
                f"{self.name}: {name!r} holds numbers that are not finite (NaN or infinite); "
                "its training broke down or the file is damaged, take another checkpoint"
            )
        # Read again: of what was mapped to be checked nothing stays in memory.
        return self.tensors[name].detach().to(torch.float32)


def name_of(model: str | Path) -> str:
    """Return what a model is called in numbers and figures, without reading it."""
    path = Path(model).expanduser()
    if path.is_dir():
        return _short_name(path)
    if not path.is_file():
        return str(model)
    plain = path.name in WEIGHTS or path.name.endswith(".index.json")
    return _short_name(path.parent) if plain else path.stem


def read_checkpoint(model: str | Path) -> Checkpoint:
    """Return config and tensors of a folder, a weight file, or a model on the hub."""
    path = Path(model).expanduser()
    if path.is_dir():
        return _read_folder(name_of(path), path)
    if path.is_file():
        return _read_file(path)
    name = str(model)
    if path.suffix in SUFFIXES or name.startswith((".", "/", "~")) or not HUB_NAME.fullmatch(name):
        raise FileNotFoundError(
            f"model must be a folder, a weight file or a name on the hub, got {name!r}, "
            "and there is no such file"
        )
    return _read_folder(name, _fetch(name))


def _read_file(path: Path) -> Checkpoint:
    if path.name.endswith(".index.json"):
        return _read_folder(name_of(path), path.parent, path.name)
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"model must be a weight file ({', '.join(SUFFIXES)}), got {str(path)!r}; "
            "a folder that holds config.json and the weights will do too"
        )
    return Checkpoint(name_of(path), _read_config(path.parent), _read_tensors(path), path.parent)


def _read_folder(name: str, folder: Path, index: str | None = None) -> Checkpoint:
    config = _read_config(folder)
    for weights in WEIGHTS:
        shards = folder / (index or f"{weights}.index.json")
        if index is None and (folder / weights).is_file():
            return Checkpoint(name, config, _read_tensors(folder / weights), folder)
        if shards.is_file():
            return Checkpoint(name, config, _read_shards(shards), folder)
    there = sorted(p for p in folder.iterdir() if p.suffix == ".safetensors")
    if len(there) == 1:
        return Checkpoint(name, config, _read_tensors(there[0]), folder)
    raise FileNotFoundError(
        f"model must have {' or '.join(WEIGHTS)} (or their .index.json) in {str(folder)!r}, "
        f"got {', '.join(sorted(p.name for p in folder.iterdir())[:8]) or 'an empty folder'}; "
        "name the weight file itself if it is called otherwise"
    )


def _read_shards(index: Path) -> Mapping[str, Tensor]:
    files = sorted(set(_read_json(index).get("weight_map", {}).values()))
    if not files:
        raise ValueError(f"{index}: expected a weight_map that names the shards, got none")
    shards: list[Mapping[str, Tensor]] = []
    for file in files:
        if Path(file).name != file:
            raise ValueError(f"{index}: expected shards beside it, got {file!r}")
        if not (index.parent / file).is_file():
            raise FileNotFoundError(f"{index.parent / file}: this shard of the model is missing")
        shards.append(_read_tensors(index.parent / file))
    return ChainMap(*shards)  # type: ignore[arg-type]


def _read_tensors(path: Path) -> Mapping[str, Tensor]:
    """Return the file's tensors, mapped from disk where the format allows."""
    if path.suffix == ".safetensors":
        return _Safetensors(path)
    try:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as no_zip:
            # Files older than torch 1.6 are no archives and cannot be mapped.
            if "mmap" not in str(no_zip):
                raise
            found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as broken:
        if "weights_only" in str(broken) or "WeightsUnpickler" in str(broken):
            raise ValueError(
                f"{path}: refused, because this pickle holds more than tensors (it may want to run "
                "code); save the model as .safetensors where you trust it"
            ) from None
        raise ValueError(
            f"{path}: not a readable weight file, it is truncated or corrupted; download it again"
        ) from None
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict) or not any(isinstance(t, Tensor) for t in found.values()):
        raise ValueError(f"{path}: expected tensors by name, got a {type(found).__name__}")
    return {str(name): t for name, t in found.items() if isinstance(t, Tensor)}


class _Safetensors(Mapping[str, Tensor]):
    """The tensors of one file, each read when it is asked for: most never are."""

    def __init__(self, path: Path) -> None:
        safetensors = needed("safetensors", f"reading {path}", "tisa[analysis]")
        # Opened for each tensor, whose part of the map then goes when the tensor does.
        self._open = partial(safetensors.safe_open, path, "pt")
        try:
            with self._open() as file:
                self._names = list(file.keys())
        except safetensors.SafetensorError as broken:
            raise ValueError(
                f"{path}: not a readable weight file, it is truncated or corrupted "
                f"({str(broken).strip()}); download it again"
            ) from None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        with self._open() as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _read_config(folder: Path) -> dict[str, Any]:
    config = folder / "config.json"
    return _read_json(config) if config.is_file() else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as broken:
        raise ValueError(f"{path}: not readable as JSON ({broken}); download it again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got a {type(found).__name__}")
    return found


def _short_name(folder: Path) -> str:
    """Return the folder's name, or of a folder that is just called "model" its parent's."""
    folder = Path(os.path.abspath(folder))  # a link keeps the name that it was given
    while folder.name in ("model", "checkpoint", "") and folder.parent != folder:
        folder = folder.parent
    return folder.name


def _fetch(name: str) -> Path:
    """Return the folder in which the hub's copy of this model lies."""
    what = f"{name!r}, which is no local file or folder but may be a name on the hub,"
    download = needed("huggingface_hub", what, "tisa[analysis]").snapshot_download
    small = ["config.json", "*tokenizer*", "vocab*", "merges.txt", "spiece.model"]
    try:
        # A repository may hold the same weights twice: take the safe ones where they are.
        folder = download(name, allow_patterns=[*small, "*.safetensors*"])
        if not list(Path(folder).glob("*.safetensors")):
            folder = download(name, allow_patterns=[*small, "pytorch_model*"])
    except Exception as failed:
        # What the hub's client raises differs between its versions: network, offline, 404, gated.
        reason = " ".join(str(failed).split()) or type(failed).__name__
        raise OSError(
            f"model: {name!r} is no local file or folder, and the hub did not give it: "
            f"{reason[:200]}"
        ) from None
    return Path(folder)
