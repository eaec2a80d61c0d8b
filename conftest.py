"""Shapes are checked on every call of the package: jaxtyping's hook, before anything imports it.

`JAXTYPING_DISABLE=1` switches that off for the second run, which traces the package
(`torch.compile` cannot look into the checks) and calls it wrongly on purpose (the checks would
answer before the package's own errors do). The fused kernels are left out: what Triton compiles or
interprets must be the function itself.
"""

import gc
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import pytest
import torch
from jaxtyping import install_import_hook

# What is imported stays: to look through it for garbage, again and again, takes a fifth of the time
# until the first test.
gc.disable()

# Before Triton is imported: without a GPU its kernels run in Python.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

    if find_spec("triton"):
        import interpreter

        interpreter.quicken()

# Workers side by side: a thread for each of them.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# `pytest --pyargs tisa.testing` on this checkout has imported it, and checks no shapes.
own = not any(word.startswith("tisa.testing") for word in sys.argv)
assert not own or "tisa" not in sys.modules
if own and os.environ.get("JAXTYPING_DISABLE") != "1":
    root = Path(__file__).parent
    places = {root: root / "tisa", root / "lab": root / "lab" / "tisa_lab"}
    files = [f.relative_to(base) for base, place in places.items() for f in place.rglob("*.py")]
    # So are tests, whose assertions pytest writes anew. Packages are left out too: the hook would
    # take a package's name for all that is in it.
    kept = [f for f in files if not {"triton", "testing"} & {*f.parts} and f.name != "__init__.py"]
    install_import_hook([".".join(f.with_suffix("").parts) for f in kept], "checker.check")


def pytest_ignore_collect(collection_path, config):
    # A file without such a test need not be imported to find that out.
    if config.option.markexpr.startswith("unchecked") and collection_path.match("test_*.py"):
        return "unchecked" not in collection_path.read_text() or None
    return None


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


hypothesis.settings.register_profile("tisa", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.load_profile("tisa")


@pytest.fixture(autouse=True)
def _as_every_test_begins():
    torch.manual_seed(0)
    yield
    # One test that leaves this behind breaks all that follow in its process, and none by itself.
    assert torch.is_grad_enabled()
