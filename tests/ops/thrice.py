"""A plugin for pytest: every test three times, with known calls in C++.

PYTHONPATH=.:tests/ops python3 -m pytest --noconftest -p thrice tests/ops/test_gpu_fused.py

A call is known in C++ the second time, its backward pass the third.
"""

from typing import Any

import pytest


def pytest_configure(config: Any) -> None:
    """Switch it on, or stop."""
    from tisa.ops.triton import native

    if not native.switch(True):
        raise pytest.UsageError(f"C++ is {native.state}")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> bool:
    """Run the test three times."""
    names = pyfuncitem._fixtureinfo.argnames
    for _ in range(3):
        pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    return True


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many calls were known."""
    from tisa.ops import repeats
    from tisa.ops.triton import native

    counts = repeats.native.counts() if repeats.native else "none"
    terminalreporter.write_line(f"C++: {native.state}; calls and backward passes: {counts}")
