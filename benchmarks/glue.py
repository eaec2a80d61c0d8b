"""Fine-tuning on GLUE: our batches beside stock ones, S = 5 beside S = 0, stacked cells.

    PYTHONPATH=.:lab python3 benchmarks/glue.py MODEL GLUE [--out FOLDER] [--commit COMMIT]

MODEL is all-MiniLM-L6-v2 (any BERT with its tokenizer), GLUE a folder of official files with SST-2
and MNLI/train_10k.tsv. Two sizes: MODEL with 32 rows a step, where the host has to launch kernels
in time, and a BERT of base size with random weights and many rows, where the GPU has something to
do. Stock is `transformers.Trainer` with `DataCollatorWithPadding` and its defaults; all have the
same rows a step, bfloat16 autocast on a GPU, AdamW, and nothing compiled. The variants take turns,
several rounds of the same batches; a first round, in which every shape is met for the first time
and kernels are chosen or compiled for it, does not count, nor do the first steps of a round.
"""

import argparse
import copy
import json
import platform
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

import tisa.hf
from tisa_lab.executors import InProcess
from tisa_lab.glue.batches import Packer, Padder, TaskRows, read_packed, tokenized
from tisa_lab.glue.cell import Cell, grid
from tisa_lab.glue.stacked import Stacked
from tisa_lab.glue.starts import start_of, stock_model
from tisa_lab.glue.tasks import read, task_named
from tisa_lab.glue.training import CellTrainer, Runner, trainer_arguments
from tisa_lab.record import surroundings

RESULTS = Path(__file__).parent / "results"
# Examples per second over stock's, step time of S = 5 over S = 0, cells per hour.
GOALS = {"examples": 1.5, "step": 1.05, "cells": 5.0}
WARM = 4
ROWS = 20_000
DEV_ROWS = 8


def changed(cell: Cell, **values: Any) -> Cell:
    """Return a cell with other values, each by its own name."""
    return Cell.of(**{**cell.values(), **values})


class Clock(transformers.TrainerCallback):
    """Knows when the steps that count began and ended, with nothing left to do on the device."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Look at the clock after the last warm-up step and after the last one."""
        if state.global_step in (WARM, self.last):
            if args.device.type == "cuda":
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())


class Bench:
    """One model and task: how long each variant's steps take."""

    def __init__(self, model: Any, cell: Cell, data_dir: Path, tokenizer: Any, device: str) -> None:
        self.task = task_named(cell.task)
        self.cell = cell
        self.device = device
        self.tokenizer = tokenizer
        data = read(self.task, data_dir)
        # Every so many: lengths as in all of them.
        every = max(1, len(data.train) // ROWS)
        self.train = tokenized(
            data.train[::every][:ROWS], self.task, tokenizer, cell.recipe.max_length
        )
        dev = next(iter(data.dev.values()))[:DEV_ROWS]
        self.dev = {"": tokenized(dev, self.task, tokenizer, cell.recipe.max_length)}
        cells = {
            "ours": cell,
            "ours, packed": changed(cell, batches="packed"),
            "ours, S = 5": changed(cell, num_kernels=5, init="reference"),
            "ours, packed, S = 5": changed(cell, num_kernels=5, init="reference", batches="packed"),
        }
        self.models = {"stock": (None, copy.deepcopy(model))}
        for name, own in cells.items():
            made = start_of(own, copy.deepcopy(model), tokenizer, self.train)
            self.models[name] = (own, made)

    def gate(self) -> float:
        """Return how far logits lie from stock's, padded and packed; too far is an error."""
        rows = self.train[: self.cell.recipe.batch_size]
        stock = self.models["stock"][1]
        converted = tisa.hf.convert(stock, positions="keep", num_kernels=0, init="zero")
        read_packed(converted)
        place = torch.device(self.device)
        calls = [
            (stock, Padder(self.tokenizer)(rows)),
            (converted, Padder(self.tokenizer)(rows)),
            (converted, Packer(converted)(rows)),
        ]
        found = []
        for model, batch in calls:
            batch.pop("labels")
            given = {
                name: tuple(x.to(place) if isinstance(x, torch.Tensor) else x for x in value)
                if isinstance(value, tuple)
                else value.to(place)
                for name, value in batch.items()
            }
            with (
                torch.no_grad(),
                torch.autocast(place.type, torch.bfloat16, enabled=place.type == "cuda"),
            ):
                found.append(model.eval().to(place)(**given).logits.float())
        apart = max(float((f - found[0]).abs().max() / found[0].abs().max()) for f in found[1:])
        if apart > 0.05:
            raise SystemExit(f"logits differ by {apart:.3f} of the largest: nothing is measured")
        return apart

    def steps(self, name: str, steps: int, seed: int) -> dict[str, float]:
        """Return examples per second and milliseconds per step of one variant in one round."""
        own, model = self.models[name]
        clock = Clock(WARM + steps)
        with tempfile.TemporaryDirectory() as folder:
            if own is None:
                trainer = self._stock(model, WARM + steps, seed, folder)
            else:
                cell = changed(own, seed=seed, steps=WARM + steps, evaluations=1)
                arguments = trainer_arguments(
                    cell, cell.recipe.batch_size, len(self.train), torch.device(self.device), folder
                )
                rows = TaskRows(self.train, self.dev, {})
                trainer = CellTrainer(cell, self.task, model, arguments, rows, self.tokenizer, None)
            trainer.add_callback(clock)
            trainer.train()
        seconds = clock.times[1] - clock.times[0]
        return {
            "examples_per_second": steps * self.cell.recipe.batch_size / seconds,
            "ms_per_step": 1000 * seconds / steps,
        }

    def _stock(self, model: Any, steps: int, seed: int, folder: str) -> Any:
        recipe = self.cell.recipe
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=steps, seed=seed, use_cpu=self.device == "cpu",
            per_device_train_batch_size=recipe.batch_size, bf16=self.device == "cuda",
            learning_rate=recipe.learning_rate, weight_decay=recipe.weight_decay,
            report_to="none", save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in self.train]
        return transformers.Trainer(
            model=model, args=arguments, train_dataset=rows,
            data_collator=transformers.DataCollatorWithPadding(self.tokenizer),
        )  # fmt: skip


