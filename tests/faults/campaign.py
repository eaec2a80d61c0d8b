"""Every fault on purpose against every command that writes; the record of what came of it.

    python tests/faults/campaign.py --out record.json [--seconds 60] [--only 'pretrain*' …]

Linux and a C compiler are needed. Each try is a process of its own, forked from this one, which has
imported everything. What comes of a try is one of

    harmless    what is left, or read, is what it is without faults, and nobody has to know
    detected    one sentence with a remedy and exit code 2; the same command, started again without
                the fault, leaves what it leaves without faults
    lost        anything else: wrong without a word, a traceback, a second start that fails
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import shim

if __name__ == "__main__":
    shim.begin_again_with_shim(sys.argv)

import torch

import disk
from commands import COMMANDS, Action, Command, flip, run
from flips import READS, Read, files_of, places
from trial import Answer, Leaves, Reference, answer, begun, ended, leaves, matches, spread

FAULTS = {fault.name: fault for fault in shim.FAULTS}
POWER = {f"power cut, lost is {loss}": loss for loss in disk.LOSSES}
ENDED = "power cut after its end"
WRITERS, CLOCK, FOREIGN = "two writers at once", "a clock that goes backwards", "a foreign file"
FLIP = "a flipped bit: "


@dataclass(frozen=True)
class Try:
    """One fault at one place of one command, or of the files that something reads."""

    what: str
    fault: str
    k: int = 0
    file: str = ""


@dataclass(frozen=True)
class Outcome:
    """What came of it: "not met" where the k-th call did not happen."""

    tried: Try
    outcome: str
    why: str = ""


@dataclass(frozen=True)
class Ready:
    """A command, its inputs, what it leaves without faults, and what it does on the way."""

    command: Command
    inputs: Path
    reference: Reference
    counts: dict[str, int]
    log: Path
    seconds: float
    # Whether the log, done again, gives what really lies there: nothing has passed unseen.
    complete: bool
    # What is read before and after, where something reads it.
    old_and_new: tuple[Any, ...]

    @property
    def steps(self) -> list[disk.Step]:
        """Return what it does, in its order."""
        return list(disk.steps(self.log.read_bytes()))


@dataclass(frozen=True)
class Readable:
    """Files that were made, foreign ones of the same names, and what is read without faults."""

    read: Read
    inputs: Path
    foreign: Path | None
    numbers: Any
    seconds: float


class Workshop:
    """A place for tries."""

    def __init__(self, place: Path) -> None:
        self.place, self.shim = place, shim.Native()
        self.number = 0

    def fresh(self, inputs: Path | None) -> Path:
        """Return a new folder, with a copy of the inputs."""
        self.number += 1
        folder = self.place / f"{os.getpid()}-{self.number}" / "here"
        if inputs is None:
            folder.mkdir(parents=True)
        else:
            shutil.copytree(inputs, folder)
        return folder

    def made(self, steps: tuple[Action, ...]) -> Path:
        """Return a folder in which this was done."""
        folder = self.fresh(None)
        for step in steps:
            done = answer(lambda step=step: run(step), folder, folder.parent / "said")
            assert done.code == 0, done
        return folder

    def start(self, action: Action, folder: Path, **armed: Any) -> Answer:
        """Return what a command answers, with a fault or without."""

        def act() -> None:
            if armed:
                self.shim.arm(folder, **armed)
            run(action)

        return answer(act, folder, folder.parent / "said")

    def ready(self, command: Command) -> Ready:
        """Make a command's inputs, and run it three times without faults."""
        inputs = self.made(command.before)
        found: list[Leaves] = []
        took: list[float] = []
        for logged in (False, False, True):
            folder = self.fresh(inputs)
            log = folder.parent / "log"
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if logged else -1
            began = time.perf_counter()
            done = self.start(command.action, folder, log=file)
            took.append(time.perf_counter() - began)
            assert done.code == 0, (command.name, done)
            found.append(leaves(folder, command.result))
            assert found[-1], command.name
        reference = Reference.of(found)
        counts = self.shim.counts()
        again = disk.Disk(inputs)
        for step in disk.steps(log.read_bytes()):
            again.do(step)
        complete = again.after(disk.LOSSES[2]) == disk.read(folder)
        read = command.read
        both = (printed(self.start(read, place)) for place in (inputs, folder)) if read else ()
        return Ready(command, inputs, reference, counts, log, min(took), complete, tuple(both))

    def readable(self, read: Read) -> Readable:
        """Make the files that are read."""
        inputs = self.made(read.before)
        foreign = self.made(read.foreign) if read.foreign else None
        began = time.perf_counter()
        done = self.start(read.read, self.fresh(inputs))
        assert done.code == 0, (read.name, done)
        took = time.perf_counter() - began
        return Readable(read, inputs, foreign, printed(done), took)


