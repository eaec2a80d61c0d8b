"""One cell in, its record out: Hugging Face's Trainer around a converted model."""

import importlib.metadata
import logging
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from accelerate.utils import get_int_from_env
from torch.nn import functional as F  # noqa: N812

from tisa.packages import device_named
from tisa.parameters import is_score, parameter_groups, weight_groups
from tisa_lab.glue.batches import (
    IGNORED,
    ByLength,
    Marked,
    Packer,
    Padder,
    Row,
    Share,
    TaskRows,
    length_of,
    read_packed,
    rows_of,
)
from tisa_lab.glue.cell import Cell, Record
from tisa_lab.glue.starts import start_of, stock
from tisa_lab.glue.tasks import Data, Task, read, score, task_named
from tisa_lab.record import command_line, surroundings

PACKAGES = ("transformers", "accelerate", "tokenizers", "scikit-learn", "scipy", "numpy")
# Called with (steps done, steps).
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Runner:
    """Called with a cell, it returns the cell's record. What it has is the same for all cells.

    Args:
        data_dir: folder of official GLUE files; by default the hub.
        device: cpu or cuda; by default a GPU where there is one.
        starts: folder in which fitted kernels are kept for other seeds; None keeps none.
        progress: called with (steps done, steps).
    """

    data_dir: str | Path | None = None
    device: str | None = None
    starts: str | Path | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        _ = self.place

    def __call__(self, cell: Cell, folder: Path | None = None) -> Record:
        """Return the record of a cell, with its start in another folder where one is given."""
        return run(
            cell, data_dir=self.data_dir, device=self.device, progress=self.progress,
            starts=folder or self.starts,
        )  # fmt: skip

    @property
    def place(self) -> torch.device:
        """Return the device that cells are trained on."""
        place = device_named(self.device)
        # Trainer takes the first GPU that it sees.
        if str(place) not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {self.device!r}")
        return place


def run(
    cell: Cell,
    *,
    data_dir: str | Path | None = None,
    device: str | None = None,
    progress: Progress | None = None,
    starts: str | Path | None = None,
) -> Record:
    """Return the record of one fine-tuning.

    The same cell gives the same numbers on the same machine. Where a GPU's memory is too small,
    the run begins again with half as many rows at a time and twice as many before each step.

    Args:
        cell: what to run.
        data_dir: folder of official GLUE files; None is the hub.
        device: "cpu" or "cuda"; None takes a GPU where there is one.
        progress: called with (steps done, steps).
        starts: folder in which fitted kernels are kept for other seeds; None keeps none.
    """
    runner = Runner(data_dir, device, starts, progress)
    data = read(task_named(cell.task), data_dir)
    processes = started_as()
    micro, left = divmod(cell.recipe.batch_size, processes)
    if left:
        raise ValueError(
            f"batch_size: {cell.recipe.batch_size} rows cannot be shared by {processes} processes "
            "(torchrun, accelerate launch); start a number that divides it"
        )
    while True:
        try:
            return _run(cell, data, micro, runner)
        except torch.OutOfMemoryError:
            # Of several processes the others do not know, and wait for this one.
            if micro % 2 or processes > 1:
                raise
            micro //= 2
            logging.getLogger(__name__).warning(
                "%s: out of memory; again with %d rows at a time", cell.label, micro
            )
        # Outside of the handler, whose traceback holds on to the tensors.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _run(cell: Cell, data: Data, micro: int, runner: Runner) -> Record:
    started = time.perf_counter()
    task = task_named(cell.task)
    tokenizer, model, length = stock(cell)
    rows = rows_of(data, task, tokenizer, length, cell.recipe.train_rows)
    with tempfile.TemporaryDirectory() as folder:
        arguments = trainer_arguments(cell, micro, len(rows.train), runner.place, folder)
        model.to(arguments.device)
        # Now: the checkout may be another one when the run ends.
        where = made_on(arguments.device)
        prepared = time.perf_counter()
        model = start_of(cell, model, tokenizer, rows.train, runner.starts)
        fitted = time.perf_counter()
        trainer = CellTrainer(cell, task, model, arguments, rows, tokenizer, runner.progress)
        done = trainer.train()
        if not trainer.evaluations or trainer.evaluations[-1]["step"] != done.global_step:
            trainer.evaluate()
    evaluations = trainer.evaluations
    if not all(map(math.isfinite, (done.training_loss, *evaluations[-1].values()))):
        raise diverged(cell, done.training_loss)
    ended = time.perf_counter()
    return Record(
        cell=cell,
        metrics=metrics_of(evaluations),
        evaluations=evaluations,
        steps=int(done.global_step),
        tokens=trainer.all_tokens(),
        seconds={
            "total": round(ended - started, 3),
            "convert": round(fitted - prepared, 3),
            "train": round(ended - fitted - trainer.evaluating, 3),
            "evaluate": round(trainer.evaluating, 3),
        },
        micro_batch_size=micro,
        parameters=counts(model),
        data=data.fingerprint(),
        rows=rows.counts,
        surroundings=where,
        start=getattr(model.config, "tisa", {}).get("fitted"),
    )