def throughput(arguments: argparse.Namespace, write: Any) -> dict[str, Any]:
    """Return, for each size and task, what every variant does and the ratios that count."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
    sizes: list[tuple[str, int, int]] = []
    if "base" in arguments.parts and not arguments.little:
        sizes.append(("BERT of base size", arguments.rows, max(10, arguments.steps // 3)))
    if "model" in arguments.parts:
        sizes.append(("MODEL", 32, arguments.steps))
    found: dict[str, Any] = {}
    for name, batch, steps in sizes:
        for task in ("sst-2", "mnli-10k"):
            cell = Cell.of(
                arguments.model, task, num_kernels=0, init="zero", batch_size=batch,
                learning_rate=1e-5, dropout=0.0, max_length=128,
            )  # fmt: skip
            if name == "MODEL":
                model = stock_model(cell)
            else:
                torch.manual_seed(0)
                config = transformers.BertConfig(
                    vocab_size=len(tokenizer), num_labels=len(task_named(task).labels),
                    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
                )  # fmt: skip
                model = transformers.BertForSequenceClassification(config)
            bench = Bench(
                model.to(arguments.device), cell, arguments.data, tokenizer, arguments.device
            )
            apart = bench.gate()
            rounds: dict[str, list[dict[str, float]]] = {v: [] for v in bench.models}
            for number in range(1 + arguments.rounds):
                for variant, told in rounds.items():
                    times = bench.steps(variant, steps, 0)
                    if number > 0:
                        told.append(times)
            entry: dict[str, Any] = {
                "rows a step": batch,
                "tokens a row": sum(len(r["input_ids"]) for r in bench.train) / len(bench.train),
                "logits apart": apart,
                "variants": {
                    v: {k: median(r[k] for r in told) for k in told[0]} | {"rounds": told}
                    for v, told in rounds.items()
                },
            }
            by = {v: x["ms_per_step"] for v, x in entry["variants"].items()}
            entry["ratios"] = {
                "ours over stock, examples": by["stock"] / by["ours"],
                "ours packed over stock, examples": by["stock"] / by["ours, packed"],
                "S = 5 over S = 0, step": by["ours, S = 5"] / by["ours"],
                "S = 5 over S = 0, step, packed": by["ours, packed, S = 5"] / by["ours, packed"],
            }
            found[f"{name}, {task}"] = entry
            print(f"{name}, {task}", json.dumps(entry["ratios"]), flush=True)
            write(throughput=found)
    return found


def cells_per_hour(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return how many cells an hour the stacked executor finishes, and the one in this process."""
    runner = Runner(arguments.data, arguments.device)
    # Rows of the table whose start takes no time; those of one seed share their batches.
    kernels = [f", S = {s}" for s in (1, 3, 5)]
    rows = ["baseline", *(k[2:] for k in kernels)]
    rows += [f"{place}{k}" for place in ("zeroed", "folded") for k in ("", *kernels)]
    cells = grid(
        [arguments.model], [arguments.task], rows=rows,
        seeds=range(max(1, arguments.stack // len(rows))), learning_rate=5e-5, batch_size=32,
        dropout=0.0, evaluations=1,
        **({"steps": 4} if arguments.little else {"epochs": 3.0}),
    )  # fmt: skip
    found: dict[str, Any] = {"task": arguments.task}
    places: dict[str, Any] = {
        "in-process": InProcess(runner),
        "stacked": Stacked(runner, arguments.stack),
    }
    for name, place in places.items():
        # The first cell of either pays for what is loaded once.
        some = cells[:3] if name == "in-process" else cells
        seconds, done = [], 0
        while done < len(some):
            batch = some[done : done + place.free()]
            for cell in batch:
                place.submit(cell)
            started = time.perf_counter()
            outcomes = place.collect()
            for _, outcome in outcomes:
                if isinstance(outcome, Exception):
                    raise outcome
            seconds.append((time.perf_counter() - started) / len(outcomes))
            done += len(outcomes)
        steady = seconds[1:] if len(seconds) > 1 else seconds
        found[name] = {
            "cells": len(some), "seconds_per_cell": median(steady),
            "cells_per_hour": 3600 / median(steady),
        }  # fmt: skip
        print(name, json.dumps(found[name]), flush=True)
    rates = (found["stacked"]["cells_per_hour"], found["in-process"]["cells_per_hour"])
    found["ratio"] = rates[0] / rates[1]
    return found


def markdown(record: dict[str, Any]) -> str:
    """Return the record as a page."""
    lines = ["# Fine-tuning on GLUE", "", record["what"], ""]
    where = record["where"]
    lines.append(
        f"{where['date']}, {where['device']}, torch {where['torch']}, transformers "
        f"{where['transformers']}, Python {where['python']}, commit {where['commit']}: "
        f"`{where['command']}`. Medians of {record['rounds']} rounds."
    )
    for name, entry in record.get("throughput", {}).items():
        lines += ["", f"## {name}, {entry['rows a step']} rows a step", ""]
        lines += ["| | examples/s | ms a step |", "|---|---|---|"]
        lines += [
            f"| {v} | {x['examples_per_second']:,.0f} | {x['ms_per_step']:.2f} |"
            for v, x in entry["variants"].items()
        ]
        lines.append("")
        for ratio, value in entry["ratios"].items():
            goal = GOALS["examples"] if "examples" in ratio else GOALS["step"]
            held = value >= goal if "examples" in ratio else value <= goal
            sign = "≥" if "examples" in ratio else "≤"
            lines.append(f"- {ratio}: {value:.3f} (goal {sign} {goal}: {'yes' if held else 'no'})")
    cells = record.get("cells")
    if cells:
        lines += ["", f"## Cells an hour, {cells['task']}", ""]
        for name in ("in-process", "stacked"):
            if isinstance(cells.get(name), dict):
                told = cells[name]
                lines.append(f"- {name}: {told['cells_per_hour']:,.0f} (of {told['cells']} cells)")
        if "ratio" in cells:
            held = "yes" if cells["ratio"] >= GOALS["cells"] else "no"
            lines.append(f"- stacked over in-process: {cells['ratio']:.1f} (goal ≥ 5: {held})")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stack", type=int, default=32, help="cells side by side")
    parser.add_argument("--task", default="rte", help="of the cells side by side")
    parser.add_argument("--rows", type=int, default=512, help="a step of the BERT of base size")
    parser.add_argument(
        "--parts", nargs="*", default=["cells", "base", "model"], choices=["cells", "base", "model"]
    )
    parser.add_argument("--little", action="store_true", help="only to try the script out")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    options = ("steps", "rounds", "stack", "task", "rows")
    told = " ".join(f"--{name} {getattr(arguments, name)}" for name in options)
    told += f" --parts {' '.join(arguments.parts)}"
    command = f"python3 benchmarks/glue.py MODEL GLUE {told}"
    where = surroundings(command, torch.device(arguments.device))
    where["transformers"] = transformers.__version__
    where["processor"] = platform.processor()
    where["date"] = datetime.now(UTC).date().isoformat()
    if arguments.commit:
        where["commit"] = arguments.commit
    record: dict[str, Any] = {
        "where": where, "what": " ".join(__doc__.split("\n\n")[2].split()),
        "rounds": arguments.rounds,
    }  # fmt: skip
    arguments.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()

    def write(**more: Any) -> None:
        record.update(more, seconds=round(time.perf_counter() - began, 1))
        path = arguments.out / f"{where['date']}-glue"
        path.with_suffix(".json").write_text(
            json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        path.with_suffix(".md").write_text(markdown(record), encoding="utf-8")

    if "cells" in arguments.parts:
        write(cells=cells_per_hour(arguments))
    throughput(arguments, write)
    print((arguments.out / f"{where['date']}-glue.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
