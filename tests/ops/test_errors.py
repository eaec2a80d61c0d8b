"""Wrong calls: an error that names the argument, what was expected, what came, what to do."""

import math
import re

import numpy as np
import pytest
import torch

import tisa

pytestmark = pytest.mark.unchecked


def good(**changes):
    call = {
        "query": torch.randn(2, 4, 5, 8),
        "key": torch.randn(2, 4, 7, 8),
        "value": torch.randn(2, 4, 7, 8),
        "offset_scores": torch.randn(4, 11),
    }
    return call | changes


def square(**changes):
    return good(**dict.fromkeys(("query", "key", "value"), torch.randn(2, 4, 5, 8)),
                offset_scores=None) | changes  # fmt: skip


def packed(**changes):
    call = {
        "query": torch.randn(7, 4, 8),
        "key": torch.randn(7, 4, 8),
        "value": torch.randn(7, 4, 8),
        "offset_scores": torch.randn(4, 7),
        "cu_seqlens": torch.tensor([0, 3, 7], dtype=torch.int32),
        "max_seqlen": 4,
    }
    return call | changes


ints = {"dtype": torch.int32}
WRONG = {
    "band beside a scoring function": (
        good(offset_scores=tisa.TISA(4), band=torch.zeros(4, 2, dtype=torch.int32)),
        "band", "None beside a scoring function", "leave it out",
    ),
    "a scoring function of other heads": (
        good(offset_scores=tisa.TISA(3)), "offset_scores", "(4, 11)", "(3, 11) from TISA",
        "number of heads",
    ),
    "a function of something else": (
        good(offset_scores=lambda queries, keys: None), "offset_scores", "NoneType from function",
    ),
    "a scoring function elsewhere": (
        good(offset_scores=tisa.TISA(4).to("meta")), "offset_scores", "device", "meta",
    ),
    "a scoring function beside wrong axes": (
        good(offset_scores=tisa.TISA(4), query=torch.randn(4, 5, 8)), "query", "(batch, heads,",
    ),
    "a scoring function without a longest sequence": (
        packed(offset_scores=tisa.TISA(4), max_seqlen=None), "max_seqlen", "pass it too",
    ),
    "span": (good(offset_scores=torch.randn(4, 12)), "offset_scores", "(4, 11)", "(4, 12)"),
    "span of a square": (good(offset_scores=torch.randn(4, 13)), "scoring(5, 7)"),
    "heads of the scores": (good(offset_scores=torch.randn(3, 11)), "offset_scores", "(3, 11)"),
    "one head for all": (good(offset_scores=torch.randn(1, 11)), "offset_scores", "(1, 11)"),
    "no head axis": (good(offset_scores=torch.randn(11)), "offset_scores", "(11,)"),
    "half scores": (good(offset_scores=torch.randn(4, 11).half()), "float32", "do not cast"),
    "integer scores": (good(offset_scores=torch.ones(4, 11).long()), "float32", "int64"),
    "float64 scores": (good(offset_scores=torch.ones(4, 11).double()), "float32", "float64"),
    "device of the scores": (good(offset_scores=torch.ones(4, 11, device="meta")), "device"),
    "places of other sequences": (
        good(window=1, always=torch.zeros(1, 2).long()), "always", "(2, any number)", "(1, 2)",
    ),
    "places that are no integers": (
        good(window=1, always=torch.zeros(2, 2)), "always", "integers", "float32",
    ),
    "places of packed sequences without an axis": (
        packed(window=1, always=torch.zeros(2).long()), "always", "(2,)", "filled up with -1",
    ),
    "places elsewhere": (
        good(window=1, always=torch.zeros(2, 1, device="meta").long()), "always", "device",
    ),
    "key dtype": (good(key=torch.randn(2, 4, 7, 8).double()), "key", "float32", "cast"),
    "integer query": (good(query=torch.ones(2, 4, 5, 8).int()), "query", "floating", "int32"),
    "key device": (good(key=torch.randn(2, 4, 7, 8, device="meta")), "key", "device", "meta"),
    "key width": (good(key=torch.randn(2, 4, 7, 9)), "key", "wide"),
    "no width": (good(query=torch.ones(2, 4, 5, 0), key=torch.ones(2, 4, 7, 0)), "at least 1"),
    "value length": (good(value=torch.randn(2, 4, 6, 8)), "value", "long"),
    "batch": (good(key=torch.randn(1, 4, 7, 8), value=torch.randn(1, 4, 7, 8)), "batch"),
    "axes": (good(query=torch.randn(4, 5, 8)), "query", "(batch, heads, length, dim)"),
    "grouped without saying so": (
        good(key=torch.randn(2, 2, 7, 8), value=torch.randn(2, 2, 7, 8)), "enable_gqa=True",
    ),
    "grouped unevenly": (
        good(key=torch.randn(2, 3, 7, 8), value=torch.randn(2, 3, 7, 8), enable_gqa=True),
        "divides",
    ),
    "value heads": (good(value=torch.randn(2, 2, 7, 8), enable_gqa=True), "value", "heads"),
    "no heads": (good(**{n: torch.ones(2, 0, 5, 8) for n in ("query", "key", "value")}), "head"),
    "value width": (good(value=torch.ones(2, 4, 7, 0)), "value", "at least 1 wide"),
    "float8": (good(query=torch.ones(2, 4, 5, 8).to(torch.float8_e4m3fn)), "query", "float8"),
    "truth on the device": (good(query_start=torch.tensor(True)), "query_start", "bool"),
    "mask shape": (good(attn_mask=torch.ones(2, 7).bool()), "attn_mask", "(2, 4, 5, 7)",
                   "[:, None, None, :]"),
    "mask of one axis": (good(attn_mask=torch.ones(7).bool()), "attn_mask", "axes"),
    "mask of five axes": (good(attn_mask=torch.ones(1, 1, 1, 5, 7).bool()), "attn_mask", "axes"),
    "integer mask": (good(attn_mask=torch.ones(5, 7).long()), "attn_mask", ".bool()"),
    "mask device": (good(attn_mask=torch.ones(5, 7, device="meta")), "attn_mask", "device"),
    "no scale": (good(scale=math.nan), "scale", "finite", "nan"),
    "scale without end": (good(scale=-math.inf), "scale", "-inf"),
    "dropout": (good(dropout_p=1.5), "dropout_p", "1.5"),
    "negative dropout": (good(dropout_p=-0.1), "dropout_p"),
    "backend": (good(backend="flash"), "backend", "reference, chunked, sdpa, flex", "'flash'"),
    "window": (good(window=-1), "window", "None means without limit"),
    "key scores of other keys": (
        good(key_scores=torch.zeros(2, 4, 5)), "key_scores", "(batch, heads, keys) = (2, 4, 7)",
        "(2, 4, 5)", "expand",
    ),
    "key scores of one sequence for all": (
        good(key_scores=torch.zeros(1, 4, 7)), "key_scores", "(2, 4, 7)", "(1, 4, 7)",
    ),
    "key scores of the key's heads": (
        good(key=torch.randn(2, 2, 7, 8), value=torch.randn(2, 2, 7, 8), enable_gqa=True,
             key_scores=torch.zeros(2, 2, 7)),
        "key_scores", "(2, 4, 7)", "the query's heads", "(2, 2, 7)",
    ),
    "key scores with a batch axis beside a pack": (
        packed(key_scores=torch.zeros(1, 7, 4)), "key_scores", "(total, heads) = (7, 4)",
    ),
    "half key scores": (good(key_scores=torch.zeros(2, 4, 7).half()), "key_scores", "float32"),
    "integer key scores": (
        good(key_scores=torch.zeros(2, 4, 7).int()), "key_scores", "float32", "int32",
    ),
    "float64 key scores": (good(key_scores=torch.zeros(2, 4, 7).double()), "key_scores", "float64"),
    "key scores elsewhere": (
        good(key_scores=torch.zeros(2, 4, 7, device="meta")), "key_scores", "device", "meta",
    ),
    "half a window": (good(window=(2, -3)), "window"),
    "band shape": (good(band=torch.zeros(2, 4, **ints)), "band", "(4, 2)", "support(eps)"),
    "band dtype": (good(band=torch.zeros(4, 2)), "band", "int32"),
    "band device": (good(band=torch.zeros(4, 2, device="meta", **ints)), "band", "device"),
    "band without scores": (
        good(offset_scores=None, band=torch.zeros(4, 2, **ints)), "band", "without offset_scores",
    ),
    "start of two": (good(query_start=torch.tensor([1, 2])), "query_start", "(2,)"),
    "start of halves": (good(query_start=torch.tensor(1.5)), "query_start", "float"),
    "start elsewhere": (good(query_start=torch.tensor(1, device="meta")), "query_start", "device"),
    "max_seqlen alone": (good(max_seqlen=4), "max_seqlen", "both or neither"),
    "packed with a batch axis": (packed(query=torch.randn(1, 4, 7, 8)), "(total, heads, dim)"),
    "packed cross attention": (packed(query=torch.randn(6, 4, 8)), "packed"),
    "packed without max_seqlen": (packed(max_seqlen=None), "max_seqlen", "longest"),
    "packed with int64 ends": (packed(cu_seqlens=torch.tensor([0, 3, 7])), "int32", ".int()"),
    "packed with two axes": (packed(cu_seqlens=torch.zeros(2, 2, **ints)), "cu_seqlens"),
    "packed ends elsewhere": (
        packed(cu_seqlens=torch.zeros(3, device="meta", **ints)), "cu_seqlens", "device",
    ),
    "packed ends that fall": (packed(cu_seqlens=torch.tensor([0, 5, 3], **ints)), "[0, 5, 3]"),
    "packed ends from 1": (packed(cu_seqlens=torch.tensor([1, 3, 7], **ints)), "from 0"),
    "packed ends beyond": (packed(cu_seqlens=torch.tensor([0, 4, 8], **ints)), "at most 7"),
    "packed longer than max": (
        packed(cu_seqlens=torch.tensor([0, 1, 7], **ints)), "max_seqlen", "longest sequence, 6",
    ),
    "packed span": (packed(offset_scores=torch.randn(4, 13)), "(4, 7)", "max_seqlen 4"),
    "packed with a start": (packed(query_start=1), "query_start", "starts at 0"),
    "packed with a mask": (packed(attn_mask=torch.ones(7, 7).bool()), "attn_mask", "padded batch"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("backend", ["auto", "reference", "chunked", "sdpa", "flex"])
def test_wrong_calls_say_what_is_wrong(name, backend):
    call, *fragments = WRONG[name]
    with pytest.raises(ValueError, match=r"^tisa\.attention: ") as raised:
        tisa.attention(**({"backend": backend} | call))
    for fragment in fragments:
        assert fragment in str(raised.value)
    assert re.search(r"must be .*, got .*; .", str(raised.value)), "expected, got, remedy"


OF_THE_WRONG_TYPE = {
    "neither scores nor what makes them": (
        good(offset_scores="tisa"), "offset_scores", "str", "scoring(queries, keys)",
    ),
    "array": (good(query=np.ones((2, 4, 5, 8))), "query", "ndarray", "torch.as_tensor"),
    "list": (good(attn_mask=[[True]]), "attn_mask", "list"),
    "a list of key scores": (good(key_scores=[1.0]), "key_scores", "list"),
    "tuple": (packed(cu_seqlens=(0, 3, 7)), "cu_seqlens", "tuple"),
    "half a place": (good(query_start=1.5), "query_start", "1.5"),
    "half a place for a scoring function": (
        good(query_start=1.5, offset_scores=tisa.TISA(4)), "query_start", "1.5",
    ),
    "list for a scoring function": (good(query=[1], offset_scores=tisa.TISA(4)), "query", "list"),
    "half a distance": (good(window=2.5), "window", "2.5"),
    "trained scale": (good(scale=torch.tensor(0.5)), "scale", "multiplied into the query"),
    "scale": (good(scale="x"), "scale", "'x'"),
    "dropout": (good(dropout_p=None), "dropout_p", "None"),
    "causal in words": (good(is_causal="no"), "is_causal", "True or False", "'no'"),
    "causal as a number": (good(is_causal=1), "is_causal", "1"),
    "grouped, or nothing": (good(enable_gqa=None), "enable_gqa", "None"),
    "truth on the device": (good(return_lse=torch.tensor(True)), "return_lse", "tensor"),
    "truth for a place": (good(query_start=True), "query_start", "True"),
    "half a length": (packed(max_seqlen=4.0), "max_seqlen", "4.0"),
    "three sides": (good(window=(1, 2, 3)), "window", "(1, 2, 3)"),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_THE_WRONG_TYPE)
def test_wrong_types_say_what_is_wrong(name):
    call, *fragments = OF_THE_WRONG_TYPE[name]
    with pytest.raises(TypeError, match=r"^tisa\.attention: .* must be .*, got .*; .") as raised:
        tisa.attention(**call)
    for fragment in fragments:
        assert fragment in str(raised.value)


def test_wrong_calls_are_wrong_under_autocast_too():
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="floating"):
        tisa.attention(**good(query=torch.ones(2, 4, 5, 8).int()))


@pytest.mark.parametrize("lengths", [(-3,), (5, -3)])
def test_lengths_must_not_be_negative(lengths):
    with pytest.raises(ValueError, match="_length must be 0 or more, got -3"):
        tisa.TISA(2)(*lengths)


def test_lengths_must_be_lengths():
    with pytest.raises(TypeError, match=r"query_length must be an int, got Tensor; pass"):
        tisa.TISA(2)(torch.ones(1, 2, 3))


def test_the_right_calls_are_right():
    assert tisa.attention(**good()).shape == (2, 4, 5, 8)
    assert tisa.attention(**packed()).shape == (7, 4, 8)


def asking(tensor):
    return tensor.clone().requires_grad_()


@pytest.mark.parametrize(
    ("backend", "call", "reason"),
    [
        ("sdpa", good(return_lse=True), "log-sum-exp"),
        ("sdpa", square(is_causal=True, scale=-0.3), "scale of 0 or less"),
        ("sdpa", square(is_causal=True, scale=0), "scale of 0 or less"),
        ("sdpa", {k: v.to("meta") for k, v in good().items()} | {"scale": -0.3}, "on a GPU"),
        ("flex", good(attn_mask=asking(torch.randn(5, 7))), "gradient for attn_mask"),
        ("flex", good(dropout_p=0.1), "dropout"),
        ("flex", good(query=asking(torch.randn(2, 4, 5, 8))), "no gradients on the CPU"),
        ("flex", good(offset_scores=asking(torch.randn(4, 11))), "no gradients on the CPU"),
        ("flex", good(key_scores=asking(torch.randn(2, 4, 7))), "no gradients on the CPU"),
        ("flex", good(return_lse=True), "log-sum-exp on the CPU"),
        ("flex", {k: v.double() for k, v in good().items()}, "float64"),
    ],
)
def test_a_backend_refuses_what_it_cannot_do(backend, call, reason):
    with pytest.raises(ValueError, match=f'backend "{backend}" cannot do this call') as raised:
        tisa.attention(**call, backend=backend)
    assert reason in str(raised.value)
    assert 'backend="auto"' in str(raised.value)
    # "auto" finds another one for all but FlexAttention's own limits, which it never meets.
    found = tisa.attention(**call)
    expected = tisa.attention(**call, backend="reference")
    if "dropout_p" not in call:
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("build", "fragment"),
    [
        (lambda: tisa.TISA(0), "num_attention_heads must be at least 1, got 0"),
        (lambda: tisa.TISA(2, -1), "num_kernels must be 0 or more, got -1"),
        (lambda: tisa.TISA(2, init="random"), 'init must be "reference" or "zero"'),
        (lambda: tisa.TISA(2).support(0.0), "eps must lie between 0 and 1"),
        (lambda: tisa.TISA.from_reference({}), "kernel_amplitudes, kernel_sharpness"),
        (lambda: tisa.TISA.from_reference({"x.kernel_offsets": torch.ones(1)}), "prefix"),
        (
            lambda: tisa.TISA.from_reference(
                {n: torch.ones(i) for i, n in enumerate(
                    ("kernel_amplitudes", "kernel_sharpness", "kernel_offsets"), start=1)}
            ),
            "(kernels, heads)",
        ),
        (lambda: tisa.TISAv2(2, -1), "num_kernels"),
        (lambda: tisa.TISAv2(2, shortest_view=10, longest_view=5), "shortest_view ≤ longest_view"),
        (lambda: tisa.TISAv2(2, num_agnostic_heads=3), "num_agnostic_heads"),
        (lambda: tisa.TISAv2(2, kernel_dropout=1.0), "kernel_dropout"),
        (lambda: tisa.T5Buckets(2, 7), "even"),
        (lambda: tisa.T5Buckets(2, 1, bidirectional=False), "at least 2"),
        (lambda: tisa.T5Buckets(2, 32, 8), "max_distance must be above 8"),
        (lambda: tisa.T5Buckets(2, init="ones"), "init must be"),
        (lambda: tisa.NearFar(2, init="ones"), "init must be"),
    ],
)  # fmt: skip
def test_wrong_scoring_functions_say_what_is_wrong(build, fragment):
    with pytest.raises(ValueError, match=r"^T|^N") as raised:
        build()
    assert fragment in str(raised.value)


def test_offsets_must_be_integers():
    for scoring in (tisa.TISA(2), tisa.T5Buckets(2), tisa.ALiBi(2), tisa.NearFar(2)):
        with pytest.raises(TypeError, match=r"must be an integer tensor.*\.long\(\)"):
            scoring.scores(torch.tensor([0.5]))


def test_chunked_says_that_it_has_no_second_derivative():
    query, key, value = (torch.randn(1, 1, 3, 2, requires_grad=True) for _ in range(3))
    out = tisa.attention(query, key, value, torch.zeros(1, 5), backend="chunked")
    (first,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match='no second derivative; take backend="reference"'):
        first.sum().backward()