def make_start(
    cell: Cell, starts: str | Path, *, data_dir: str | Path | None = None, device: str | None = None
) -> dict[str, Any] | None:
    """Keep what a cell starts from in the folder `starts`; return what is known of it.

    None where there is nothing to keep: all but fitted kernels are made in a moment.
    """
    place = Runner(device=device).place
    if cell.variant.init != "fit":
        return None
    task = task_named(cell.task)
    tokenizer, model, length = stock(cell)
    rows = rows_of(read(task, data_dir), task, tokenizer, length, cell.recipe.train_rows)
    model.to(place)
    return start_of(cell, model, tokenizer, rows.train, starts).config.tisa["fitted"]


def trainer_arguments(
    cell: Cell, micro: int, rows: int, place: torch.device, folder: str
) -> transformers.TrainingArguments:
    """Return the Trainer's settings for a cell: so many rows at a time, of so many in all."""
    recipe = cell.recipe
    steps = recipe.total_steps(rows)
    on_gpu = place.type == "cuda"
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=recipe.batch_size // (micro * started_as()),
        per_device_eval_batch_size=max(micro, 64),
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        warmup_steps=round(recipe.warmup * steps),
        lr_scheduler_type="linear",
        seed=cell.seed,
        use_cpu=not on_gpu,
        bf16=is_bf16(place),
        eval_strategy="steps",
        eval_steps=math.ceil(steps / recipe.evaluations),
        save_strategy="no",
        logging_strategy="no",
        # Else each step waits for the device, to look at its loss; ours is looked at in the end.
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=on_gpu,
        accelerator_config={"non_blocking": on_gpu},
        remove_unused_columns=False,
        label_names=["labels"],
    )
    # Trainer would split each batch over all GPUs that it sees, and multiply the batch with them.
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


