"""Print what each backend does on a GPU, asked of the backends themselves, as a Markdown table.

    python docs/capabilities.py

docs/attention.md holds the table; a test compares the two.
"""

import sys
from dataclasses import replace
from importlib import import_module

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tisa  # noqa: F401
from tisa.ops.validation import checked_call

BACKENDS = ("reference", "chunked", "sdpa", "flex", "triton")
CALL = dict(
    attn_mask=None, key_scores=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=True,
    cu_seqlens=None, max_seqlen=None, query_start=None, window=None, always=None, band=None,
    return_lse=False,
)  # fmt: skip


def tensor(*shape, dtype=torch.bfloat16, grad=False):
    """Return a tensor without memory on a GPU that need not be there."""
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=grad)


def call(dtype=torch.bfloat16, dim=64, heads=4, grad=True, **options):
    """Return a call with trained scores."""
    query = tensor(2, 4, 32, dim, dtype=dtype, grad=grad)
    key = tensor(2, heads, 32, dim, dtype=dtype, grad=grad)
    scores = tensor(4, 63, dtype=torch.float32, grad=grad)
    return checked_call(query, key, key, scores, **CALL | options)


def features():
    """Yield the name of each feature and a call that needs it."""
    yield "bfloat16, float16, trained scores", call()
    yield "float32", call(torch.float32)
    yield "float64", call(torch.float64)
    yield "causal, sliding window", call(is_causal=True, window=(8, None))
    always = torch.empty((2, 2), dtype=torch.int64, device="cuda")
    yield "keys that a window does not hide", replace(call(window=8), always=always)
    yield "padding mask", replace(call(), attn_mask=tensor(2, 1, 1, 32, dtype=torch.bool))
    yield "gradient of a mask", replace(call(), attn_mask=tensor(1, 1, 32, 32, grad=True))
    yield (
        "a score for each key, trained",
        call(key_scores=tensor(2, 4, 32, dtype=torch.float32, grad=True)),
    )
    yield "grouped heads", call(heads=2)
    yield "dropout", call(dropout_p=0.1)
    ends = tensor(3, dtype=torch.int32)
    yield "packed sequences", replace(call(), cu_seqlens=ends, max_seqlen=32)
    yield "log-sum-exp", call(return_lse=True)
    yield "static cache, start on the device", call(query_start=tensor(dtype=torch.int64))
    yield "heads 8 wide", call(dim=8)
    yield "heads wider than 256", call(dim=320)


# What no single call shows.
ALWAYS = {
    "memory without an n × n tensor": ("chunked", "flex", "triton"),
    "same result in every run": ("reference", "chunked", "triton"),
    "torch.func, second derivatives": ("reference",),
    "exported graphs run without this package": ("reference", "sdpa"),
}


def table() -> str:
    """Return the table."""
    modules = {name: import_module(f"tisa.ops.{name}") for name in BACKENDS}
    # The GPU is imagined: what is asked of the machine is answered for it.
    modules["triton"]._INTERPRETED, modules["triton"]._new_enough = False, lambda device: True
    lines = ["| | " + " | ".join(f"`{name}`" for name in BACKENDS) + " |", "|---" * 6 + "|"]
    with FakeTensorMode(allow_non_fake_inputs=True):
        for feature, made in features():
            cells = ["–" if modules[name].refuses(made) else "✓" for name in BACKENDS]
            lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    for feature, names in ALWAYS.items():
        cells = ["✓" if name in names else "–" for name in BACKENDS]
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
