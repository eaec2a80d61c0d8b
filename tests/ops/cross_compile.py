"""Compile the fused kernels for GPUs that are not here, and read what the assembler says of them.

    python tests/ops/cross_compile.py 90 [name of a call …]

Prints one JSON object per kernel: registers, bytes spilled, shared memory, warnings. A call is
planned on tensors without memory, so what is compiled is what would be launched.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from tisa.ops.triton import plan, plan_backward, plan_join
from tisa.ops.triton import problem as problems
from tisa.ops.triton.plan_backward import Gradients, Upstream
from tisa.ops.triton.problem import Inputs, Problem, statistics_shape

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"


def source(kernel, arguments, target):
    """Return the kernel as Triton's launcher would compile it, and the compiler's options."""
    backend = make_backend(target)
    bound = create_function_from_signature(kernel.signature, kernel.params, backend)(**arguments)
    values, specialised, options = bound
    _, signature, constants, attributes = kernel._pack_args(
        backend, arguments, values, specialised, options
    )
    return ASTSource(kernel, signature, constants, attributes), options


def compiled(kernel, arguments, capability):
    """Return the compiled kernel and what the assembler reports of it."""
    target = GPUTarget("cuda", capability, 32)
    code, options = source(kernel, arguments, target)
    made = triton.compile(code, target=target, options=options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        architecture = f"sm_{capability}{'a' if capability == 90 else ''}"
        answer = subprocess.run(
            [PTXAS, "-v", f"--gpu-name={architecture}", file.name, "-o", "/dev/null"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    report = answer.stdout + answer.stderr
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", report)]
    return made, {
        "kernel": made.metadata.name,
        "registers": max(int(n) for n in re.findall(r"Used (\d+) registers", report)),
        "spilled": sum(spilled),
        "shared": made.metadata.shared,
        "warnings": sorted(set(re.findall(r"C75\d\d", report))),
        "wgmma": made.asm["ptx"].count("wgmma.mma_async"),
    }


def planned(
    dtype=torch.bfloat16, dim=64, length=1024, batch=2, heads=4, key_heads=4, queries=None,
    scores=True, band=True, packed=False, mask=None, dropout_p=0.0, window=(None, None),
    needs=(True, True, True, True), key_scores=False, always=0,
):  # fmt: skip
    """Return the launches of a call's forward and backward pass (one query: of decoding)."""

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    def sequences(length, heads):
        return empty(batch * length, heads, dim) if packed else empty(batch, heads, length, dim)

    query = sequences(queries or length, heads)
    key, value = sequences(length, key_heads), sequences(length, key_heads)
    span = (queries or length) + length - 1
    of_keys = None
    if key_scores:
        shape = (batch * length, heads) if packed else (batch, heads, length)
        of_keys = problems.loadable_keys(empty(*shape, dtype=torch.float32), packed)
    mask_rows = 1 if mask == "key" else length
    mask_dtype = torch.float32 if mask == "added" else torch.bool
    inputs = Inputs(
        *map(problems.loadable, (query, key, value)),
        empty(heads, span, dtype=torch.float32) if scores else None,
        of_keys,
        empty(heads, 2, dtype=torch.int32) if scores and band else None,
        None if mask is None else empty(batch, 1, mask_rows, length, dtype=mask_dtype),
        empty(dtype=torch.int32) if dropout_p else None,
        empty(batch + 1, dtype=torch.int32) if packed else None,
        None, length if packed else 0, 0, *window, 0.125, dropout_p,
    )  # fmt: skip
    problem = Problem(inputs)
    statistics = empty(*statistics_shape(query, inputs.cu_seqlens), dtype=torch.float32)
    if problem.decodes:
        scratch = empty(plan.decode_numbers(problem), dtype=torch.float32)
        return plan.decode(problem, query, statistics, scratch)
    wanted = Gradients(
        *(x if n else None for x, n in zip((query, key, value, inputs.scores), needs, strict=True)),
        of_keys if needs[1] else None,
    )
    scratch = empty(
        plan_backward.scratch_numbers(problem, tuple(w is not None for w in wanted)),
        dtype=torch.float32,
    )
    upstream = Upstream(inputs.query, None, inputs.query, statistics)
    launches = [
        *plan.forward(problem, query, statistics),
        *plan_backward.backward(problem, upstream, wanted, scratch),
    ]
    if not always:
        return launches
    places = empty(batch, always, dtype=torch.int64)
    joined = plan_join.Always(places, plan_join.Kind(always, window[1] == 0))
    upstream = upstream._replace(grad_statistics=statistics)
    scratch = empty(sum(plan_join.scratch_numbers(problem, always)), dtype=torch.float32)
    return [
        *plan_join.forward(problem, joined, query, statistics),
        *plan_join.backward(problem, joined, upstream, wanted, scratch),
    ]


