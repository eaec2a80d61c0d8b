"""A training step of the encoder with each position method, in turns, alone on the GPU.

    python3 runs/pretrain_throughput.py [--methods absolute,tisa] [--length 512] [--out FOLDER]

The goal: TISA's step at most 1.05 times that with absolute positions at 512 tokens. Steps are those
of `tisa-lab pretrain` (packed rows of the corpus, bfloat16, torch.compile, AdamW, clipping).
Compiling takes most of the time: `--rounds 0` does nothing else, for several methods
side by side beforehand.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch._dynamo

from tisa_lab.pretrain.batches import steps
from tisa_lab.pretrain.config import Length, Phase, PretrainConfig
from tisa_lab.pretrain.corpus import Corpus, PreparedCorpus
from tisa_lab.pretrain.model import WithLoss, build, parameter_groups, peak_flops, step_flops
from tisa_lab.record import command_line, surroundings

EACH = 5  # steps in a round
# As in the other runs.
OPTIONS = {"floater": {"stride": 4}, "sinusoidal": {"scale": 0.028}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("/tmp/tisa-pretrain/corpus/wiki-train"))
    parser.add_argument("--methods", default="absolute,tisa,none,near-far,rotary")
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--embedding", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--norm", default="pre")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("/tmp/tisa-pretrain/results"))
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    corpus = PreparedCorpus(arguments.data)
    # All in one process: past eight models of one class dynamo would go on without compiling.
    torch._dynamo.config.recompile_limit = 100
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    racers, found = {}, {}
    for method in arguments.methods.split(","):
        config = PretrainConfig(
            position=method, position_options=OPTIONS.get(method, {}), norm=arguments.norm,
            hidden_size=arguments.hidden, num_hidden_layers=arguments.layers,
            num_attention_heads=max(1, arguments.hidden // 64), embedding_size=arguments.embedding,
            lengths=(Length(arguments.length),), batch_tokens=arguments.batch_tokens,
        )  # fmt: skip
        racers[method] = Racer(config, corpus, device)
        for _ in range(4):
            racers[method].step()
        print(f"{method}: ready", file=sys.stderr, flush=True)
    if not arguments.rounds:
        return
    times: dict[str, list[float]] = {name: [] for name in racers}
    for _ in range(arguments.rounds):
        for name, racer in racers.items():
            times[name].append(racer.timed())
    peak = peak_flops(device)
    base = statistics.median(times["absolute"]) if "absolute" in times else None
    for name, racer in racers.items():
        p50 = statistics.median(times[name])
        work = step_flops(racer.sizes, arguments.batch_tokens, racer.places, racer.squares)
        found[name] = {
            "ms": [round(1000 * t, 3) for t in sorted(times[name])],
            "p50_ms": 1000 * p50,
            "tokens_per_second": arguments.batch_tokens / p50,
            "mfu": None if peak is None else work / p50 / peak,
            "ratio_to_absolute": None if base is None else p50 / base,
        }
        line = {k: v for k, v in found[name].items() if k != "ms"}
        print(name, json.dumps(line), flush=True)
    record = {
        "kind": "pretrain-throughput",
        "rows": found,
        "batch_tokens": arguments.batch_tokens,
        "length": arguments.length,
        "hidden": arguments.hidden,
        "embedding": arguments.embedding,
        "layers": arguments.layers,
        "norm": arguments.norm,
        "surroundings": surroundings(command_line("python3", sys.argv[0]), device),
    }  # fmt: skip
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = f"throughput-{arguments.hidden}x{arguments.layers}-{arguments.batch_tokens}.json"
    (arguments.out / name).write_text(json.dumps(record, indent=1) + "\n")


class Racer:
    """One compiled model with its optimiser, and eight steps' batches on the device."""

    def __init__(self, config: PretrainConfig, corpus: Corpus, device: torch.device) -> None:
        model = build(config, corpus.vocabulary.size)
        self.sizes, self.config, self.device = model.config, config, device
        self.model = WithLoss(model).to(device)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, config), fused=device.type == "cuda"
        )
        self.compiled = torch.compile(self.model)
        made = list(
            steps(corpus, [Phase(0, 8, config.longest)], batch_tokens=config.batch_tokens,
                  objective="mlm", mask_share=config.mask_share, seed=0)
        )  # fmt: skip
        # All of one shape: another one would be compiled anew.
        shape = made[0].batches[0].cu_seqlens.shape
        made = [s for s in made if s.batches[0].cu_seqlens.shape == shape]
        self.batches = [s.batches[0].to(device) for s in made]
        self.labels = [s.labels for s in made]
        self.squares = statistics.fmean(s.squares for s in made)
        self.places = self.batches[0].positions.shape[0]
        self.number = 0

    def step(self) -> None:
        """Train on the next batch."""
        place = self.number % len(self.batches)
        batch, self.number = self.batches[place], self.number + 1
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.compiled(
                batch.input_ids,
                batch.cu_seqlens,
                batch.positions,
                batch.labels,
                self.config.longest,
            )
        (loss / self.labels[place]).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def timed(self) -> float:
        """Return the seconds of one step, the mean of some."""
        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        wait()
        began = time.perf_counter()
        for _ in range(EACH):
            self.step()
        wait()
        return (time.perf_counter() - began) / EACH


if __name__ == "__main__":
    main()
