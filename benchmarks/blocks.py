"""How large the chunked backend's blocks should be: time of a training step by block size.

    PYTHONPATH=.:lab python3 benchmarks/blocks.py [--device cuda]

The constants in tisa/ops/chunked.py come from the records that this writes.
"""

import argparse
import json
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
from attention import RESULTS, Case, Problem, device_name, milliseconds, short, step

from tisa.ops import blocks
from tisa_lab.record import commit

CPU_CASES = [Case(128, 8), Case(512, 4), Case(4096, 1)]
GPU_CASES = [Case(128, 64), Case(512, 32), Case(2048, 8), Case(8192, 2)]
CPU_SIZES = [(2**e, rows) for e in (19, 20, 21, 22, 23) for rows in (64, 128, 256)]
GPU_SIZES = [(2**e, rows) for e in (22, 23, 24, 25, 26) for rows in (128, 256, 512)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result files")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commit", help="what is measured, where git is not there to say")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    cases, sizes = (GPU_CASES, GPU_SIZES) if on_gpu else (CPU_CASES, CPU_SIZES)
    present = blocks.ACCELERATOR_BLOCK if on_gpu else blocks.CPU_BLOCK
    found = {size: {} for size in sizes}
    for case in cases:
        print(case, file=sys.stderr)
        once = step("chunked", Problem(case, device, dtype))
        times = {size: [] for size in sizes}
        for _ in range(1 + arguments.rounds):
            for size in sizes:
                blocks.CPU_BLOCK = blocks.ACCELERATOR_BLOCK = size
                times[size].append(milliseconds(once, device))
        for size in sizes:
            found[size][str(case)] = torch.tensor(times[size][1:]).median().item()
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": arguments.commit or commit(),
        "command": "python3 benchmarks/blocks.py",
        "rounds": arguments.rounds,
        "milliseconds": [
            {"elements": size[0], "rows": size[1], **found[size]} for size in sizes
        ],
    }  # fmt: skip
    best = {str(case): min(found[size][str(case)] for size in sizes) for case in cases}
    lines = [
        f"# Block sizes of the chunked backend, {record['date']}",
        "",
        f"{record['device']}; {record['dtype']}; torch {record['torch']}; commit "
        f"{record['commit']}; `{record['command']}`. Forward + backward with gradients of the "
        f"kernels, 12 heads, 64 wide, ms, medians of {arguments.rounds} interleaved rounds; "
        "in brackets × the best of the column; the size in use is marked.",
        "",
        "| logits, queries | " + " | ".join(map(str, cases)) + " |",
        "|---" * (1 + len(cases)) + "|",
    ]
    for size in sizes:
        mark = "**" if size == present else ""
        cells = [f"{short(ms)} ({ms / best[name]:.2f})" for name, ms in found[size].items()]
        name = f"{mark}2^{size[0].bit_length() - 1}, {size[1]}{mark}"
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = arguments.out / f"{record['date']}-blocks-{'gpu' if on_gpu else 'cpu'}"
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
