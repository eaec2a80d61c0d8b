"""What is remembered of a launch: addresses are left open, and filled in for other tensors."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the fused backend's launches")

from triton.tools.tensor_descriptor import TensorDescriptor

from tisa.ops.triton import launching as launch
from tisa.ops.triton.arguments import Fixed, Mask, Rules
from tisa.ops.triton.launching import Described, Place, _alignment, _place, _template
from tisa.ops.triton.problem import strided


def fake(launcher, descriptors):
    """Return a compiled kernel as Triton's: with descriptors, a function before the launcher."""
    tensordesc_meta = descriptors

    def inner(*arguments):
        return launcher(*arguments, tensordesc_meta)

    run = SimpleNamespace(
        launch=inner if descriptors else launcher, global_scratch_size=0, profile_scratch_size=0,
        launch_cooperative_grid=False, launch_pdl=False,
    )  # fmt: skip
    return SimpleNamespace(run=run, function="function", packed_metadata="metadata")


class Launcher:
    def __init__(self):
        self.calls = []

    def __call__(self, *arguments):
        self.calls.append(arguments)


def test_places_are_those_of_the_calls_tensors():
    qkv = torch.randn(2, 3, 8)
    query, key = qkv[..., :4], qkv[..., 4:]
    scratch = torch.empty(64)
    tensors = (query, None, key, scratch)
    assert _place(query, tensors) == Place(0, 0)
    # Inside of the query's memory, but the key's all the same.
    assert _place(key.view_as(key), tensors) == Place(2, 0)
    assert _place(scratch[16:], tensors) == Place(3, 64)
    with pytest.raises(KeyError, match="none of the call's"):
        _place(torch.randn(3), tensors)


def test_a_template_is_filled_in_for_other_tensors():
    launcher = Launcher()
    kernel = SimpleNamespace(arg_names=["query", "sums", "rows", "mask"])
    query, scratch = torch.randn(4, 16), torch.empty(32)
    arguments = {"query": query, "sums": scratch[8:], "rows": 4, "mask": None}
    template = _template(fake(launcher, []), kernel, 7, arguments, (query, scratch))
    assert template is not None
    template.among((1000, 2000))("stream")
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
    template = _template(fake(launcher, []), kernel, 1, arguments, tensors)
    assert template is not None
    template.among((1000, None, 2000, 3000))("stream")
    filled = (1000, None, (2000, 4, 0, 0, 1), None, None, None, 3, None, 0.5)
    assert launcher.calls[0][-3:] == (filled, (3000, 64, 64, 16), fixed)


def test_descriptors_are_made_for_the_new_address(monkeypatch):
    seen = []

    def made(descriptor, metadata):
        seen.append((descriptor.base.data_ptr(), metadata))
        return [descriptor.base, *descriptor.shape, *descriptor.strides]

    monkeypatch.setattr("triton.backends.nvidia.driver.make_tensordesc_arg", made)
    launcher = Launcher()
    kernel = SimpleNamespace(arg_names=["key"])
    key = torch.randn(4, 16)
    described = {"key": TensorDescriptor(key, [4, 16], [16, 1], [4, 16])}
    template = _template(fake(launcher, ["swizzled"]), kernel, 1, described, (None, key))
    assert template is not None
    assert isinstance(template.arguments[0], Described)
    template.among((None, 4096))("stream")
    assert seen == [(4096, "swizzled")]
    assert launcher.calls[0][-5:] == (4096, 4, 16, 16, 1)


def test_a_launcher_that_is_not_as_expected_is_not_repeated():
    kernel = SimpleNamespace(arg_names=["query"])
    query = torch.randn(4)
    assert _template(SimpleNamespace(), kernel, 1, {"query": query}, (query,)) is None
    needs_memory = fake(Launcher(), [])
    needs_memory.run.global_scratch_size = 1
    assert _template(needs_memory, kernel, 1, {"query": query}, (query,)) is None
    strange = {"query": torch.randn(4)}
    assert _template(fake(Launcher(), []), kernel, 1, strange, (query,)) is None


def test_what_a_compiled_kernel_knows_of_addresses():
    assert _alignment((32, None, 48)) == _alignment((64, None, 16))
    assert _alignment((32, None, 36)) != _alignment((32, None, 48))
    # The same tensor twice is another call than two tensors: which is which could not be told.
    assert _alignment((32, 32)) != _alignment((32, 64))


def test_shapes_are_shared_by_addresses(monkeypatch):
    monkeypatch.setattr(launch, "_known", {})
    monkeypatch.setattr(launch, "_shapes", {})
    one, other = torch.randn(4, 16), torch.randn(4, 16)
    first = launch.known((one, None), 1.0)
    assert launch.known((one, None), 1.0) is first
    assert launch.known((other, None), 1.0).shape is first.shape
    assert launch.known((other, None), 2.0).shape is not first.shape
    assert launch.known((other[:2], None), 1.0).shape is not first.shape
