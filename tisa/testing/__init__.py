"""What every position method keeps to, as tests that anybody can run on a class of theirs.

    pytest --pyargs tisa.testing --position my_file.py:Mine

contract.py       any position method, in a layer and in a transformer
scores.py         scoring functions: vectors, precision, devices, bands
test_contract.py  both, on what `--position` names

The methods of this package keep to the same contract (`tests/positions/`, `tests/test_scoring.py`).
A module that imports these tests gives them the fixture `position`, what a method is called. The
option is declared in `pytest_tisa.py`, which is installed beside the package.
"""

try:
    import pytest
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "tisa.testing needs the package pytest: pip install pytest", name="pytest"
    ) from missing

# So that a failed assertion shows its values, as in a test file.
pytest.register_assert_rewrite("tisa.testing.contract", "tisa.testing.scores")
