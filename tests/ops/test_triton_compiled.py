"""The fused kernels compiled for GPUs that are not here: registers, spills, serialised products.

The assembler says nothing of its own accord when it serialises the matrix units of Hopper (C75xx),
which costs up to half the speed, or when registers go to memory. So it is asked.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton's compiler")
SCRIPT = Path(__file__).with_name("cross_compile.py")
ROOT = SCRIPT.parent.parent.parent

# Bytes that a thread may spill, stores and loads together. 64 wide heads in half precision are what
# is tuned; their small spills buy a third block per multiprocessor. Wide heads in float32 are right
# and slow.
BUDGET = {
    90: {"256 wide": 2048, "float32": 2560, "float32, 128 wide": 2560, "float32, 256 wide": 16_384,
         "float32, added mask": 2560, "short, added mask": 1536, "128 wide, added mask": 2048,
         "256 wide, added mask": 3072, "key scores, 128 wide": 1024, "key scores, 256 wide": 2560,
         "float32, key scores": 2560},
    80: {"256 wide": 9216, "float32, 256 wide": 16_384, "256 wide, added mask": 9216,
         "key scores, 256 wide": 9216, "key scores, dense mask": 768},
}  # fmt: skip
OTHERWISE = 640
SHARED = {90: 232_448, 80: 166_912}
QUICK = {90: ["band", "no band", "key scores, causal", "packed", "short, added mask"],
         80: ["band"]}  # fmt: skip


def reports(capability, *names):
    """Return what the assembler says of every kernel of these calls, in a process of its own:
    here Triton interprets."""
    answer = subprocess.run(
        [sys.executable, SCRIPT, str(capability), *names],
        capture_output=True, text=True, cwd=ROOT, env={"PATH": "/usr/bin:/bin", "HOME": "/tmp"} |
        {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-2000:]
    return [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("{")]


def check(found, capability):
    assert found
    for report in found:
        budget = BUDGET[capability].get(report["call"], OTHERWISE)
        assert report["spilled"] <= budget, report
        assert report["shared"] <= SHARED[capability], report
        # All its kernels multiply with one instruction, so that they find the same weights.
        assert not (report["call"].startswith("float32") and report["wgmma"]), report
        # An added mask is right and not tuned.
        assert not report["warnings"] or report["call"].endswith("added mask"), report


@pytest.mark.parametrize("capability", QUICK)
def test_what_is_used_most(capability):
    found = reports(capability, *QUICK[capability])
    check(found, capability)
    products = [r for r in found if r["kernel"] != "entry_kernel"]
    if capability == 90:
        assert all(r["wgmma"] > 0 for r in products)


@pytest.mark.full
@pytest.mark.parametrize("capability", BUDGET)
def test_every_configuration(capability):
    found = reports(capability)
    check(found, capability)
    kernels = {r["kernel"] for r in found}
    expected = {"forward_kernel", "query_kernel", "key_kernel", "entry_kernel",
                "decode_kernel", "merge_kernel", "join_kernel", "part_kernel", "of_key_kernel",
                "of_score_kernel"}  # fmt: skip
    assert kernels == expected | ({"small_kernel"} if capability == 90 else set())