def printed(done: Answer) -> Any:
    """Return the numbers that were printed, as JSON in a line of its own."""
    for line in reversed(done.said.splitlines()):
        if line.startswith(("{", "[")):
            return json.loads(line)
    return None


def judge(shop: Workshop, ready: Ready, folder: Path, first: Answer | None) -> tuple[str, str]:
    """Return what came of a fault, from how its process ended (None: it was cut off) on."""
    command, reference = ready.command, ready.reference
    if first is None or first.code == 0:
        other = reference.differences(leaves(folder, command.result))
        if not other:
            return "harmless", ""
        if first is not None:
            return "lost", f"silent: {other[:3]}"
    elif wrong := first.told(command.codes):
        return "lost", wrong
    if command.read:
        left = shop.start(command.read, folder)
        if left.code and (wrong := left.told()):
            return "lost", f"what is left: {wrong}"
        if not left.code and printed(left) not in ready.old_and_new:
            return "lost", "what is left is neither the old nor the new, without a word"
    second = shop.start(command.action, folder)
    # A place that is written already, and whole, may be refused.
    done = second.code == 0 or not (
        second.told() or reference.differences(leaves(folder, command.result))
    )
    if not done:
        return "lost", f"second start, code {second.code}: {second.said[-400:]}"
    other = reference.differences(leaves(folder, command.result))
    if other:
        return "lost", f"second start, other: {other[:3]}"
    return ("harmless" if first is None else "detected"), ""


def fail(shop: Workshop, ready: Ready, tried: Try) -> tuple[str, str]:
    """Let the k-th call of a kind fail."""
    folder = shop.fresh(ready.inputs)
    first = shop.start(ready.command.action, folder, fault=FAULTS[tried.fault], k=tried.k)
    return judge(shop, ready, folder, first) if shop.shim.fired() else ("not met", "")


def cut_power(shop: Workshop, ready: Ready, tried: Try) -> tuple[str, str]:
    """Leave of the first k steps what a disk has after a power cut."""
    there, loss = disk.Disk(ready.inputs), POWER[tried.fault]
    for step in ready.steps[: tried.k]:
        there.do(step)
    folder = shop.fresh(None)
    folder.rmdir()
    disk.write(there.after(loss), folder)
    return judge(shop, ready, folder, None)


def cut_power_after(shop: Workshop, ready: Ready, tried: Try) -> tuple[str, str]:
    """Leave what a disk has after a power cut when the command said that it was done."""
    there = disk.Disk(ready.inputs)
    for step in ready.steps:
        there.do(step)
    folder = shop.fresh(None)
    folder.rmdir()
    disk.write(there.after(disk.LOSSES[tried.k]), folder)
    # Of what lies outside nothing was noted.
    result = tuple(pattern for pattern in ready.command.result if ".." not in pattern)
    if not result:
        return "not met", ""
    other = ready.reference.differences(leaves(folder, result))
    return ("lost", f"not on the disk: {other[:3]}") if other else ("harmless", "")


def write_twice(shop: Workshop, ready: Ready, tried: Try) -> tuple[str, str]:
    """Start a second writer some tenths of the command's time after the first."""
    folder = shop.fresh(ready.inputs)
    said = [folder.parent / name for name in ("one", "other")]
    children = [begun(lambda: run(ready.command.action), folder, said[0])]
    time.sleep(ready.seconds * tried.k / 10)
    children.append(begun(lambda: run(ready.command.action), folder, said[1]))
    both = [ended(child, path) for child, path in zip(children, said, strict=True)]
    wrong = [one.told(ready.command.codes) for one in both if one.code]
    other = ready.reference.differences(leaves(folder, ready.command.result))
    if any(wrong) or len(wrong) == 2 or other:
        return "lost", f"{wrong} {other[:3]}"
    return ("detected" if wrong else "harmless"), ""


def turn_back_clock(shop: Workshop, ready: Ready, tried: Try) -> tuple[str, str]:
    """Let every look at the clock be an hour before the last one."""
    folder = shop.fresh(ready.inputs)
    real, looks = time.time, iter(range(10**9))

    def action() -> None:
        time.time = lambda: real() - 3600 * next(looks)
        run(ready.command.action)

    return judge(shop, ready, folder, answer(action, folder, folder.parent / "said"))


def read_again(shop: Workshop, readable: Readable, folder: Path) -> tuple[str, str]:
    """Return what is read of files that are not as they were written."""
    done = shop.start(readable.read.read, folder)
    if done.code == 0:
        found = printed(done)
        same = found == readable.numbers
        return ("harmless", "") if same else ("lost", f"silent: {str(found)[:300]}")
    wrong = done.told()
    return ("lost", wrong) if wrong else ("detected", "")


