"""A small TISA encoder learns a task that only position can solve.

Every token carries a letter and a question. The question is an offset: "which letter stands 3
places before me?" The letters are random, so nothing but the place of a token tells the answer. The
same encoder is trained with TISA's scores and without positions; then the curves f(k) are drawn.
"""

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import torch
from torch import nn

import tisa

try:
    import matplotlib
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
except ImportError as error:
    sys.exit(f"{error}; this example draws and shows progress: pip install 'tisa-lab'")

OFFSETS = (-3, -1, 2, 5)
LETTERS = 24
LENGTH = 40
HEADS = 4
HIDDEN = 64


def make_batch(size: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Return letters, questions, answers and which answers exist, each (size, length)."""
    letters = torch.randint(LETTERS, (size, LENGTH), generator=generator)
    questions = torch.randint(len(OFFSETS), (size, LENGTH), generator=generator)
    places = torch.arange(LENGTH) + torch.tensor(OFFSETS)[questions]
    inside = (places >= 0) & (places < LENGTH)
    answers = letters.gather(1, places.clamp(0, LENGTH - 1))
    return letters, questions, answers, inside


class Block(nn.Module):
    """A pre-norm transformer block; `scoring` is where position enters, or None."""

    def __init__(self, scoring: tisa.ScoringFunction | None) -> None:
        super().__init__()
        self.scoring = scoring
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, (batch, length, hidden) like its input."""
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, HIDDEN // HEADS))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        heads = tisa.attention(query, key, value, self.scoring)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Encoder(nn.Module):
    """Two blocks that read letters and questions and say a letter for each token."""

    def __init__(self, *, positions: bool) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, HIDDEN)
        self.questions = nn.Embedding(len(OFFSETS), HIDDEN)
        self.blocks = nn.ModuleList(Block(tisa.TISA(HEADS) if positions else None) for _ in "12")
        self.answer = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, LETTERS))

    def forward(self, letters: torch.Tensor, questions: torch.Tensor) -> torch.Tensor:
        """Return logits, (batch, length, letters)."""
        x = self.letters(letters) + self.questions(questions)
        for block in self.blocks:
            x = block(x)
        return self.answer(x)

    def parameter_groups(self) -> list[dict]:
        """Return the parameters for an optimiser: scores move faster than weights."""
        scores = [p for b in self.blocks if b.scoring is not None for p in b.scoring.parameters()]
        rest = [p for p in self.parameters() if not any(p is s for s in scores)]
        return [{"params": rest, "lr": 2e-3}, {"params": scores, "lr": 5e-2}]


