"""The contract, on the classes that `--position` names."""

import pytest

from tisa.positions import Given, resolve
from tisa.scoring import ScoringFunction
from tisa.testing.contract import *  # noqa: F403
from tisa.testing.scores import *  # noqa: F403


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test on every class that was named."""
    named = metafunc.config.getoption("position")
    if not named:
        raise pytest.UsageError("tisa.testing: name a class: `--position my_file.py:Mine`")
    if "position" in metafunc.fixturenames:
        metafunc.parametrize("position", named, indirect=True)


@pytest.fixture
def position(request: pytest.FixtureRequest) -> Given:
    """What the method is called."""
    found: Given = request.param
    return found


@pytest.fixture
def scoring(position: Given) -> ScoringFunction:
    """The function of the offset that the method is, for three heads."""
    chosen = resolve(position)
    if chosen.scoring is None:
        pytest.skip("it is a position method, and no function of the offset")
    return chosen.scoring(3, **{k: v for k, v in chosen.options.items() if k != "layers"})