def flip_bit(shop: Workshop, readable: Readable, tried: Try) -> tuple[str, str]:
    """Flip a bit of a file."""
    folder = shop.fresh(readable.inputs)
    flip(folder / tried.file, *divmod(tried.k, 8))
    return read_again(shop, readable, folder)


def swap(shop: Workshop, readable: Readable, tried: Try) -> tuple[str, str]:
    """Put a foreign file in the place of one's own."""
    folder = shop.fresh(readable.inputs)
    assert readable.foreign is not None
    shutil.copy(readable.foreign / tried.file, folder / tried.file)
    return read_again(shop, readable, folder)


_SHOP: Workshop
_READY: dict[str, Any]
_END: float
_DO = {
    **dict.fromkeys(FAULTS, fail), **dict.fromkeys(POWER, cut_power),
    ENDED: cut_power_after, WRITERS: write_twice, CLOCK: turn_back_clock, FOREIGN: swap,
}  # fmt: skip


def begin_worker() -> None:
    """Give a process of the pool counts of its own."""
    _SHOP.shim = shim.Native()


def outcome(tried: Try) -> Outcome:
    """Return what comes of a try, in a forked process."""
    if time.monotonic() > _END:
        return Outcome(tried, "not begun")
    do: Any = _DO.get(tried.fault, flip_bit)
    begun_at = _SHOP.number
    try:
        return Outcome(tried, *do(_SHOP, _READY[tried.what], tried))
    finally:
        for number in range(begun_at + 1, _SHOP.number + 1):
            shutil.rmtree(_SHOP.place / f"{os.getpid()}-{number}", ignore_errors=True)


