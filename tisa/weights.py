"""A model's config and tensors, from disk or the hub: no model class, no forward pass, no code.

A folder, a bare weight file beside its `config.json`, or a name on the hub. Local paths never touch
the network. Pickles are read with `weights_only=True`, always: what wants to run code is refused.
So are links that lead out of the folder (the hub's cache, which is made of links into its own
`blobs`, has none), shards that are not those of their index, files that are not as their manifest
says, and sizes in the config that are beyond all that the weights hold.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tisa.packages import needed
from tisa.shapes import Tensor
from tisa.store import Damaged, manifest_of
from tisa.store.seals import FOLDER_REMEDY, damages_of
from tisa.store.tensor_files import TYPES

# In the order in which a folder is searched: what is safe to read first.
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# What the hub has beside the weights that is read here.
SMALL = ("config.json", "generation_config.json", "manifest.json", "*tokenizer*", "vocab*",
         "merges.txt", "*.model")  # fmt: skip
# Counts in a config, which are gone through one by one, and widths, which a tensor must have.
COUNT = re.compile(r"(layers?|blocks|groups|stages|depth|labels|experts|heads|kernels)$")
SIZE = re.compile(
    r"^(?!.*(window|chunk|cache|image|patch)).*(_size|dim|_embd|d_model|d_ff|_inner)$"
)
FLOATS = ("float16", "bfloat16", "float32", "float64")
# No model has more layers, passes or labels than tensors, but for ALBERT, or a tiny one.
MOST = 1000
# No published vocabulary or width is larger.
LARGEST = 2**21


class Entry(NamedTuple):
    """What a file says of a tensor: its shape and PyTorch's word for its type."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Checkpoint:
    """A model's name, its config (empty where there is none) and its tensors by name."""

    name: str
    config: Mapping[str, Any]
    tensors: "Tensors"
    folder: Path
    files: tuple[Path, ...]

    def __post_init__(self) -> None:
        self._check_numbers(self.config)

    def _check_numbers(self, values: Any, *, inner: bool = False) -> None:
        """Refuse sizes that the weights do not bear out, before anything is made in such a size."""
        for value in values if isinstance(values, list) else ():
            self._check_numbers(value, inner=True)
        for name, value in values.items() if isinstance(values, dict) else ():
            self._check_numbers(value, inner=True)
            count = COUNT.search(name)
            if isinstance(value, bool | str) or not (count or SIZE.search(name)):
                continue
            most = max(MOST, len(self.tensors) if count else self.numbers)
            # Of a part that is not here, a config has whatever size is the default.
            most = most if count or not inner else max(most, LARGEST)
            if isinstance(value, int | float) and not value <= most:
                raise ValueError(
                    f"{self.folder / 'config.json'}: {name} must be a number that the weights bear "
                    f"out, which have {len(self.tensors):,} tensors and {self.numbers:,} numbers, "
                    f"got {value:,}; take the config that belongs to them"
                )

    @cached_property
    def numbers(self) -> int:
        """Return how many numbers the tensors have altogether."""
        return sum(torch.Size(entry.shape).numel() for entry in self.tensors.entries.values())

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each weight file."""
        found = {}
        for path in self.files:
            with path.open("rb") as file:
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        return found

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


def read_checkpoint(model: str | Path, **hub: Any) -> Checkpoint:
    """Return config and tensors of a folder, a weight file, or a model on the hub.

    `hub` is for the hub's own download: revision, token, cache_dir.
    """
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
    return _read_folder(name, _fetch(name, hub))


def refuse_links(folder: Path, paths: Iterable[Path] | None = None) -> None:
    """Refuse a folder in which a file, or one of these paths, is a link to somewhere outside of it.

    A snapshot in the hub's cache is made of links: into `blobs` of the repository, and from there
    into `blobs` of the cache, where repositories share a file.
    """
    own = folder.resolve()
    places, repository = [own], own.parent.parent
    if own.parent.name == "snapshots" and repository.name.startswith("models--"):
        places += [repository / "blobs", repository.parent / "blobs"]
    for path in (p for p in folder.iterdir() if p.is_file()) if paths is None else paths:
        target = path.resolve()
        if not any(target.is_relative_to(place) for place in places):
            raise ValueError(
                f"{path}: a link out of the model's folder, to {target}, which is not followed; "
                "copy the file there, or name the folder in which it lies"
            )


def _read_file(path: Path) -> Checkpoint:
    if path.name.endswith(".index.json"):
        return _read_folder(name_of(path), path.parent, path.name)
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"model must be a weight file ({', '.join(SUFFIXES)}), got {str(path)!r}; "
            "a folder that holds config.json and the weights will do too"
        )
    return _checked(name_of(path), path.parent, (path,))


def _read_folder(name: str, folder: Path, index: str | None = None) -> Checkpoint:
    refuse_links(folder)
    for weights in WEIGHTS:
        shards = folder / (index or f"{weights}.index.json")
        if index is None and (folder / weights).is_file():
            return _checked(name, folder, (folder / weights,))
        if shards.is_file():
            return _checked(name, folder, *_shards(shards))
    there = sorted(p for p in folder.iterdir() if p.suffix == ".safetensors")
    if len(there) == 1:
        return _checked(name, folder, (there[0],))
    raise FileNotFoundError(
        f"model must have {' or '.join(WEIGHTS)} (or their .index.json) in {str(folder)!r}, "
        f"got {', '.join(sorted(p.name for p in folder.iterdir())[:8]) or 'an empty folder'}; "
        "name the weight file itself if it is called otherwise"
    )


def _checked(
    name: str, folder: Path, files: tuple[Path, ...], weight_map: Mapping[str, str] | None = None
) -> Checkpoint:
    """Return the checkpoint of these files, which are one model's, and as they were written."""
    refuse_links(folder)
    manifest = manifest_of(folder)
    if manifest is not None:
        for damage in damages_of(folder, manifest):
            raise Damaged(f"{folder}: {damage}; {FOLDER_REMEDY}")
    config = folder / "config.json"
    values = _read_json(config) if config.is_file() else {}
    return Checkpoint(name, values, Tensors(files, weight_map), folder, files)


