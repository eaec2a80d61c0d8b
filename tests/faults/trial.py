"""One try: a command in a process of its own, what it says, and what it leaves."""

import fnmatch
import hashlib
import json
import os
import re
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Leaves = dict[str, Any]
PATIENCE = 300
REMEDY = re.compile(r"; |\b(start|make|name|remove|take|wait|free|upgrade|download|try)\b")
# Of times, and of checksums of what holds times, two runs may have the same by chance; a commit
# may be made while the campaign runs. How many cells of GLUE were trained side by side is another
# number where one of them was done before.
TIMED = re.compile(r"second|speed|date|sha256|size|blocks|commit| code\b|surroundings stacked$")
SECONDS = re.compile(r"\d (s|ms|min|seconds)\b")
# In a page or a table: where and when it was made, and the cells under "time".
MADE = re.compile(r"\d{4}-\d\d-\d\d, commit \w+")
CELL = re.compile(r"\s*(?:\||</?t[dh]>)\s*")
TEXTS = (".md", ".html", ".tex", ".csv", ".py", ".txt", ".svg")


@dataclass(frozen=True)
class Answer:
    """How a process ended, and what it said."""

    code: int
    said: str

    def told(self, codes: tuple[int, ...] = (2,)) -> str:
        """Return "" where a mistake was told as it should be, else what was wrong with that."""
        lines = [line for line in self.said.splitlines() if line.strip()]
        # Of a sweep what is said of its jobs.
        about = [line for line in lines if line.startswith("failed: ")] or lines[-1:]
        if self.code not in codes or "Traceback (most recent call last)" in self.said:
            return f"code {self.code}: {self.said[-400:]}"
        if not all(map(REMEDY.search, about)):
            return f"no remedy: {self.said[-400:]}"
        return ""


def answer(action: Callable[[], None], folder: Path, said: Path) -> Answer:
    """Return what a process answers that does this in the folder; its output lies in `said`."""
    return ended(begun(action, folder, said), said)


def ended(child: int, said: Path) -> Answer:
    """Return what a process answered that was begun, at its end."""
    status = os.waitpid(child, 0)[1]
    return Answer(os.waitstatus_to_exitcode(status), said.read_text(errors="replace"))


def begun(action: Callable[[], None], folder: Path, said: Path) -> int:
    """Begin a process, and return its number."""
    child = os.fork()
    if not child:
        code = 1
        try:
            file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.chdir(folder)
            signal.alarm(PATIENCE)
            action()
            code = 0
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
        except BaseException:
            traceback.print_exc()
        finally:
            import sys

            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return child


def leaves(folder: Path, patterns: tuple[str, ...]) -> Leaves:
    """Return every value that the files hold: of JSON each, of text each line, else a checksum."""
    found: Leaves = {}
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)) if ".." not in pattern else [folder / pattern]:
            if path.is_file() and not path.name.startswith("."):
                found |= _of_file(path, os.path.relpath(path, folder))
            elif path.is_dir():
                found |= leaves(folder, (f"{path.relative_to(folder)}/*",))
    return found


def _of_file(path: Path, name: str) -> Leaves:
    content = path.read_bytes()
    try:
        if path.suffix == ".json":
            return _flat(json.loads(content), name)
        if path.suffix == ".jsonl":
            lines = [json.loads(line) for line in content.splitlines()]
            # In the order in which they were done, which a second start changes.
            lines.sort(key=lambda record: str([record.get(k) for k in ("key", "cell", "config")]))
            return _flat(lines, name)
        if path.suffix in TEXTS:
            return {f"{name}:{n}": line for n, line in enumerate(_lines(content.decode()))}
    except ValueError:
        pass
    return {name: hashlib.sha256(content).hexdigest()}


def _lines(text: str) -> Iterator[str]:
    """Yield a text's lines without date, commit and measured times."""
    times = None
    for line in text.splitlines():
        cells = CELL.split(line)
        if "time" in cells:
            times = cells.index("time"), len(cells)
        elif "<th>" in line:
            times = None
        elif times and len(cells) == times[1]:
            cells[times[0]] = "measured"
            line = "|".join(cells)
        yield MADE.sub("made", line)


def _flat(value: Any, name: str) -> Leaves:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found: Leaves = {}
    for key, part in inner:
        place = f"{name} {key}"
        found |= _flat(part, place) if isinstance(part, dict | list) else {place: part}
    return found


@dataclass(frozen=True)
class Reference:
    """What a command leaves without faults; where two runs differ by themselves, nothing counts."""

    values: Leaves
    free: frozenset[str]

    @classmethod
    def of(cls, runs: list[Leaves]) -> "Reference":
        """Return what runs have in common."""
        keys = set().union(*runs)
        differ = {k for k in keys if any(run.get(k) != runs[0].get(k) for run in runs)}
        return cls(runs[0], frozenset(differ))

    def differences(self, found: Mapping[str, Any]) -> list[str]:
        """Return what is not as it is without faults."""
        keys = (self.values.keys() | found.keys()) - self.free
        other = (k for k in keys if k not in found or self.values.get(k) != found[k])
        return sorted(
            k for k in other if not (TIMED.search(k) or SECONDS.search(str(found.get(k))))
        )


def spread(count: int, most: int) -> list[int]:
    """Return at most so many of the numbers from 1 to `count`, evenly, first and last too."""
    if count <= most:
        return list(range(1, count + 1))
    if most == 1:
        return [(count + 1) // 2]
    return sorted({1 + round(i * (count - 1) / (most - 1)) for i in range(most)})


def matches(name: str, patterns: list[str]) -> bool:
    """Return whether a name is one of those asked for; all are where none is."""
    return not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
