"""What is remembered of a launch: addresses are left open, and filled in for other tensors."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the fused backend's launches")

from triton.tools.tensor_descriptor import TensorDescriptor

from tisa.ops.triton import launching as launch
from tisa.ops.triton.arguments import Fixed, Mask, Rules
from tisa.ops.triton.launching import Place, UnexpectedError, _alignment, _place, template_of
from tisa.ops.triton.plan import Launch
from tisa.ops.triton.problem import strided

ROOT = Path(__file__).parent.parent.parent


class Launcher:
    """What Triton's launcher takes."""

    def __init__(self):
        self.calls = []

    def __call__(self, gridX, gridY, gridZ, stream, function, *arguments):
        self.calls.append((gridX, gridY, gridZ, stream, function, *arguments))


def fake(launcher):
    """Return a compiled kernel as Triton's."""
    return SimpleNamespace(run=launcher, function="function", packed_metadata="metadata")


def test_places_are_those_of_the_calls_tensors():
    qkv = torch.randn(2, 3, 8)
    query, key = qkv[..., :4], qkv[..., 4:]
    scratch = torch.empty(64)
    tensors = (query, None, key, scratch)
    assert _place(query, tensors) == Place(0, 0)
    # Inside of the query's memory, but the key's all the same.
    assert _place(key.view_as(key), tensors) == Place(2, 0)
    assert _place(scratch[16:], tensors) == Place(3, 64)
    with pytest.raises(UnexpectedError, match="none of the call's"):
        _place(torch.randn(3), tensors)


def test_a_template_is_filled_in_for_other_tensors():
    launcher = Launcher()
    kernel = SimpleNamespace(arg_names=["query", "sums", "rows", "mask"])
    query, scratch = torch.randn(4, 16), torch.empty(32)
    arguments = {"query": query, "sums": scratch[8:], "rows": 4, "mask": None}
    template = template_of(fake(launcher), kernel, 7, arguments, (query, scratch))
    template.launch((1000, 2000), "stream")
    (given,) = launcher.calls
    assert given[:4] == (7, 1, 1, "stream")
    assert given[-4:] == (1000, 2032, 4, None)


def test_addresses_inside_of_groups_are_filled_in_too():
    launcher = Launcher()
    kernel = SimpleNamespace(arg_names=["rules", "output", "FIXED"])
    query, mask, output = torch.randn(4, 16), torch.randn(4), torch.empty(2, 1, 4, 16)
    fixed = Fixed(16, 16, 16, 16, 16, 16, 1, False, "tf32", True)
    rules = Rules(query, None, Mask(mask, 4, 0, 0, 1), None, None, None, 3, None, 0.5)
    arguments = {"rules": rules, "output": strided(output), "FIXED": fixed}
    tensors = (query, None, mask, output)
    template = template_of(fake(launcher), kernel, 1, arguments, tensors)
    template.launch((1000, None, 2000, 3000), "stream")
    filled = (1000, None, (2000, 4, 0, 0, 1), None, None, None, 3, None, 0.5)
    assert launcher.calls[0][-3:] == (filled, (3000, 64, 64, 16), fixed)


def test_descriptors_are_those_of_the_new_address():
    launcher = Launcher()
    kernel = SimpleNamespace(arg_names=["key"])
    key = torch.randn(4, 16)
    described = {"key": TensorDescriptor(key, [4, 16], [16, 1], [4, 16], padding="nan")}
    template = template_of(fake(launcher), kernel, 1, described, (None, key))
    template.launch((None, 4096), "stream")
    given = launcher.calls[0][-1]
    assert given.base.data_ptr() == 4096
    assert (given.shape, given.strides, given.padding) == ([4, 16], [16, 1], "nan")


def strange(gridX, gridY, gridZ, function, stream, *arguments):
    """Take the same in another order."""


@pytest.mark.parametrize(
    ("compiled", "reason"),
    [
        (SimpleNamespace(), "no run"),
        (SimpleNamespace(run=Launcher(), function=1), "no packed_metadata"),
        (fake(strange), "takes gridX, gridY, gridZ, function, stream"),
        (fake(lambda *arguments: None), "takes , expected gridX"),
        (fake(lambda gridX: None), "takes , expected gridX"),
    ],
)
def test_a_launcher_that_is_not_as_expected_is_told_once(monkeypatch, compiled, reason):
    monkeypatch.setattr(launch, "long_way", [])
    launched = []

    class Kernel:
        arg_names = ("query",)

        def __getitem__(self, grid):
            return lambda **arguments: launched.append((grid, arguments)) or compiled

    query = torch.randn(4)
    plan = [Launch(Kernel(), 3, {"query": query})]
    with pytest.warns(UserWarning, match=f"long way.*{reason}"):
        assert launch._launched(plan, (query,)) is None
    # Once: here a warning is an error.
    assert launch._launched(plan, (query,)) is None
    assert len(launch.long_way) == 1
    assert launched == [((3,), {"query": query})] * 2


@pytest.mark.parametrize("taken", [launch._TAKES, launch._TAKES[:5]])
def test_launchers_of_several_versions_are_known(taken):
    launcher = eval(f"lambda {', '.join(taken)}, *args: None")
    assert launch._launcher(fake(launcher)) == (launcher, "function", "metadata")


def lines_of(script, *arguments):
    """Return what a script prints, in a process of its own: here Triton interprets."""
    answer = subprocess.run(
        [sys.executable, Path(__file__).with_name(script), *arguments],
        capture_output=True, text=True, cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HOME": "/tmp", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-2000:]
    return answer.stdout.splitlines()


@pytest.mark.full
def test_triton_s_own_launcher_gives_the_driver_the_same():
    assert len(lines_of("launch_process.py")) == 2


def test_calls_that_are_remembered_give_the_driver_the_same():
    assert lines_of("call_process.py", "band", "Python") == ["band"]


def test_what_a_compiled_kernel_knows_of_addresses():
    assert _alignment((32, None, 48)) == _alignment((64, None, 16))
    assert _alignment((32, None, 36)) != _alignment((32, None, 48))
    # The same tensor twice is another call than two tensors: which is which could not be told.
    assert _alignment((32, 32)) != _alignment((32, 64))
    assert _alignment((32, 32, 64)) != _alignment((32, 64, 64))
    # Memory of nothing has no address.
    assert _alignment((32, 0, 0)) == _alignment((64, 0, 0))


def test_shapes_are_shared_by_addresses(monkeypatch):
    monkeypatch.setattr(launch, "_shapes", {})
    one, other = torch.randn(4, 16), torch.randn(4, 16)
    first = launch.known((one, None), 1.0)
    assert launch.known((other, None), 1.0) is first
    assert launch.known((other, None), 2.0) is not first
    assert launch.known((other[:2], None), 1.0) is not first
    assert launch.known((other.t(), None), 1.0) is not first