GATED = {"key_scores": True, "scores": False, "needs": (True, True, True, False)}
CALLS = {
    "band": {},
    "no band": {"band": False},
    "no scores": {"scores": False, "needs": (True, True, True, False)},
    "frozen scores": {"needs": (True, True, True, False)},
    "scores alone": {"needs": (False, False, False, True)},
    "keys and values alone": {"needs": (False, True, True, False)},
    "long": {"length": 4096},
    "causal": {"window": (None, 0)},
    "window": {"window": (64, 64)},
    "packed": {"packed": True},
    "grouped": {"key_heads": 2},
    "ragged": {"length": 1000},
    "key mask": {"mask": "key"},
    "dense mask": {"mask": "dense"},
    "dropout": {"dropout_p": 0.1},
    "short": {"length": 128},
    "very short": {"length": 64},
    "added mask": {"mask": "added"},
    "short, added mask": {"length": 128, "mask": "added"},
    "very short, added mask": {"length": 64, "mask": "added"},
    "128 wide, added mask": {"dim": 128, "mask": "added"},
    "256 wide, added mask": {"dim": 256, "mask": "added"},
    "float32, added mask": {"dtype": torch.float32, "mask": "added"},
    "always": {"window": (128, 128), "always": 2},
    "always, packed, causal, grouped": {
        "window": (128, 0),
        "always": 2,
        "packed": True,
        "key_heads": 2,
        "key_scores": True,
    },
    "always, masked, no band": {"window": (64, 64), "always": 4, "mask": "key", "band": False},
    "always, no scores": {
        "window": (64, 64),
        "always": 1,
        "scores": False,
        "needs": (True, True, True, False),
    },
    "always, float32": {"window": (64, 64), "always": 2, "dtype": torch.float32},
    "always, 128 wide": {"window": (64, 64), "always": 2, "dim": 128},
    "always, 256 wide": {"window": (64, 64), "always": 2, "dim": 256},
    "key scores": {"key_scores": True},
    "key scores, no band": {"key_scores": True, "band": False},
    "key scores alone": GATED,
    "key scores, causal": {"key_scores": True, "window": (None, 0)},
    "key scores alone, causal": GATED | {"window": (None, 0), "length": 4096},
    "key scores, long": {"key_scores": True, "length": 4096},
    "key scores, packed": {"key_scores": True, "packed": True},
    "key scores, grouped": {"key_scores": True, "key_heads": 2},
    "key scores, key mask": {"key_scores": True, "mask": "key"},
    "key scores, dense mask": {"key_scores": True, "mask": "dense"},
    "key scores, dropout": {"key_scores": True, "dropout_p": 0.1},
    "key scores, short": {"key_scores": True, "length": 128},
    "key scores, very short": {"key_scores": True, "length": 64},
    "key scores, decoding": {"key_scores": True, "queries": 1, "length": 8192},
    "key scores, 32 wide": {"key_scores": True, "dim": 32},
    "key scores, 128 wide": {"key_scores": True, "dim": 128},
    "key scores, 256 wide": {"key_scores": True, "dim": 256},
    "decoding": {"queries": 1, "length": 8192},
    "16 wide": {"dim": 16},
    "32 wide": {"dim": 32},
    "128 wide": {"dim": 128},
    "256 wide": {"dim": 256},
    "float16": {"dtype": torch.float16},
    "float32": {"dtype": torch.float32},
    "float32, key scores": {"dtype": torch.float32, "key_scores": True},
    "float32, 128 wide": {"dtype": torch.float32, "dim": 128},
    "float32, 256 wide": {"dtype": torch.float32, "dim": 256},
}


if __name__ == "__main__":
    capability, chosen = int(sys.argv[1]), sys.argv[2:] or list(CALLS)
    problems.has_copy_engine = lambda device: capability >= 90
    for name in chosen:
        for kernel, _, arguments in planned(**CALLS[name]):
            _, report = compiled(kernel, arguments, capability)
            print(json.dumps({"call": name} | report), flush=True)
