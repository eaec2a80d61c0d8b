"""One cell in, its record out: Hugging Face's Trainer around a converted model."""

import importlib.metadata
import logging
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import get_int_from_env
from safetensors import SafetensorError

import tisa.hf
from tisa.devices import device_named
from tisa.hf.parameters import is_score
from tisa_lab.glue.cell import Cell
from tisa_lab.glue.reading import Data, Example, read
from tisa_lab.glue.record import Record
from tisa_lab.glue.starts import start_of
from tisa_lab.glue.tasks import Task, task_named
from tisa_lab.glue.trainer import CellTrainer, Progress, Row, length_of
from tisa_lab.record import command_line, surroundings

# The names that dropout has in the configs of the models.
DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
PACKAGES = ("transformers", "accelerate", "tokenizers", "scikit-learn", "scipy", "numpy")


@dataclass(frozen=True)
class Runner:
    """Called with a cell, it returns the cell's record. What it has is the same for all cells.

    `starts` is the folder of what cells start from (`starts.py`); None keeps nothing.
    """

    data_dir: str | Path | None = None
    device: str | None = None
    starts: str | Path | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        where_to(self.device)

    def __call__(self, cell: Cell, folder: Path | None = None) -> Record:
        """Return the record of a cell, with its start in another folder where one is given."""
        return run(
            cell, data_dir=self.data_dir, device=self.device, progress=self.progress,
            starts=folder or self.starts,
        )  # fmt: skip


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
    where_to(device)
    task = task_named(cell.task)
    data = read(task, data_dir)
    processes = started_as()
    micro, left = divmod(cell.batch_size, processes)
    if left:
        raise ValueError(
            f"batch_size: {cell.batch_size} rows cannot be shared by {processes} processes "
            "(torchrun, accelerate launch); start a number that divides it"
        )
    while True:
        try:
            return _run(cell, task, data, micro, device, progress, starts)
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


def started_as() -> int:
    """Return how many processes torchrun or accelerate started to run each cell together."""
    return get_int_from_env(["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"], 1)


def make_start(
    cell: Cell, starts: str | Path, *, data_dir: str | Path | None = None, device: str | None = None
) -> dict[str, Any] | None:
    """Keep what a cell starts from in the folder `starts`; return what is known of it.

    None where there is nothing to keep: all but fitted kernels are made in a moment.
    """
    place = where_to(device)
    if cell.init != "fit":
        return None
    task = task_named(cell.task)
    tokenizer, model, length = _stock(cell, task)
    train = tokenized(read(task, data_dir).train[: cell.train_rows], task, tokenizer, length)
    model.to(place)
    return start_of(cell, model, tokenizer, train, starts).config.tisa["fitted"]


def where_to(device: str | None) -> torch.device:
    """Return the device that cells are trained on: a GPU where there is one, unless told."""
    place = device_named(device)
    # Trainer takes the first GPU that it sees.
    if str(place) not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device!r}")
    return place


