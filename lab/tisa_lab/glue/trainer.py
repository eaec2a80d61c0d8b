"""Hugging Face's Trainer with our batches, our optimiser groups, and every evaluation kept."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch.nn import functional as F  # noqa: N812

from tisa.hf.parameters import is_score, parameter_groups, weight_groups
from tisa_lab.glue.batches import IGNORED, ByLength, Marked, Padder, Share
from tisa_lab.glue.cell import Cell
from tisa_lab.glue.metrics import score
from tisa_lab.glue.packing import Packer, read_packed
from tisa_lab.glue.tasks import Task

Progress = Callable[[int, int], None]
# One tokenized row: input_ids, token_type_ids where there are some, and the label.
Row = dict[str, Any]


class CellTrainer(transformers.Trainer):
    """The Trainer with our batches, our optimiser groups, and every evaluation kept."""

    def __init__(
        self,
        cell: Cell,
        task: Task,
        model: Any,
        arguments: Any,
        train: list[Row],
        dev: dict[str, list[Row]],
        tokenizer: Any,
        progress: Progress | None,
    ) -> None:
        self.cell = cell
        self.task = task
        self.dev = dev
        self.evaluations: list[dict[str, float]] = []
        self.evaluating = 0.0
        self.tokens = 0
        self._lengths = [length_of(row) for row in train]
        self._progress = progress
        self.data_collator: Any = Padder(tokenizer)
        self._collate: Any = self.data_collator
        if cell.batches == "packed":
            read_packed(model)
            self._collate = Packer(model)
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=Marked(train),
            eval_dataset=dev[""],
            data_collator=self.data_collator,
            compute_loss_func=_Loss(task),
            compute_metrics=self._metrics,
        )
        self.remove_callback(transformers.PrinterCallback)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return ByLength(self._lengths, self.cell.batch_size, self.cell.seed)

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
        rates: dict[str, float] = {
            "lr": self.cell.learning_rate,
            "weight_decay": self.cell.weight_decay,
        }
        if any(is_score(name) for name, p in model.named_parameters() if p.requires_grad):
            groups = parameter_groups(model, scores_lr=self.cell.scores_learning_rate, **rates)
        else:
            groups = weight_groups(model, **rates)
        # One kernel for all parameters; on a CPU it would be no faster.
        fused = self.args.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=self.cell.learning_rate, fused=fused)
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


def length_of(row: Row) -> int:
    """Return how many tokens a row has."""
    return len(row["input_ids"])
