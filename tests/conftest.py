"""Shapes are checked on every call of the package: jaxtyping's hook, before anything imports it.

`JAXTYPING_DISABLE=1` switches that off for the second run, which traces the package
(`torch.compile` cannot look into the checks) and calls it wrongly on purpose (the checks would
answer before the package's own errors do).
"""

import os
import sys

import hypothesis
import pytest
import torch
from jaxtyping import install_import_hook

assert "tisa" not in sys.modules
if os.environ.get("JAXTYPING_DISABLE") != "1":
    install_import_hook("tisa", "checker.check")

hypothesis.settings.register_profile("tisa", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.load_profile("tisa")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
