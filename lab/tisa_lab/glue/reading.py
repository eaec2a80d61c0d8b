"""Rows of a task, from a folder of official TSV files or from the hub."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tisa.packages import needed
from tisa_lab.glue.tasks import Task

# The name under which the hub has the data.
HUB = "nyu-mll/glue"


class Example(NamedTuple):
    """One row: a text or a pair of texts, and the number of its class or its score."""

    texts: tuple[str, ...]
    label: float


class Data(NamedTuple):
    """All rows of a task: for training, and by the suffix of the metric for each dev set."""

    train: list[Example]
    dev: dict[str, list[Example]]
    # Rows that the official files have and nobody can read (QQP).
    left_out: int

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that differ where any row differs."""
        digest = hashlib.sha256()
        for name, rows in (("train", self.train), *self.dev.items()):
            digest.update(f"{name}\x1d".encode())
            for row in rows:
                digest.update(("\x1f".join(row.texts) + f"\x1e{row.label!r}\x1d").encode())
        return digest.hexdigest()[:16]


def read(task: Task, data_dir: str | Path | None = None) -> Data:
    """Return a task's rows: from `data_dir` where one is given, else from the hub.

    `data_dir` holds a folder for each task, or is the task's folder itself.
    """
    if data_dir is None:
        return _from_hub(task)
    folder = _folder(task, Path(data_dir))
    train, left_out = _file(task, folder / task.train)
    dev = {}
    for suffix, name, _ in task.dev:
        dev[suffix], more = _file(task, folder / name)
        left_out += more
    return Data(train, dev, left_out)


def _folder(task: Task, data_dir: Path) -> Path:
    for folder in (data_dir / task.folder, data_dir):
        if (folder / task.train).is_file():
            missing = [name for _, name, _ in task.dev if not (folder / name).is_file()]
            if missing:
                raise FileNotFoundError(
                    f"{task.title}: {folder} has {task.train} but not {', '.join(missing)}; "
                    "the official archive has all of them"
                )
            return folder
    raise FileNotFoundError(
        f"{task.title}: no {task.folder}/{task.train} in {data_dir}; give the folder that holds "
        "the folders of the official GLUE archives (data_dir)"
    )


def _file(task: Task, path: Path) -> tuple[list[Example], int]:
    """Return the examples of one TSV file, and how many rows ended early."""
    lines = _lines(path)
    columns = _columns(task, path, next(lines, (0, []))[1]) if _has_header(task) else None
    wanted = [*task.texts, task.label]
    places = [i if columns is None else columns[str(i)] for i in wanted]
    needed = max(int(i) for i in places) + 1 if columns is None else len(columns)
    found, left_out = [], 0
    for number, fields in lines:
        if len(fields) != needed:
            if task.may_have_short_rows and len(fields) < needed:
                left_out += 1
                continue
            raise ValueError(
                f"{path}, line {number}: expected {needed} columns between tabs, got {len(fields)}"
            )
        *texts, label = (fields[int(i)] for i in places)
        found.append(Example(tuple(texts), _label(task, label, f"{path}, line {number}")))
    if not found:
        raise ValueError(f"{path}: expected rows of {task.title}, got none")
    return found, left_out


def _has_header(task: Task) -> bool:
    return isinstance(task.label, str)


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the fields of each line that is not blank."""
    try:
        # Fields hold bare quotation marks, and no line break but the row's own.
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        raise ValueError(
            f"{path}: expected UTF-8, got the byte 0x{wrong.object[wrong.start]:02x} at place "
            f"{wrong.start}; convert the file, for example with iconv"
        ) from None
    if not text.strip():
        raise ValueError(f"{path}: the file is empty")
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if line:
            yield number, line.split("\t")


def _columns(task: Task, path: Path, header: list[str]) -> dict[str, int]:
    columns = {name: place for place, name in enumerate(header)}
    missing = [str(name) for name in (*task.texts, task.label) if str(name) not in columns]
    if missing:
        raise ValueError(
            f"{path}: expected the columns {', '.join(map(str, (*task.texts, task.label)))} in its "
            f"first line, got {', '.join(header[:12])}: {', '.join(missing)} is missing"
        )
    return columns


def _label(task: Task, label: str, where: str) -> float:
    if not task.is_regression:
        if label not in task.labels:
            raise ValueError(
                f"{where}: expected a label among {', '.join(task.labels)}, got {label!r}"
            )
        return float(task.labels.index(label))
    try:
        score = float(label)
    except ValueError:
        score = float("nan")
    if not task.low <= score <= task.high:
        raise ValueError(
            f"{where}: expected a score between {task.low:g} and {task.high:g}, got {label!r}"
        )
    return score


def _from_hub(task: Task) -> Data:
    if task.hub is None:
        raise ValueError(f"{task.title} is not on the hub; give the folder of its files (data_dir)")
    datasets = needed("datasets", "GLUE from the hub (data_dir is a folder of files)", "tisa-lab")
    loaded: Any = datasets.load_dataset(HUB, task.hub)
    dev = {suffix: _split(task, loaded[split], split) for suffix, _, split in task.dev}
    return Data(_split(task, loaded["train"], "train"), dev, 0)


def _split(task: Task, split: Any, name: str) -> list[Example]:
    """Return the examples of one split of the hub, in which classes are numbers already."""
    missing = sorted({*task.hub_texts, "label"} - set(split.column_names))
    if missing:
        raise ValueError(
            f"{HUB}, {task.hub}, {name}: expected a column {', '.join(missing)}, "
            f"got {', '.join(split.column_names)}"
        )
    found = []
    for row in split:
        label = float(row["label"])
        if not task.is_regression and int(label) not in range(len(task.labels)):
            raise ValueError(f"{HUB}, {task.hub}, {name}: the class {label:g} is unknown")
        found.append(Example(tuple(row[text] for text in task.hub_texts), label))
    return found
