import pytest
import torch

from tisa.packages import device_named, needed


def test_a_device_that_is_there_and_one_that_is_not():
    assert device_named("cpu") == device_named(torch.device("cpu")) == torch.device("cpu")
    assert device_named().type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("lemon", "cuda:99"):
        with pytest.raises(ValueError, match=f"device must be one that this machine has.*'{name}'"):
            device_named(name)


def test_a_package_that_is_there_and_one_that_is_not():
    assert needed("torch.nn", "a test", "torch") is torch.nn
    with pytest.raises(
        ModuleNotFoundError, match=r"a test: needs the package lemon.*'tisa\[sour\]'"
    ):
        needed("lemon.tree", "a test", "tisa[sour]")
