"""The small form of `fuzz.py`, and that it finds what is wrong."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fuzz
import tisa
from fuzz_calls import ALIKE, draw

pytestmark = pytest.mark.unchecked
DTYPES = ("float32", "bfloat16", "float16")
LONGEST = 140
# One call of each row, so that structures differ.
NUMBERS = range(0, 45 * ALIKE, ALIKE)


def test_every_backend_is_right_over_all_arguments(capsys):
    # The kernels' interpreter is slow: test_triton.py has its cases.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuzz, "HAS_TRITON", False)
        record = fuzz.fuzz(NUMBERS, dtypes=DTYPES, longest=LONGEST)
    assert not record.wrong, capsys.readouterr().out
    assert record.calls.total() == len(NUMBERS)
    assert record.calls.keys() == set(DTYPES)
    for backend in ("reference", "chunked", "sdpa", "auto", "ring"):
        assert record.outcomes[backend]["right"] > 0
    assert record.outcomes["reference"]["refused"] > 0
    assert set(record.worst) == set(DTYPES)
    seen = set(record.tried)
    assert {
        "packed", "grouped heads", "queries ≠ keys", "causal", "window", "band", "no scores",
        "query_start", "static cache", "bool mask", "added mask", "gradient of a mask", "dropout",
        "log-sum-exp", "negative scale", "odd width", "scores of 1e4", "scores of −inf",
        "mask of finfo.min", "no gradients", "key scores", "gates", "key scores of −inf",
    } <= seen  # fmt: skip


def without(name):
    return lambda options: {k: v for k, v in options.items() if k != name}


FAULTS = {
    "causal": without("is_causal"),
    "window": without("window"),
    "band": without("band"),
    "dropout": lambda options: options | {"dropout_p": 0.3},
    "query_start": lambda options: options | {"query_start": options["query_start"] + 1},
    "packed": lambda options: options | {"cu_seqlens": options["cu_seqlens"].clamp_max(3)},
    "key scores": without("key_scores"),
    "negative scale": lambda options: options | {"scale": -options["scale"]},
}


@pytest.mark.parametrize("fault", [*FAULTS, "gradient", "rounded scores"])
def test_a_fault_is_found(fault, monkeypatch):
    attention = tisa.attention

    def faulty(*tensors, **options):
        if fault == "gradient":
            tensors = [tensors[0] * 1.05 - tensors[0].detach() * 0.05, *tensors[1:]]
        elif fault == "rounded scores":
            tensors = [*tensors[:3], tensors[3].bfloat16().float()]
        else:
            options = FAULTS[fault](options)
        return attention(*tensors, **options)

    monkeypatch.setattr(tisa, "attention", faulty)
    tag = {"gradient": "causal", "rounded scores": "scores of 1e4"}.get(fault, fault)
    tried = []
    for number in range(0, 400 * ALIKE, ALIKE):
        call = draw(5, number, device="cpu", dtypes=("bfloat16",), longest=60)
        # Scores of keys make a query see few of them, and hide so small a fault.
        alone = fault != "gradient" or "key scores" not in call.tags
        if tag in call.tags and alone and call.invalid is None and "scale 0" not in call.tags:
            outcome, _, _ = fuzz.Trial(call).judge("reference")
            if outcome == "wrong":
                return
            tried.append(number)
            assert len(tried) < 6, f"{fault} was not found in the calls {tried}"
    raise AssertionError(f"no call has {tag}")


def test_a_call_is_the_same_again():
    first, second = (draw(3, 11, device="cpu", dtypes=DTYPES, longest=LONGEST) for _ in range(2))
    assert first.tags == second.tags
    for a, b in zip(first.tensors.values(), second.tensors.values(), strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


def drawn(fits):
    calls = (
        draw(7, n, device="cpu", dtypes=("float32",), longest=40) for n in range(0, 10**5, ALIKE)
    )
    return next(call for call in calls if call.invalid is None and fits(call))


def test_no_gradient_is_asked_through_a_log_sum_exp_that_knows_no_value():
    call = drawn(lambda c: c.wanted == ["value"] and "log-sum-exp" in c.tags)
    assert fuzz.Trial(call).judge("chunked")[0] == "right"


def test_a_nan_where_minus_infinity_belongs_is_wrong():
    trial, there = fuzz.Trial(drawn(lambda c: not c.wanted)), torch.tensor([-torch.inf, 1.0])
    for wrong, verdict in ((-torch.inf, 0.0), (torch.inf, torch.inf), (torch.nan, torch.inf)):
        assert trial.ratio("lse", torch.tensor([wrong, 1.0]), there, there, 0.0) == verdict


def test_one_command_tries_every_dtype_and_writes_all_that_is_asked_for(
    tmp_path, monkeypatch, capsys
):
    out = tmp_path / "record.json"
    # A process would import everything anew.
    monkeypatch.setattr(fuzz, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    words = ["fuzz.py", "--seed", "3", "--calls", "2", "--longest", "20", "--out", str(out)]
    monkeypatch.setattr(
        fuzz.sys, "argv", [*words, "--commit", "abc", "--dtype", "float64", "float16"]
    )
    assert fuzz.main() == 0
    found = json.loads(out.read_text())
    assert found["calls by dtype"] == {"float64": 2, "float16": 2}
    assert (found["calls"], found["commit"], found["processes that ended"]) == (4, "abc", 2)
    assert found["wrong"] == []
    worst = found["worst error over what is allowed (ratio, call, tensor)"]
    assert worst.keys() == {"float64", "float16"}
    for backends in worst.values():
        assert all(0 <= of["any"][0] <= 1 for of in backends.values())
    assert sum(found["outcomes"]["reference"].values()) == 4
    assert "refusals" in found
    assert "4 calls, 0 answers WRONG" in capsys.readouterr().out


def test_a_failure_of_the_fuzz_itself_is_told_and_the_run_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(fuzz, "oracle", lambda *_, **__: 1 / 0)
    record = fuzz.fuzz(range(0, 2 * ALIKE, ALIKE), seed=7, longest=20)
    assert record.outcomes == {"oracle": {"wrong": 2}}
    assert "ZeroDivisionError" in capsys.readouterr().out
