"""A made-up corpus in which a token follows from the one three places before it."""

import os
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def text(documents=60, seed=1, longest=40):
    drawn = random.Random(seed)
    made = []
    for _ in range(documents):
        first, count = drawn.randrange(26), drawn.randrange(3, longest)
        made.append("".join(chr(97 + (first + 3 * i) % 26) for i in range(count)))
    return "\n\n".join(made) + "\n"


# What a run of the command line is given, beside --data and --out.
SMALL = [
    "--tokenizer", "bytes", "--hidden-size", "16", "--num-hidden-layers", "2",
    "--num-attention-heads", "2", "--embedding-size", "8", "--lengths", "32",
    "--batch-tokens", "256", "--device", "cpu", "--learning-rate", "0.01",
]  # fmt: skip


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'lab'}"}


def tisa(*arguments, processes=1, **more):
    launcher = [sys.executable, "-m"]
    if processes > 1:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    return subprocess.run(
        [*launcher, "tisa_lab.cli", *map(str, arguments)],
        capture_output=True, text=True, cwd=ROOT, env=environment(), **more,
    )  # fmt: skip
