"""A share of the tests that were found: every N-th, for processes side by side on one GPU.

python3 -m pytest -p shares --share 3/16 FILES
"""


def pytest_addoption(parser):
    parser.addoption("--share", default="0/1", help="which share of how many")


def pytest_collection_modifyitems(config, items):
    number, of = map(int, config.getoption("--share").split("/"))
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % of != number])
    items[:] = items[number::of]