def train(model: Encoder, steps: int, seed: int, on_step) -> list[tuple[int, float]]:
    """Return the accuracy on fresh sequences as training goes on, as (step, accuracy)."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameter_groups(), betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in optimizer.param_groups], steps, pct_start=0.15
    )
    history = []
    for step in range(1, steps + 1):
        letters, questions, answers, inside = make_batch(64, generator)
        logits = model(letters, questions)
        targets = answers.masked_fill(~inside, -100)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step == steps or step % max(10, steps // 40) == 0:
            history.append((step, accuracy(model, seed=10**6)))
        on_step()
    return history


@torch.no_grad()
def accuracy(model: Encoder, seed: int) -> float:
    """Return the share of right answers on 256 sequences of their own."""
    letters, questions, answers, inside = make_batch(256, torch.Generator().manual_seed(seed))
    right = model(letters, questions).argmax(-1) == answers
    return right[inside].double().mean().item()


def draw(model: Encoder, histories: dict[str, list[tuple[int, float]]], path: Path) -> list[dict]:
    """Draw every head's f(k) and both learning curves; return where each head peaks."""
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    ink, quiet, accent, mark = "#1b1f24", "#9aa4af", "#0b6e99", "#d1495b"
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(
        len(model.blocks), HEADS + 1, figsize=(13, 4.6), width_ratios=[1] * HEADS + [1.5]
    )
    offsets = torch.arange(-10, 11)
    peaks = []
    for layer, block in enumerate(model.blocks):
        curves = block.scoring.scores(offsets).detach()
        for head in range(HEADS):
            axis, curve = axes[layer, head], curves[head]
            peak = int(offsets[curve.argmax()])
            found = peak in OFFSETS and curve.max().item() > 1
            peaks.append({"layer": layer + 1, "head": head + 1, "peak": peak,
                          "height": round(curve.max().item(), 2), "asked_for": found})  # fmt: skip
            for asked in OFFSETS:
                axis.axvline(asked, color=mark, linewidth=0.8, linestyle=":", zorder=0)
            color = accent if found else quiet
            axis.plot(offsets, curve, color=color, linewidth=1.4, marker="o", markersize=2.5)
            axis.fill_between(offsets, 0, curve, color=color, alpha=0.15, linewidth=0)
            axis.margins(y=0.18)
            axis.set_title(f"layer {layer + 1}, head {head + 1}", color=ink, fontsize=9)
            if found:
                label = f"{peak:+d}".replace("-", "−")
                axis.annotate(label, (peak, curve.max()), xytext=(0, 3), color=mark, ha="center",
                              textcoords="offset points", fontweight="bold")  # fmt: skip
            if layer == len(model.blocks) - 1:
                axis.set_xlabel("offset k = key − query")
            if head == 0:
                axis.set_ylabel("score f(k)")
    grid = axes[0, 0].get_gridspec()
    for axis in axes[:, -1]:
        axis.remove()
    wide = figure.add_subplot(grid[:, -1])
    for (name, history), color in zip(histories.items(), (accent, quiet), strict=True):
        steps, shares = zip(*history, strict=True)
        wide.plot(steps, [100 * s for s in shares], color=color, linewidth=1.8)
        wide.annotate(f"{name}\n{100 * shares[-1]:.1f} %", (steps[-1], 100 * shares[-1]),
                      xytext=(-4, -28 if shares[-1] > 0.5 else 8), color=color, ha="right",
                      textcoords="offset points")  # fmt: skip
    wide.set(ylim=(0, 104), xlabel="training step", ylabel="right answers, %")
    asked = ", ".join(f"{o:+d}".replace("-", "−") for o in OFFSETS)
    figure.suptitle(
        f"“Which letter stands at offset {asked}?” — what each head learned (dotted: asked for)",
        color=ink, x=0.012, ha="left", fontsize=11, fontweight="bold",
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(path, dpi=140)
    plt.close(figure)
    return peaks


def main() -> None:
    """Train both encoders, print the comparison, write the figure and the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the results")
    parser.add_argument("--steps", type=int, default=400, help="training steps for each encoder")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps must be at least 1, got {arguments.steps}")
    arguments.out.mkdir(parents=True, exist_ok=True)

    console = Console()
    console.print(f"Each token asks for the letter at one of the offsets {OFFSETS}.")
    started = time.perf_counter()
    models, histories = {}, {}
    bar = (
        TextColumn("{task.description:18}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*bar, console=console) as progress:
        for name, positions in (("with TISA", True), ("without positions", False)):
            torch.manual_seed(arguments.seed)
            task = progress.add_task(name, total=arguments.steps)
            models[name] = Encoder(positions=positions)
            histories[name] = train(
                models[name], arguments.steps, arguments.seed, lambda t=task: progress.advance(t)
            )
    peaks = draw(models["with TISA"], histories, arguments.out / "curves.png")
    result = {
        "task": {"offsets": OFFSETS, "letters": LETTERS, "length": LENGTH},
        "accuracy": {name: history[-1][1] for name, history in histories.items()},
        "chance": 1 / LETTERS,
        "position_parameters": sum(
            p.numel() for b in models["with TISA"].blocks for p in b.scoring.parameters()
        ),
        "peaks": peaks,
        "steps": arguments.steps,
        "seed": arguments.seed,
        "seconds": round(time.perf_counter() - started, 1),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    (arguments.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")

    for name, share in result["accuracy"].items():
        console.print(f"{name:18} {100 * share:5.1f} % right", highlight=False)
    console.print(
        f"{'guessing':18} {100 * result['chance']:5.1f} %, a little more among the letters that "
        "the sequence has", highlight=False,
    )  # fmt: skip
    found = sorted({peak["peak"] for peak in peaks if peak["asked_for"]})
    console.print(
        f"{sum(peak['asked_for'] for peak in peaks)} of {len(peaks)} heads have the peak of their "
        f"f(k) at an offset that was asked for; they cover {found}", highlight=False,
    )  # fmt: skip
    console.print(f"{result['position_parameters']} position parameters, "
                  f"{result['seconds']} s; see {arguments.out / 'curves.png'}")  # fmt: skip


if __name__ == "__main__":
    main()
