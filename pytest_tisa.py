"""The option of `pytest --pyargs tisa.testing`: whose class the contract is run on.

pytest loads this file in every run where tisa is installed, so it imports nothing.
"""


def pytest_addoption(parser):
    """Declare `--position`."""
    parser.getgroup("tisa").addoption(
        "--position", action="append", default=[], metavar="my_file.py:Class",
        help="a position method or scoring function that pytest --pyargs tisa.testing is run on",
    )  # fmt: skip
