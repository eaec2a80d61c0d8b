"""How many files somebody opens who follows a forward pass, a cell of GLUE, a pretraining run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from little_corpus import text
from little_glue import make_data, make_model

ROOT = Path(__file__).parents[1]
# Before the tree was rebuilt, counted in the same way: 15, 65 and 76.
MOST = {"forward": 10, "glue": 40, "pretrain": 45}


@pytest.mark.parametrize("what", MOST)
def test_few_files_are_passed(what, tmp_path):
    if what == "glue":
        make_data(tmp_path / "glue")
        make_model(tmp_path / "model")
    elif what == "pretrain":
        (tmp_path / "corpus.txt").write_text(text())
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "files_passed.py", what, tmp_path],
        capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "lab")))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = json.loads(done.stdout.splitlines()[-1])
    print(f"{what}: {len(files)} files", *files, sep="\n  ")
    assert len(files) <= MOST[what], files
