"""The prototypes' kernels compiled for Hopper: nothing serialised, no more than small spills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton's compiler")
ROOT = Path(__file__).parents[2]
FOLDERS = (".", "tests", "tests/ops", "benchmarks", "benchmarks/prototypes")


@pytest.mark.full
def test_every_variant():
    answer = subprocess.run(
        [sys.executable, ROOT / "benchmarks/prototypes/assembled.py", "smooth"],
        capture_output=True, text=True, cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": "/tmp"}
        | {"PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in FOLDERS)},
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-2000:]
    found = [json.loads(line) for line in answer.stdout.splitlines()]
    assert "forward_kernel" in {r["kernel"] for r in found}
    for report in found:
        assert report["call"].startswith("smooth")
        assert not report["warnings"], report
        assert report["spilled"] <= 640, report
        assert report["shared"] <= 232_448, report