class CellTrainer(transformers.Trainer):
    """The Trainer with our batches, our optimiser groups, and every evaluation kept."""

    def __init__(
        self,
        cell: Cell,
        task: Task,
        model: Any,
        arguments: Any,
        rows: TaskRows,
        tokenizer: Any,
        progress: Progress | None,
    ) -> None:
        self.cell = cell
        self.task = task
        self.dev = rows.dev
        self.evaluations: list[dict[str, float]] = []
        self.evaluating = 0.0
        self.tokens = 0
        self._lengths = [length_of(row) for row in rows.train]
        self._progress = progress
        self.data_collator: Any = Padder(tokenizer)
        self._collate: Any = self.data_collator
        if cell.recipe.batches == "packed":
            read_packed(model)
            self._collate = Packer(model)
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=Marked(rows.train),
            eval_dataset=rows.dev[""],
            data_collator=self.data_collator,
            compute_loss_func=_Loss(task),
            compute_metrics=self._metrics,
        )
        self.remove_callback(transformers.PrinterCallback)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return ByLength(self._lengths, self.cell.recipe.batch_size, self.cell.seed)

    def get_train_dataloader(self) -> Any:
        """Return the batches of a pass; of several processes each has its share of every batch."""
        if self.args.world_size == 1:
            pad = self.data_collator
            self.data_collator = self._counted
            try:
                return super().get_train_dataloader()
            finally:
                self.data_collator = pad
        share = Share(
            self._get_train_sampler(),
            self.args.process_index,
            self.args.world_size,
            self.args.gradient_accumulation_steps,
        )
        return torch.utils.data.DataLoader(
            self.train_dataset, batch_sampler=share, collate_fn=self._counted,
            pin_memory=self.args.dataloader_pin_memory,
        )  # fmt: skip

    def _metrics(self, found: Any) -> dict[str, float]:
        # Trainer's own mean of the loss is that of batches, and of processes with rows for filling.
        logits, labels = (torch.as_tensor(x) for x in (found.predictions, found.label_ids))
        loss = _Loss(self.task)(SimpleNamespace(logits=logits), labels)
        return {"loss": float(loss), **score(self.task, found.predictions, found.label_ids)}

    def _counted(self, rows: list[Row]) -> dict[str, Any]:
        # Counted here: to add up the mask on a device would be to wait for it in every step.
        counted = (length_of(row) for row in rows if row["labels"] != IGNORED)
        return {**self._collate(rows), "tokens": sum(counted)}

    def create_optimizer(self, model: Any = None) -> Any:
        """Return AdamW with the scores in a group of their own."""
        model = self.model if model is None else model
        recipe = self.cell.recipe
        rates = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay}
        if any(is_score(name) for name, p in model.named_parameters() if p.requires_grad):
            groups = parameter_groups(model, scores_lr=recipe.scores_learning_rate, **rates)
        else:
            groups = weight_groups(model, **rates)
        # One kernel for all parameters; on a CPU it would be no faster.
        fused = self.args.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, fused=fused)
        return self.optimizer

    def training_step(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        """Return the loss of one step, and count its tokens."""
        self.tokens += inputs.pop("tokens")
        if self._progress is not None:
            self._progress(self.state.global_step, self.state.max_steps)
        return super().training_step(model, inputs, *more, **named)

    def all_tokens(self) -> int:
        """Return how many tokens all processes together were trained on."""
        own = torch.tensor(self.tokens, device=self.args.device)
        return int(self.accelerator.reduce(own, reduction="sum"))

    def evaluate(self, *arguments: Any, **named: Any) -> dict[str, float]:
        """Return the metrics of all dev sets, and keep them."""
        started = time.perf_counter()
        found: dict[str, float] = {}
        for suffix, rows in self.dev.items():
            answer = super().evaluate(rows)
            found |= {
                f"{name.removeprefix('eval_')}{suffix}": value
                for name, value in answer.items()
                if not name.endswith(("_runtime", "_per_second")) and name != "epoch"
            }
        epoch = round(float(self.state.epoch or 0.0), 4)
        self.evaluations.append({"step": self.state.global_step, "epoch": epoch, **found})
        self.evaluating += time.perf_counter() - started
        return found


class _Loss:
    """The mean loss of a step's rows, whichever way they are divided into pieces and processes.

    The models' own is the mean of each piece, and Trainer adds those up.
    """

    def __init__(self, task: Task) -> None:
        self.is_regression = task.is_regression

    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        logits = outputs.logits.float()
        if self.is_regression:
            counted = labels != IGNORED
            total = (counted * (logits.squeeze(-1) - labels) ** 2).sum()
        else:
            total = F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)
        return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def started_as() -> int:
    """Return how many processes torchrun or accelerate started to run each cell together."""
    return get_int_from_env(["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"], 1)


def is_bf16(device: torch.device) -> bool:
    """Return whether cells are trained in bfloat16 there: on GPUs that have it."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported()


def made_on(device: torch.device) -> dict[str, Any]:
    """Return what a record says of where it was made, and with what."""
    return {
        **surroundings(command_line(), device),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "precision": "bf16" if is_bf16(device) else "float32",
        "threads": torch.get_num_threads(),
        "processes": started_as(),
    }


def metrics_of(evaluations: list[dict[str, float]]) -> dict[str, float]:
    """Return the metrics of the last evaluation, without its place."""
    return {k: v for k, v in evaluations[-1].items() if k not in ("step", "epoch")}


def diverged(cell: Cell, loss: float) -> ArithmeticError:
    """Return what is said of a cell whose loss is not a number any more."""
    rate = cell.recipe.learning_rate
    return ArithmeticError(f"{cell.label}: the loss is {loss}; lower learning_rate ({rate:g})")


def counts(model: Any) -> dict[str, int]:
    """Return how many parameters a model has, trains, and has for positions."""
    found = {"all": 0, "trained": 0, "scores": 0}
    for name, parameter in model.named_parameters():
        found["all"] += parameter.numel()
        found["trained"] += parameter.numel() * parameter.requires_grad
        found["scores"] += parameter.numel() * is_score(name)
    return found
