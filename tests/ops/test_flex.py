"""FlexAttention on the CPU: forward only, float32 and below, compiled by Inductor."""

import shutil

import pytest
import torch

import tisa
from budget import assert_within_budget, eager
from cases import CASES, KEYED, Case

pytestmark = [
    pytest.mark.unchecked,
    pytest.mark.skipif(
        not any(shutil.which(name) for name in ("g++", "clang++", "c++")),
        reason="FlexAttention on the CPU needs a C++ compiler",
    ),
]


@pytest.fixture(autouse=True)
def _fresh_graphs():
    torch.compiler.reset()


def check(case):
    qkv, scoring, options = case.make(torch.float32)
    with torch.no_grad():
        found = case.call("flex", qkv, scoring, options)
        expected = case.call("reference", qkv, scoring, options)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_several_lengths_one_after_the_other():
    # Without a reset in between: dynamo would go over to dynamic shapes, which do not compile.
    for queries, keys in ((37, 50), (20, 64), (64, 64)):
        check(Case("", queries, keys, heads=4, key_heads=2, options={"is_causal": True}))


@pytest.mark.full
def test_more_lengths_than_dynamo_likes():
    for length in range(10, 130, 10):
        check(Case("", length, length))


@pytest.mark.full
@pytest.mark.parametrize("case", [*CASES, *KEYED], ids=lambda case: case.name)
def test_every_case(case):
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_budget(dtype):
    qkv = [torch.randn(2, 3, n, 32).to(dtype) for n in (130, 70, 70)]
    vector = torch.randn(3, 199)
    exact = tisa.attention(*(x.double() for x in qkv), vector.double(), backend="reference")
    with torch.no_grad():
        found = tisa.attention(*qkv, vector, backend="flex")
    assert_within_budget(found, exact, eager(*qkv, vector))


@pytest.mark.full
def test_packed():
    scoring = tisa.TISA(4)
    ends = torch.tensor([0, 9, 9, 30, 33], dtype=torch.int32)
    qkv = [torch.randn(35, 4, 16) for _ in range(3)]
    for causal, key_scores in ((False, None), (True, None), (True, torch.randn(35, 4))):
        with torch.no_grad():
            found, expected = (
                tisa.attention(
                    *qkv,
                    scoring(21),
                    cu_seqlens=ends,
                    max_seqlen=21,
                    is_causal=causal,
                    key_scores=key_scores,
                    backend=backend,
                )
                for backend in ("flex", "reference")
            )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_inside_another_graph():
    scoring = tisa.TISA(4)

    def run(query, key, value):
        return tisa.attention(query, key, value, scoring(query.shape[2]), backend="flex")

    compiled = torch.compile(run, fullgraph=True)
    with torch.no_grad():
        qkv = [torch.randn(1, 4, 40, 16) for _ in range(3)]
        expected = tisa.attention(*qkv, scoring(40), backend="reference")
        torch.testing.assert_close(compiled(*qkv), expected, rtol=1e-4, atol=1e-5)
