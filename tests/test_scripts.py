"""The commands that the README names, run small, as a user runs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(script, *arguments):
    return subprocess.run(
        [sys.executable, ROOT / script, *map(str, arguments)],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip


@pytest.mark.full
def test_find_the_offset(tmp_path):
    answer = run("examples/find_the_offset.py", "--steps", 120, "--out", tmp_path / "new" / "demo")
    assert answer.returncode == 0, answer.stderr
    result = json.loads((tmp_path / "new" / "demo" / "result.json").read_text())
    accuracy = result["accuracy"]
    # 120 of its 400 steps are enough to see the difference.
    assert accuracy["with TISA"] > 0.4
    assert accuracy["without positions"] < 0.2
    assert any(peak["asked_for"] for peak in result["peaks"])
    assert "with TISA" in answer.stdout
    assert (tmp_path / "new" / "demo" / "curves.png").stat().st_size > 10_000


def test_find_the_offset_refuses_nonsense(tmp_path):
    answer = run("examples/find_the_offset.py", "--steps", 0, "--out", tmp_path)
    assert answer.returncode == 2
    assert "--steps must be at least 1, got 0" in answer.stderr


@pytest.mark.full
def test_benchmark(tmp_path):
    answer = run("benchmarks/attention.py", "--quick", "--out", tmp_path, "--device", "cpu")
    assert answer.returncode == 0, answer.stderr
    (record,) = [json.loads(p.read_text()) for p in tmp_path.glob("*-attention-cpu.json")]
    assert len(record["rows"]) == 2 * 2 * 6
    for row in record["rows"]:
        if row["contender"] == "flex" and row["mode"] != "forward":
            assert row["skipped"] == "FlexAttention computes no gradients on the CPU"
        else:
            assert row["checked"]
            assert row["ms"]["p20"] <= row["ms"]["p50"] <= row["ms"]["p80"]
    assert "| chunked |" in answer.stdout


def test_benchmark_runs_nothing_that_is_wrong(monkeypatch):
    """The gate: a contender with wrong numbers is not timed."""
    import torch

    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import attention as benchmark

    case = benchmark.QUICK_CASES[1]
    for training in (True, False):
        problem = benchmark.Problem(case, torch.device("cpu"), torch.float32)
        if not training:
            problem.without_gradients()
        for name in (benchmark.LIMIT, benchmark.DENSE, "reference", "chunked", "sdpa"):
            assert benchmark.check(name, problem) is None, name

    def wrong_scores(name, problem):
        def run():
            import tisa

            vector = problem.scoring(case.length).flip(1)  # query − key instead of key − query
            return tisa.attention(*problem.qkv, vector, is_causal=case.is_causal)

        return run

    problem = benchmark.Problem(case, torch.device("cpu"), torch.float32)
    monkeypatch.setattr(benchmark, "contender", wrong_scores)
    assert "error" in benchmark.check("chunked", problem)
    monkeypatch.setattr(benchmark, "CONTENDERS", ("chunked",))
    rows = benchmark.measure(case, torch.device("cpu"), torch.float32, 1)
    assert all(row["skipped"].startswith("WRONG") and "ms" not in row for row in rows)
