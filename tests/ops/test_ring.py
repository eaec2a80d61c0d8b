"""A sequence spread over processes: outputs and every gradient are those of one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tisa.ops.ring import Ring

HERE = Path(__file__).parent


@pytest.mark.unchecked
@pytest.mark.parametrize(
    "processes", [2, pytest.param(4, marks=pytest.mark.full, id="4 processes")]
)
def test_a_ring_computes_what_one_process_does(processes):
    answer = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         f"--nproc-per-node={processes}", HERE / "ring_process.py"],
        capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("all as it should be") == processes


def test_a_ring_needs_processes():
    with pytest.raises(RuntimeError, match="start the program with torchrun"):
        Ring(8)
