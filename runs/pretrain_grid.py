"""Runs of `tisa-lab pretrain`, several at a time on one machine, until done or out of time.

    python3 runs/pretrain_grid.py FOLDER [--jobs 4] [--seconds 500] [--collect FILE] -- OPTIONS

Standard input has a line for each run: its name, then options of its own, VARIABLE=VALUE before it
for the environment. OPTIONS are those of all runs. A run that was stopped goes on, a finished one
says so; a folder that holds a run with other options is refused. Small results (records, losses,
tables of positions) are collected in one file.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMALL = ("record.json", "losses.npy", "table.npy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--collect", type=Path)
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    common = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    arguments = parser.parse_args(own)
    lines = [shlex.split(line, comments=True) for line in sys.stdin]
    waiting = [line for line in lines if line]
    began, running, failed = time.monotonic(), {}, []
    arguments.folder.mkdir(parents=True, exist_ok=True)
    while waiting or running:
        left = arguments.seconds - (time.monotonic() - began)
        # Not worth starting: it would not get beyond compiling.
        while waiting and len(running) < arguments.jobs and left > 60:
            variables, name, options = parted(waiting.pop(0))
            begun = start(arguments.folder, name, [*common, *options], left, variables)
            running[begun] = name
        if not running:
            break
        time.sleep(0.2)
        for process in [p for p in running if p.poll() is not None]:
            name = running.pop(process)
            done = (arguments.folder / name / "record.json").is_file()
            said = (arguments.folder / f"{name}.log").read_text().strip().splitlines()[-1:]
            state = "FAILED" if process.returncode else "done" if done else "stopped"
            if state == "FAILED":
                failed.append(name)
            print(
                f"{time.monotonic() - began:6.0f} s  {name}: {state}: {''.join(said)}", flush=True
            )
    if arguments.collect is not None:
        collect(arguments.folder, arguments.collect)
    unfinished = [parted(line)[1] for line in waiting]
    print(f"not begun: {', '.join(unfinished) or 'none'}; failed: {', '.join(failed) or 'none'}")
    raise SystemExit(1 if failed else 0)


def parted(line: list[str]) -> tuple[dict[str, str], str, list[str]]:
    """Return variables, name and options of a run."""
    count = next(number for number, word in enumerate(line) if "=" not in word)
    return dict(word.split("=", 1) for word in line[:count]), line[count], line[count + 1 :]


def start(
    folder: Path, name: str, options: list[str], left: float, variables: dict[str, str]
) -> subprocess.Popen:
    log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    command = [
        sys.executable, "-m", "tisa_lab.cli", "pretrain", "--out", str(folder / name),
        "--max-seconds", f"{left - 30:.0f}", *options,
    ]  # fmt: skip
    more = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'lab'}",
        "TORCHINDUCTOR_COMPILE_THREADS": "4", "OMP_NUM_THREADS": "4",
        "TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "inductor"),
        "TRITON_CACHE_DIR": str(folder.parent / "triton"),
    }  # fmt: skip
    environment = {**more, **os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'lab'}", **variables}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    os.close(log)
    return process


def collect(folder: Path, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    # Where there is no checkout to ask, as on a machine that was sent the files alone.
    (folder / "commit.txt").write_text(os.environ.get("COMMIT", "unknown") + "\n")
    with tarfile.open(file, "w:gz") as archive:
        archive.add(folder / "commit.txt", arcname="commit.txt")
        for path in sorted(folder.glob("*/*")):
            if path.name in SMALL:
                archive.add(path, arcname=str(path.relative_to(folder)))
        for path in sorted(folder.glob("*.log")):
            archive.add(path, arcname=path.name)


if __name__ == "__main__":
    main()