def _shards(index: Path) -> tuple[tuple[Path, ...], Mapping[str, str]]:
    """Return the files that an index names, which lie beside it, and what it says is in them."""
    told = _read_json(index).get("weight_map")
    if not isinstance(told, dict) or not told:
        raise ValueError(f"{index}: expected a weight_map that names the shards, got none")
    files = sorted(set(map(str, told.values())))
    for file in files:
        if Path(file).name != file:
            raise ValueError(f"{index}: expected shards beside it, got {file!r}")
        if not (index.parent / file).is_file():
            raise FileNotFoundError(f"{index.parent / file}: this shard of the model is missing")
    return tuple(index.parent / file for file in files), told


class Tensors(Mapping[str, Tensor]):
    """The tensors of one model's files, each read when it is asked for: most never are."""

    def __init__(self, files: tuple[Path, ...], weight_map: Mapping[str, str] | None = None):
        self._files: dict[str, Mapping[str, Tensor]] = {}
        for path in files:
            tensors = _read_tensors(path)
            for name in tensors:
                if name in self._files:
                    raise ValueError(
                        f"{path}: {name!r} is in another shard too, and nothing says which of both "
                        "is the model's; download the shards again"
                    )
                self._files[name] = tensors
            for name, file in (weight_map or {}).items():
                if file == path.name and name not in tensors:
                    raise ValueError(
                        f"{path}: lacks {name!r}, which the index says is there; download the "
                        "shards and their index again"
                    )
        self.entries = {name: _entry(tensor) for name, tensor in self.unread().items()}

    def unread(self) -> dict[str, Any]:
        """Return what stands for each tensor without reading it: transformers takes it as one."""
        found: dict[str, Any] = {}
        for file in {id(file): file for file in self._files.values()}.values():
            found |= file.unread() if isinstance(file, _Safetensors) else file
        return found

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _entry(tensor: Any) -> Entry:
    if isinstance(tensor, Tensor):
        return Entry(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    dtype = tensor.get_dtype()
    return Entry(tuple(tensor.get_shape()), TYPES.get(dtype, (0, dtype))[1])


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
    """The tensors of one file."""

    def __init__(self, path: Path) -> None:
        safetensors = needed("safetensors", f"reading {path}", "tisa[analysis]")
        # Opened for each tensor, whose part of the map then goes when the tensor does.
        self._open = partial(safetensors.safe_open, path, "pt")
        try:
            with self._open() as file:
                self._names = dict.fromkeys(file.keys())
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

    def unread(self) -> dict[str, Any]:
        """Return what has each tensor's shape and type, and its numbers when they are taken."""
        file = self._open()
        return {name: file.get_slice(name) for name in self._names}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


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


def _fetch(name: str, hub: Mapping[str, Any]) -> Path:
    """Return the folder in which the hub's copy of this model lies."""
    what = f"{name!r}, which is no local file or folder but may be a name on the hub,"
    download = needed("huggingface_hub", what, "tisa[analysis]").snapshot_download
    try:
        # A repository may hold the same weights twice: take the safe ones where they are.
        folder = download(name, allow_patterns=[*SMALL, "*.safetensors*"], **hub)
        if not list(Path(folder).glob("*.safetensors")):
            folder = download(name, allow_patterns=[*SMALL, "pytorch_model*"], **hub)
    except Exception as failed:
        # What the hub's client raises differs between its versions: network, offline, 404, gated.
        reason = " ".join(str(failed).split()) or type(failed).__name__
        raise OSError(
            f"model: {name!r} is no local file or folder, and the hub did not give it: "
            f"{reason[:200]}"
        ) from None
    return Path(folder)
