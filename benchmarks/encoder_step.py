"""One training step of an encoder with TISA, beside the same step without any positions.

    PYTHONPATH=. python3 benchmarks/encoder_step.py [--out FOLDER]

12 layers, 768 wide, 12 heads, length 512, batch 32, bfloat16 autocast, compiled as a whole. With
TISA every layer has its own five kernels per head, trained. Steps take turns. Compiled twice: with
CUDA graphs (mode "reduce-overhead"), where the GPU's time is what counts, and without, where the
host has to launch some 800 kernels in time.
"""

import argparse
import json
import platform
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import nn

import tisa

RESULTS = Path(__file__).parent / "results"
LAYERS, WIDTH, HEADS, LENGTH, BATCH, ROUNDS = 12, 768, 12, 512, 32, 20


class Layer(nn.Module):
    """A pre-norm transformer layer; `positions` is a scoring function or None."""

    def __init__(self, positions: nn.Module | None) -> None:
        super().__init__()
        self.positions = positions
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the hidden states after this layer."""
        shape = (*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        query, key, value = self.qkv(self.norms[0](x)).view(shape).permute(2, 0, 3, 1, 4).unbind()
        scores = band = None
        if self.positions is not None:
            scores = self.positions(x.shape[1])
            band = self.positions.band(query.dtype)
        mixed = tisa.attention(query, key, value, scores, band=band)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def step_of(positions: bool, mode: str):
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(tisa.TISA(HEADS) if positions else None) for _ in range(LAYERS)))
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    x = torch.randn(BATCH, LENGTH, WIDTH, device="cuda")

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = compiled(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measured(mode: str) -> dict:
    """Return quantiles of both steps in milliseconds, and their ratio."""
    steps = {"no positions": step_of(False, mode), "TISA": step_of(True, mode)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(4):
        for step in steps.values():
            step()
    for _ in range(ROUNDS):
        for name, step in steps.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            for _ in range(3):
                step()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / 3)
    levels = torch.tensor([0.2, 0.5, 0.8])
    found: dict = {
        name: dict(
            zip(("p20", "p50", "p80"), torch.tensor(some).quantile(levels).tolist(), strict=True)
        )
        for name, some in times.items()
    }
    return found | {"ratio": found["TISA"]["p50"] / found["no positions"]["p50"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = {
        "date": datetime.now(UTC).date().isoformat(), "device": torch.cuda.get_device_name(),
        "torch": torch.__version__, "python": platform.python_version(),
        "commit": arguments.commit, "command": "python3 benchmarks/encoder_step.py",
        "what": __doc__.split("\n\n")[2], "ms": {},
    }  # fmt: skip
    for mode in ("reduce-overhead", "default"):
        record["ms"][mode] = measured(mode)
        torch._dynamo.reset()
        path = arguments.out / f"{record['date']}-encoder-step.json"
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        print(mode, json.dumps(record["ms"][mode]), flush=True)


if __name__ == "__main__":
    main()
