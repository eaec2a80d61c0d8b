"""What proofs cost: files written and read with their checksums, beside the same without.

    PYTHONPATH=.:lab python3 benchmarks/store.py [--gigabytes 1] [--rounds 5] [--out FILE]

Plain: the bytes are written, or read. Flushed: as plain, and every file and folder is flushed to
the disk before it gets its name, as any program does that survives a power cut. Store: a folder of
`tisa.store`, with its manifest; read: the manifest checked, then the bytes read. A GB is 10⁹ bytes,
in files as a checkpoint has them: weights, an optimiser twice as large. The kinds take turns. On a
machine that does other things too the least of the rounds is the cost, and the processors' seconds
are what it takes from them. `checkpoint` is one of a default run of `tisa-lab pretrain`, proved
beside the training; its share is that of the steps between two of them, alone on an H200 (from the
record) and on these processors (from a sixteenth of a step).
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator

from tisa import store
from tisa_lab.pretrain.config import PretrainConfig, RunSettings
from tisa_lab.record import command_line, surroundings

# Shares of a checkpoint: weights, and two numbers for each of them.
PARTS = {"model.safetensors": 1 / 3, "optimizer.bin": 2 / 3}
KIND = "benchmark"
# Seconds of a step of the default run with TISA, alone on an H200
# (docs/records/2026-11-15-pretrain/throughput-512x4.json).
STEP_GPU = 0.018067
RECORDS = 300


def contents(size: int) -> dict[str, bytes]:
    return {name: os.urandom(2**20) * int(part * size / 2**20) for name, part in PARTS.items()}


def plain(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def flushed(folder: Path, files: dict[str, bytes]) -> None:
    unfinished = folder.with_name("unfinished")
    plain(unfinished, files)
    store.finish_folder(unfinished, folder)


def proved(folder: Path, files: dict[str, bytes]) -> None:
    with store.new_folder(folder) as unfinished:
        for name, content in files.items():
            (unfinished / name).write_bytes(content)
        store.seal_folder(unfinished, KIND, {})


def read(folder: Path) -> None:
    for name in PARTS:
        (folder / name).read_bytes()


def read_proved(folder: Path) -> None:
    store.check_folder(folder, KIND)
    read(folder)


def append_plain(path: Path) -> None:
    for number in range(RECORDS):
        with path.open("ab") as file:
            file.write(json.dumps({"n": number}).encode() + b"\n")
            file.flush()
            os.fsync(file)


def append_proved(path: Path) -> None:
    for number in range(RECORDS):
        store.Lines(path).append({"n": number})


def timed(
    actions: dict[str, Callable[[], object]], rounds: int, after: Callable[[], object]
) -> dict[str, dict[str, float]]:
    """Return seconds of the clock and of the processors; actions take turns."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            clock, cpu = time.perf_counter(), time.process_time()
            action()
            found[name].append((time.perf_counter() - clock, time.process_time() - cpu))
            after()
    return {name: _of(*zip(*some, strict=True)) for name, some in found.items()}


def _of(clock: Sequence[float], cpu: Sequence[float]) -> dict[str, float]:
    return {
        "least": min(clock),
        "median": median(clock),
        "processors_least": min(cpu),
        "processors_median": median(cpu),
    }


def files_of(place: Path, size: int, rounds: int) -> dict[str, Any]:
    files = contents(size)
    there = place / "there"
    proved(there, files)
    written = place / "new"
    ways = {"plain": plain, "flushed": flushed, "store": proved}
    write = timed(
        {name: lambda way=way: way(written, files) for name, way in ways.items()},  # type: ignore
        rounds, lambda: shutil.rmtree(written),
    )  # fmt: skip
    reads = {"plain": lambda: read(there), "store": lambda: read_proved(there)}
    return {"write": write, "read": timed(reads, rounds, lambda: None)}


def records_of(place: Path, rounds: int) -> dict[str, Any]:
    one, other = place / "plain.jsonl", place / "store.jsonl"
    actions = {"flushed": lambda: append_plain(one), "store": lambda: append_proved(other)}
    return timed(actions, rounds, lambda: None)


def step_cpu(whole: Any, config: PretrainConfig) -> float:
    """Return the processors' seconds of a step here, from a sixteenth of one."""
    tokens, length = config.batch_tokens // 16, config.longest
    ends = torch.arange(0, tokens + 1, length, dtype=torch.int32)
    ids, places = torch.randint(0, 30_000, (tokens,)), torch.arange(0, tokens, 7)
    began = time.process_time()
    whole(ids, ends, places, ids[places], length).backward()
    return 16 * (time.process_time() - began)


def checkpoint_of(place: Path, rounds: int) -> dict[str, Any]:
    """Measure a checkpoint of the default run: what accelerate writes, and what the run writes."""
    import numpy as np

    from tisa_lab.pretrain import checkpoints
    from tisa_lab.pretrain.model import WithLoss, build, parameter_groups

    config, accelerator = PretrainConfig(), Accelerator(cpu=True)
    whole = WithLoss(build(config, 30_000))
    optimizer = torch.optim.AdamW(parameter_groups(whole, config))
    for parameter in whole.parameters():
        parameter.grad = torch.ones_like(parameter)
    accelerator.prepare(whole, optimizer)[1].step()
    losses = np.zeros(500)

    writer = checkpoints.Writer(accelerator, place, {"seed": 0})

    def ours() -> None:
        writer.write(checkpoints.Progress(step=500), losses)

    def settled() -> None:
        ours()
        writer.settle()

    def theirs() -> None:
        accelerator.save_state(str(place / "accelerate"), safe_serialization=True)

    found: dict[str, Any] = timed(
        {"accelerate": theirs, "run": ours, "run, waited for": settled}, rounds, writer.settle
    )
    folder = checkpoints.folder_of(place) / "step-00000500"
    found["bytes"] = sum(path.stat().st_size for path in folder.iterdir())
    found["steps"] = RunSettings().checkpoint_every
    # What the run waits for, more than where accelerate alone writes; all of it, if it waited.
    for name, kind in (("share_gpu", "run"), ("share_gpu_if_waited_for", "run, waited for")):
        more = found[kind]["least"] - found["accelerate"]["least"]
        found[name] = more / (STEP_GPU * found["steps"])
    found["step_cpu"] = step_cpu(whole, config)
    more = found["run, waited for"]["processors_least"] - found["accelerate"]["processors_least"]
    found["share_cpu"] = more / (found["step_cpu"] * found["steps"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--out", type=Path, help="a new JSON file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        place = Path(name)
        record = {
            "kind": "store",
            "gigabytes": given.gigabytes,
            "rounds": given.rounds,
            "files": files_of(place, int(given.gigabytes * 1e9), given.rounds),
            "records": {"count": RECORDS, **records_of(place, given.rounds)},
            "checkpoint": checkpoint_of(place, given.rounds),
            "load": os.getloadavg()[0],
            "cores": os.cpu_count(),
            "surroundings": surroundings(command_line("python3", "benchmarks/store.py"),
                                         torch.device("cpu")),
        }  # fmt: skip
    text = json.dumps(record, indent=1)
    print(text)
    if given.out is not None:
        store.write_text(given.out, text + "\n")


if __name__ == "__main__":
    main()