def _run(
    cell: Cell,
    task: Task,
    data: Data,
    micro: int,
    device: str | None,
    progress: Progress | None,
    starts: str | Path | None,
) -> Record:
    started = time.perf_counter()
    tokenizer, model, length = _stock(cell, task)
    train = tokenized(data.train[: cell.train_rows], task, tokenizer, length)
    # By length, so that dev batches have no padding to speak of; no metric asks for the order.
    dev = {
        suffix: sorted(tokenized(rows, task, tokenizer, length), key=length_of)
        for suffix, rows in data.dev.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = trainer_arguments(cell, micro, len(train), device, folder)
        model.to(arguments.device)
        # Now: the checkout may be another one when the run ends.
        where = made_on(arguments.device)
        prepared = time.perf_counter()
        model = start_of(cell, model, tokenizer, train, starts)
        fitted = time.perf_counter()
        trainer = CellTrainer(cell, task, model, arguments, train, dev, tokenizer, progress)
        done = trainer.train()
        if not trainer.evaluations or trainer.evaluations[-1]["step"] != done.global_step:
            trainer.evaluate()
    evaluations = trainer.evaluations
    if not all(map(math.isfinite, (done.training_loss, *evaluations[-1].values()))):
        raise ArithmeticError(
            f"{cell.label}: the loss is {done.training_loss}; lower learning_rate "
            f"({cell.learning_rate:g})"
        )
    ended = time.perf_counter()
    return Record(
        cell=cell,
        metrics={k: v for k, v in evaluations[-1].items() if k not in ("step", "epoch")},
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
        rows=row_counts(train, dev, data),
        surroundings=where,
        start=getattr(model.config, "tisa", {}).get("fitted"),
    )


def row_counts(train: list[Row], dev: dict[str, list[Row]], data: Data) -> dict[str, int]:
    """Return how many rows are trained and evaluated on, and how many nobody can read (QQP)."""
    return {
        "train": len(train),
        **{f"dev{suffix}": len(rows) for suffix, rows in dev.items()},
        **({"left_out": data.left_out} if data.left_out else {}),
    }


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


def _stock(cell: Cell, task: Task) -> tuple[Any, Any, int]:
    """Return the tokenizer, the model with a new head of the seed, and how many tokens it takes."""
    transformers.set_seed(cell.seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(cell.model)
    model = stock_model(cell, task)
    return tokenizer, model, min(cell.max_length, tisa.hf.calibration.length_limit(model))


def stock_model(cell: Cell, task: Task) -> Any:
    """Return the published model with a new head for the task, or say why there is none."""
    config = transformers.AutoConfig.from_pretrained(
        cell.model, num_labels=max(1, len(task.labels))
    )
    config.problem_type = "regression" if task.is_regression else "single_label_classification"
    if cell.dropout is not None:
        for name in DROPOUT:
            if hasattr(config, name):
                setattr(config, name, cell.dropout)
    check_head(cell.model, config)
    auto = transformers.AutoModelForSequenceClassification
    try:
        with _quiet():
            return auto.from_pretrained(cell.model, config=config, dtype=torch.float32)
    except SafetensorError as broken:
        raise ValueError(
            f"model: the weights of {cell.model} are truncated or corrupted ({broken}); download "
            "them again"
        ) from None


def check_head(model: str, config: Any) -> None:
    """Refuse a model that cannot classify texts."""
    if type(config) not in transformers.AutoModelForSequenceClassification._model_mapping:
        raise ValueError(
            f"model: {model} is a {config.model_type}, for which transformers has no "
            "classification head; take an encoder such as BERT, RoBERTa or ALBERT"
        )


def tokenized(examples: list[Example], task: Task, tokenizer: Any, length: int) -> list[Row]:
    """Return each example's tokens and label; longer texts are cut."""
    texts = [list(part) for part in zip(*(e.texts for e in examples), strict=True)]
    encoded = tokenizer(*texts, truncation=True, max_length=length)
    kept = [name for name in ("input_ids", "token_type_ids") if name in encoded]
    return [
        {
            **{name: encoded[name][i] for name in kept},
            "labels": example.label if task.is_regression else int(example.label),
        }
        for i, example in enumerate(examples)
    ]


def total_steps(cell: Cell, rows: int) -> int:
    """Return how many steps a cell takes with that many training rows."""
    return cell.steps or max(1, math.ceil(cell.epochs * math.ceil(rows / cell.batch_size)))


def trainer_arguments(cell: Cell, micro: int, rows: int, device: str | None, folder: str) -> Any:
    """Return the Trainer's settings for a cell: so many rows at a time, of so many in all."""
    steps = total_steps(cell, rows)
    place = where_to(device)
    on_gpu = place.type == "cuda"
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=cell.batch_size // (micro * started_as()),
        per_device_eval_batch_size=max(micro, 64),
        learning_rate=cell.learning_rate,
        weight_decay=cell.weight_decay,
        warmup_steps=round(cell.warmup * steps),
        lr_scheduler_type="linear",
        seed=cell.seed,
        use_cpu=not on_gpu,
        bf16=is_bf16(place),
        eval_strategy="steps",
        eval_steps=math.ceil(steps / cell.evaluations),
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


def counts(model: Any) -> dict[str, int]:
    """Return how many parameters a model has, trains, and has for positions."""
    found = {"all": 0, "trained": 0, "scores": 0}
    for name, parameter in model.named_parameters():
        found["all"] += parameter.numel()
        found["trained"] += parameter.numel() * parameter.requires_grad
        found["scores"] += parameter.numel() * is_score(name)
    return found


class _quiet:  # noqa: N801
    """Keeps transformers from saying that the head is new, and from a bar in the live view."""

    def __enter__(self) -> None:
        self.verbosity = transformers.logging.get_verbosity()
        self.bar = transformers.logging.is_progress_bar_enabled()
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        transformers.logging.set_verbosity(self.verbosity)
        if self.bar:
            transformers.logging.enable_progress_bar()