def tries(ready: Ready, most: int, seconds: float) -> Iterator[Try]:
    """Yield the places at which a command is tried, evenly where there are too many."""
    name = ready.command.name
    # Twice a command's own time, for each of the faults.
    most = max(1, min(most, int(seconds / (2 * ready.seconds) / (len(FAULTS) + len(POWER)))))
    for fault in FAULTS.values():
        for k in spread(ready.counts[fault.kind], most):
            yield Try(name, fault.name, k)
    for fault in POWER:
        for k in spread(len(moments := changes(ready, POWER[fault])), most):
            yield Try(name, fault, moments[k - 1])
    yield from (Try(name, ENDED, loss) for loss in range(len(disk.LOSSES)))
    for tenths in (0, 3, 6)[: max(1, most // 2)]:
        yield Try(name, WRITERS, tenths)
    yield Try(name, CLOCK)


def changes(ready: Ready, loss: str) -> list[int]:
    """Return after which steps the disk would be another one than before."""
    there, found = disk.Disk(ready.inputs), []
    before = disk.digest(there.after(loss))
    for k, step in enumerate(ready.steps, 1):
        there.do(step)
        after = disk.digest(there.after(loss))
        if after != before:
            found.append(k)
        before = after
    return found


def damages(readable: Readable, each: int, drawn: int) -> Iterator[Try]:
    """Yield bits to flip in every kind of byte, others anywhere, and foreign files."""
    read = readable.read
    files = files_of(read, readable.inputs)
    for n, file in enumerate(files):
        some = drawn // len(files) + (n < drawn % len(files))
        for kind, place, bit in places(readable.inputs / file, each, some, f"{read.name} {file}"):
            yield Try(read.name, f"{FLIP}{kind}", 8 * place + bit, str(file))
        theirs = (readable.foreign or Path("nowhere")) / file
        if theirs.is_file() and theirs.read_bytes() != (readable.inputs / file).read_bytes():
            yield Try(read.name, FOREIGN, 0, str(file))


def bits_of(drawn: int) -> dict[str, int]:
    """Return how many of the bits are drawn from the files of each read: that many in all.

    A campaign in parts draws of each what a whole one draws.
    """
    shares, made, given = sum(read.share for read in READS), {}, 0
    for n, read in enumerate(READS, 1):
        upto = round(drawn * sum(one.share for one in READS[:n]) / shares)
        made[read.name], given = upto - given, upto
    return made


def import_what_is_used(shop: Workshop, steps: list[Action]) -> None:
    """Import what all of this imports, so that no forked process has to."""
    names = shop.place / "modules"
    folder = shop.fresh(None)
    for step in dict.fromkeys(steps):

        def action(step: Action = step) -> None:
            try:
                run(step)
            finally:
                names.write_text(json.dumps(sorted(sys.modules)))

        answer(action, folder, folder.parent / "said")
        for name in json.loads(names.read_text()):
            if name not in sys.modules and "__main__" not in name:
                # Some are there by another name, or made by hand.
                with suppress(Exception):
                    import_module(name)


def prepared(only: list[str]) -> None:
    """Make ready what is asked for."""
    commands = [command for command in COMMANDS if matches(command.name, only)]
    reads = [read for read in READS if matches(read.name, only)]
    steps = [step for c in commands for step in (*c.before, c.action)]
    import_what_is_used(_SHOP, steps + [step for r in reads for step in (*r.before, r.read)])
    for command in commands:
        ready = _READY[command.name] = _SHOP.ready(command)
        print(f"{command.name}: {ready.seconds:.1f} s, {ready.counts}, {len(ready.steps)} steps, "
              f"all seen: {ready.complete}", flush=True)  # fmt: skip
    for read in reads:
        readable = _READY[read.name] = _SHOP.readable(read)
        print(f"{read.name}: {readable.seconds:.1f} s", flush=True)


def table(found: list[Outcome]) -> dict[str, dict[str, dict[str, int]]]:
    """Return how often what came of which fault of which command."""
    made: dict[str, dict[str, Counter[str]]] = {}
    for one in found:
        if one.outcome in ("not met", "not begun"):
            continue
        cell = made.setdefault(one.tried.fault, {}).setdefault(one.tried.what, Counter())
        cell["tried"] += 1
        cell[one.outcome] += 1
    return {fault: {what: dict(cell) for what, cell in row.items()} for fault, row in made.items()}


def main() -> int:
    """Run the campaign; return 1 where anything was lost."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--most", type=int, default=200, help="places of a fault in a command")
    options.add_argument("--seconds", type=float, default=60, help="for a command, about")
    options.add_argument("--minutes", type=float, default=600, help="no try is begun after them")
    options.add_argument("--each", type=int, default=2, help="bits of a kind of byte in a file")
    options.add_argument("--drawn", type=int, default=1000, help="bits drawn over all files")
    options.add_argument("--only", nargs="*", default=[], help="commands and reads, by name")
    options.add_argument("--workers", type=int, default=2)
    given = options.parse_args()
    torch.set_num_threads(1)
    place = Path(tempfile.mkdtemp(prefix="tisa-faults-"))
    global _SHOP, _READY, _END
    _SHOP, _READY = Workshop(place), {}
    prepared(given.only)
    todo: list[Try] = []
    drawn = bits_of(given.drawn)
    for one in _READY.values():
        if isinstance(one, Ready):
            todo += tries(one, given.most, given.seconds)
        else:
            todo += damages(one, given.each, drawn[one.read.name])
    # Where time is short, some of everything.
    random.Random(0).shuffle(todo)
    _END = time.monotonic() + 60 * given.minutes
    print(f"{len(todo)} tries", flush=True)
    found = []
    with ProcessPoolExecutor(given.workers, get_context("fork"), begin_worker) as pool:
        for done in pool.map(outcome, todo):
            found.append(done)
            if done.outcome == "lost":
                print(f"LOST {done.tried}: {done.why!r}", flush=True)
            if len(found) % 100 == 0:
                print(f"{len(found)} of {len(todo)} tries", flush=True)
    record: dict[str, Any] = {
        "about": [about(given)],
        "commands": described(),
        "found": table(found),
        "not begun": dict(Counter(x.tried.what for x in found if x.outcome == "not begun")),
    }
    if given.out.is_file():
        record = joined(json.loads(given.out.read_text()), record)
    given.out.write_text(json.dumps(record, indent=1) + "\n")
    shutil.rmtree(place)
    print({state: sum(one.outcome == state for one in found)
           for state in ("harmless", "detected", "lost", "not met", "not begun")})  # fmt: skip
    return int(any(one.outcome == "lost" for one in found))


def joined(before: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a campaign in parts: what was run again stands for what was before."""
    again = {what for one in record["about"] for what in one["parts"]}

    def kept(row: dict[str, Any]) -> dict[str, Any]:
        return {what: value for what, value in row.items() if what not in again}

    faults = before["found"] | record["found"]
    found = {
        fault: kept(before["found"].get(fault, {})) | record["found"].get(fault, {})
        for fault in faults
    }
    earlier = [
        one | {"parts": [part for part in one["parts"] if part not in again]}
        for one in before["about"]
    ]
    return {
        "about": [one for one in earlier if one["parts"]] + record["about"],
        "commands": before["commands"] | record["commands"],
        "found": {fault: row for fault, row in found.items() if row},
        "not begun": kept(before["not begun"]) | record["not begun"],
    }


def about(given: argparse.Namespace) -> dict[str, Any]:
    """Return where, with what and how the campaign was run."""
    from tisa_lab.record import surroundings

    asked = {name: value for name, value in vars(given).items() if name != "out"}
    where = surroundings("tests/faults/campaign.py", torch.device("cpu"))
    return where | {"options": asked, "parts": list(_READY)}


def described() -> dict[str, dict[str, Any]]:
    """Return of each command how many calls it makes, and whether all were seen."""
    return {
        name: {**one.counts, "steps": len(one.steps), "all seen": one.complete}
        for name, one in _READY.items()
        if isinstance(one, Ready)
    }


if __name__ == "__main__":
    sys.exit(main())
