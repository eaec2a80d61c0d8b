"""A call at the same addresses is not looked at again, and is still the right one."""

import sys

import pytest
import torch

import tisa
from tisa.ops import repeats
from tisa.ops import triton as backend

pytestmark = pytest.mark.skipif(
    not backend.interpreted(), reason="with a GPU the kernels are compiled: test_gpu_fused.py"
)


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    qkv = [torch.randn(1, 2, 9, 16).half().requires_grad_() for _ in range(3)]
    return [*qkv, torch.randn(2, 17, requires_grad=True)]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(repeats, "_repeats", {})


def results(tensors, name="triton", **options):
    out = tisa.attention(*tensors, backend=name, **options)
    return [out, *torch.autograd.grad(out.float().square().sum(), tensors)]


def close(found, expected):
    return all(
        torch.allclose(a, b, atol=2e-2, rtol=2e-2) for a, b in zip(found, expected, strict=True)
    )


def test_the_third_call_is_a_repeat_and_sees_new_numbers(tensors, monkeypatch):
    first = results(tensors)
    assert list(repeats._repeats.values()) == [None]
    results(tensors)
    assert None not in repeats._repeats.values()

    def looked_at_again(*_, **__):
        raise AssertionError("validated a second time")

    monkeypatch.setattr(sys.modules["tisa.ops.api"], "checked_call", looked_at_again)
    assert all(map(torch.equal, results(tensors), first))
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(0.5)
    found = results(tensors)
    monkeypatch.undo()
    assert not close(found, first)
    assert close(found, results(tensors, "reference"))


def test_no_gradient_where_none_is_wanted(tensors):
    first = results(tensors)
    results(tensors)
    with torch.no_grad():
        out = tisa.attention(*tensors, backend="triton")
    assert not out.requires_grad
    assert torch.equal(out, first[0])
    # Decoding is another kernel, which only inference takes.
    frozen = [tensor.detach() for tensor in tensors]
    assert torch.equal(tisa.attention(*frozen, backend="triton"), out)


@pytest.mark.parametrize(
    "options",
    [{"is_causal": True}, {"scale": 1.0}, {"window": 2}, {"is_causal": True, "query_start": 3}],
)
def test_other_options_are_another_call(tensors, options):
    plain = results(tensors)
    results(tensors)
    for _ in range(3):
        found = results(tensors, **options)
        assert not close(found, plain)
        assert close(found, results(tensors, "reference", **options))
    assert len(repeats._repeats) == 2


def test_repeated_dropout_drops_what_a_first_call_drops(tensors):
    for number in range(4):
        after = []
        for name in ("reference", "triton"):
            torch.manual_seed(number)
            after.append([*results(tensors, name, dropout_p=0.4), torch.rand(1)])
        assert close(*after)
    assert any(repeats._repeats.values())


def test_what_must_be_looked_at_every_time_is(tensors):
    query, key, value, scores = tensors
    strided = query.detach().transpose(-1, -2).contiguous().transpose(-1, -2)
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool)
    for _ in range(2):
        tisa.attention(query, key, value, scores, attn_mask=mask[0, 0], backend="triton")
        tisa.attention(query, key, value, scores, window=(2, 2), backend="triton")
        tisa.attention(query, key, value, scores, return_lse=True, backend="triton")
        tisa.attention(query, key, value, scores, query_start=torch.tensor(0), backend="triton")
        tisa.attention(strided, key, value, scores, backend="triton")
    assert not any(repeats._repeats.values())
    with pytest.raises(ValueError, match="offset_scores must be of shape"):
        tisa.attention(query, key, value, scores[:, 1:], backend="triton")


@pytest.mark.unchecked
def test_what_is_no_tensor_is_still_refused(tensors):
    for _ in range(3):
        results(tensors)
    with pytest.raises(TypeError, match="offset_scores must be a tensor"):
        tisa.attention(*tensors[:3], [1.0], backend="triton")
    with pytest.raises(TypeError, match="window must be"):
        tisa.attention(*tensors, window=["a"], backend="triton")


def test_autocast_is_another_call(tensors):
    for _ in range(3):
        results(tensors)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="bfloat16"):
        # Cast to a dtype that the interpreter refuses, not repeated as half precision.
        tisa.attention(*tensors, backend="triton")
