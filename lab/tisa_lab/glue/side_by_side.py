"""Cells in, their records out: trained side by side as one batched model (`tisa_lab.glue.stack`).

The numbers are those of `training.run` up to rounding: the same weights at the start, the same rows
in the same order, the same optimiser, the gradient of each cell clipped by its own norm. With
dropout they are as good and not the same, since its chance falls differently. Nothing waits for the
device but evaluations: rows are on it, and what a step needs to know of them is known here.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional as F  # noqa: N812

import tisa.hf
from tisa.shapes import Float, Tensor
from tisa_lab.glue.cell import Cell
from tisa_lab.glue.metrics import score
from tisa_lab.glue.record import Record
from tisa_lab.glue.rows import Order, by_tokens, prepared
from tisa_lab.glue.stack import Stack
from tisa_lab.glue.starts import start_of
from tisa_lab.glue.summary import VARIANT
from tisa_lab.glue.tasks import Task, task_named
from tisa_lab.glue.trainer import Progress
from tisa_lab.glue.training import (
    counts,
    is_bf16,
    made_on,
    stock_model,
    total_steps,
    where_to,
)

# Tokens of all cells together that are evaluated at once.
EVALUATED = 2**18
# As Trainer has it.
MAX_NORM = 1.0


def kind_of(cell: Cell) -> tuple[Any, ...]:
    """Return what cells trained side by side have in common: all but the variant and the seed."""
    return tuple(v for name, v in asdict(cell).items() if name not in (*VARIANT, "seed"))


def run_stack(
    cells: Sequence[Cell],
    *,
    data_dir: str | Path | None = None,
    device: str | None = None,
    progress: Progress | None = None,
    starts: str | Path | None = None,
) -> list[Record | Exception]:
    """Return the record of each cell, or why there is none; one that fails harms no other.

    Args:
        cells: what to run; of one kind (`kind_of`).
        data_dir: folder of official GLUE files; None is the hub.
        device: "cpu" or "cuda"; None takes a GPU where there is one.
        progress: called with (steps done, steps).
        starts: folder in which fitted kernels are kept for other seeds; None keeps none.
    """
    assert len({kind_of(cell) for cell in cells}) == 1
    if cells[0].batches != "padded":
        raise ValueError(
            f"batches: cells side by side have padded ones, got {cells[0].batches}; take another "
            "executor"
        )
    return _Training(list(cells), data_dir, where_to(device), progress, starts).outcomes()


class _Training:
    """One stack from its start to its records."""

    def __init__(
        self,
        cells: list[Cell],
        data_dir: Any,
        device: torch.device,
        progress: Progress | None,
        starts: Any,
    ) -> None:
        self.started = time.perf_counter()
        # Now: the checkout may be another one when the run ends.
        self.where = {**made_on(device), "stacked": len(cells)}
        self.cells = cells
        self.cell = cells[0]
        self.task = task_named(self.cell.task)
        self.device = device
        self.data_dir = data_dir
        self.progress = progress
        self.starts = starts
        self.failed: dict[int, Exception] = {}
        self.evaluations: list[list[dict[str, float]]] = [[] for _ in cells]
        self.counts: list[dict[str, int]] = [{} for _ in cells]
        self.about_start: list[dict[str, Any] | None] = [None for _ in cells]
        self.converting = [0.0 for _ in cells]
        self.evaluating = 0.0
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=is_bf16(device))

    def outcomes(self) -> list[Record | Exception]:
        self._build()
        built = time.perf_counter()
        losses, order = self._train()
        trained = time.perf_counter()
        share = 1 / len(self.cells)
        outcomes: list[Record | Exception] = []
        for number, cell in enumerate(self.cells):
            loss = float(losses[number])
            evaluations = self.evaluations[number]
            if number not in self.failed and not math.isfinite(loss):
                self._diverged(number, loss)
            if number in self.failed:
                outcomes.append(self.failed[number])
                continue
            record = Record(
                cell=cell,
                metrics={k: v for k, v in evaluations[-1].items() if k not in ("step", "epoch")},
                evaluations=evaluations,
                steps=self.steps,
                tokens=order.tokens_of(number),
                # Its share of what all took together; the conversion is its own.
                seconds={
                    "total": round(
                        self.converting[number]
                        + (trained - self.started - sum(self.converting)) * share,
                        3,
                    ),
                    "convert": round(self.converting[number], 3),
                    "train": round((trained - built - self.evaluating) * share, 3),
                    "evaluate": round(self.evaluating * share, 3),
                },
                micro_batch_size=cell.batch_size,
                parameters=self.counts[number],
                data=self.data.fingerprint,
                rows=self.data.counts,
                surroundings=self.where,
                start=self.about_start[number],
            )
            outcomes.append(record)
        return outcomes

    def _build(self) -> None:
        """Make every cell's model, as `training.run` does, and put it into the stack."""
        self.stack: Stack | None = None
        for seed in dict.fromkeys(cell.seed for cell in self.cells):
            transformers.set_seed(seed)
            stock = stock_model(self.cell, self.task)
            # Every cell of a seed goes on from here, as if it were alone.
            state = _random_state()
            stock.to(self.device)
            if self.stack is None:
                length = min(self.cell.max_length, tisa.hf.calibration.length_limit(stock))
                self.data = prepared(
                    self.cell.model, self.task, length, self.cell.train_rows, self.data_dir,
                    self.device,
                )  # fmt: skip
                self.stack = Stack(
                    stock,
                    len(self.cells),
                    num_kernels=max(cell.num_kernels for cell in self.cells),
                    fold=any(cell.fold for cell in self.cells),
                    kept=self.data.tokens,
                )
            for number, cell in enumerate(self.cells):
                if cell.seed != seed:
                    continue
                begun = time.perf_counter()
                _set_random_state(state)
                try:
                    model = start_of(
                        cell, stock, self.data.tokenizer, self.data.train_rows, self.starts
                    )
                except torch.OutOfMemoryError:
                    raise
                except Exception as wrong:
                    self.failed[number] = RuntimeError(f"{type(wrong).__name__}: {wrong}")
                    model = stock
                self.stack.put(number, model)
                self.counts[number] = counts(model)
                self.about_start[number] = getattr(model.config, "tisa", {}).get("fitted")
                self.converting[number] = time.perf_counter() - begun

    def _train(self) -> tuple[Tensor, Order]:
        """Return the mean loss of each cell, and the order that its rows had."""
        assert self.stack is not None
        rows = self.data.train
        self.steps = total_steps(self.cell, len(self.data.train_rows))
        every = math.ceil(self.steps / self.cell.evaluations)
        optimizer = torch.optim.AdamW(
            self.stack.groups(
                lr=self.cell.learning_rate,
                scores_lr=self.cell.scores_learning_rate,
                weight_decay=self.cell.weight_decay,
            ),
            lr=self.cell.learning_rate,
            fused=True,
        )
        schedule = transformers.get_linear_schedule_with_warmup(
            optimizer, round(self.cell.warmup * self.steps), self.steps
        )
        order = Order(self.cells, rows)
        total = torch.zeros(len(self.cells), device=self.device)
        self.stack.train()
        for step, (index, longest, padded) in zip(range(1, self.steps + 1), order, strict=False):
            if self.progress is not None:
                self.progress(step - 1, self.steps)
            given, labels = rows.batch(index, longest, padded)
            with self.autocast:
                logits = self.stack(**given)
            loss = row_losses(self.task, logits, labels).mean(1)
            loss.sum().backward()
            total += loss.detach()
            self.stack.clip_gradients(MAX_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step % every == 0 or step == self.steps:
                self._evaluate(step)
        return (total / self.steps).cpu(), order

    @torch.no_grad()
    def _evaluate(self, step: int) -> None:
        assert self.stack is not None
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        found: list[dict[str, float]] = [{} for _ in self.cells]
        self.stack.eval()
        for suffix, rows in self.data.dev.items():
            parts = []
            for index, longest, padded in by_tokens(rows, EVALUATED // len(self.cells)):
                given, _ = rows.batch(index, longest, padded)
                with self.autocast:
                    parts.append(self.stack(**given).float())
            logits = torch.cat(parts, 1)
            losses = row_losses(self.task, logits, rows.labels.unsqueeze(0)).mean(1).tolist()
            labels = rows.labels.cpu().numpy()
            for number, predictions in enumerate(logits.cpu().numpy()):
                if number in self.failed:
                    continue
                if not math.isfinite(losses[number]):
                    self._diverged(number, losses[number])
                    continue
                metrics = score(self.task, predictions, labels)
                found[number] |= {
                    f"{name}{suffix}": value
                    for name, value in {"loss": losses[number], **metrics}.items()
                }
        steps_per_epoch = math.ceil(len(self.data.train_rows) / self.cell.batch_size)
        at = {"step": step, "epoch": round(step / steps_per_epoch, 4)}
        for number, metrics in enumerate(found):
            self.evaluations[number].append({**at, **metrics})
        self.stack.train()
        self.evaluating += time.perf_counter() - started

    def _diverged(self, number: int, loss: float) -> None:
        cell = self.cells[number]
        self.failed[number] = ArithmeticError(
            f"{cell.label}: the loss is {loss}; lower learning_rate ({cell.learning_rate:g})"
        )


def row_losses(
    task: Task, logits: Float[Tensor, "models rows labels"], labels: Tensor
) -> Float[Tensor, "models rows"]:
    """Return the loss of each row: squared error, or cross-entropy, in float32."""
    labels = labels.expand(logits.shape[:2])
    if task.is_regression:
        return F.mse_loss(logits.float().squeeze(-1), labels, reduction="none")
    return F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none")


def _random_state() -> tuple[Tensor, list[Tensor]]:
    return torch.get_rng_state(), torch.cuda.get_rng_state_all()


def _set_random_state(state: tuple[Tensor, list[Tensor]]) -> None:
    torch.set_rng_state(state[0])
    torch.cuda.set_rng_state_all(state[1])
