"""Cells in, their records out: trained side by side as one batched model (`stack.py`).

The numbers are those of `training.run` up to rounding: the same weights at the start, the same rows
in the same order, the same optimiser, the gradient of each cell clipped by its own norm. With
dropout they are as good and not the same, since its chance falls differently. Nothing waits for the
device but evaluations: rows are on it, and what a step needs to know of them is known here.
"""

import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch.nn import functional as F  # noqa: N812

import tisa.hf
from tisa.shapes import Float, Tensor
from tisa_lab.executors import IDLE, Finished, outcome
from tisa_lab.glue.batches import Order, by_tokens, prepared
from tisa_lab.glue.cell import Cell, Record
from tisa_lab.glue.stack import Stack, reason_against_stacking
from tisa_lab.glue.starts import config_named, start_of, stock_model
from tisa_lab.glue.tasks import Task, score, task_named
from tisa_lab.glue.training import Runner, counts, diverged, is_bf16, made_on, metrics_of

# Tokens of all cells together that are evaluated at once.
EVALUATED = 2**18
# As Trainer has it.
MAX_NORM = 1.0


class Stacked:
    """Stacks of cells, one after another, in this process."""

    def __init__(self, runner: Runner, size: int = 32) -> None:
        if size < 1:
            raise ValueError(f"stack must be 1 or more, got {size}")
        self.runner = runner
        self.size = size
        self._waiting: list[Cell] = []

    def free(self) -> int:
        """Return the size of a stack, or 0 where cells wait to be run."""
        return 0 if self._waiting else self.size

    def submit(self, cell: Cell) -> None:
        """Take a cell, to be run when results are asked for."""
        self._waiting.append(cell)

    def collect(self) -> list[Finished]:
        """Run a stack of the cells that wait."""
        if not self._waiting:
            time.sleep(IDLE)
            return []
        together, *others = stacks(self._waiting, self.size)
        self._waiting = [cell for stack in others for cell in stack]
        return self._run(together)

    def close(self) -> None:
        """Do nothing: nothing runs between two calls."""

    def _run(self, cells: list[Cell]) -> list[Finished]:
        try:
            outcomes = run_stack(cells, self.runner)
            return list(zip(cells, outcomes, strict=True))
        except torch.OutOfMemoryError:
            logging.getLogger(__name__).warning(
                "%s and %d more: out of memory; again, half of them at a time",
                cells[0].label, len(cells) - 1,
            )  # fmt: skip
        except Exception as wrong:
            told = RuntimeError(f"{type(wrong).__name__}: {wrong}")
            return [(cell, told) for cell in cells]
        # Outside of the handler, whose traceback holds on to the tensors.
        torch.cuda.empty_cache()
        if len(cells) == 1:
            # Alone it can be run with a part of its batch at a time.
            return [(cells[0], outcome(self.runner, cells[0]))]
        half = len(cells) // 2
        return self._run(cells[:half]) + self._run(cells[half:])


def stacks(cells: Sequence[Cell], size: int) -> list[list[Cell]]:
    """Return the cells in stacks of at most `size`: what is trained side by side.

    A stack has cells of one kind: they may differ in their positions, their kernels and their
    seed. Cells of one seed share their batches, and those of several are padded to the longest of
    them; so seeds are kept whole, several to a stack where they fit. Stacks come in the order of
    their first cells: a grid is completed seed by seed.
    """
    place = {cell: number for number, cell in enumerate(cells)}
    kinds: dict[object, dict[int, list[Cell]]] = {}
    for cell in cells:
        kinds.setdefault((cell.model, cell.task, cell.recipe), {}).setdefault(cell.seed, []).append(
            cell
        )
    made: list[list[Cell]] = []
    for seeds in kinds.values():
        stack: list[Cell] = []
        for alike in seeds.values():
            if stack and len(stack) + len(alike) > size:
                made.append(stack)
                stack = []
            if len(alike) > size:
                each = math.ceil(len(alike) / math.ceil(len(alike) / size))
                made += [alike[i : i + each] for i in range(0, len(alike), each)]
            else:
                stack = stack + alike
        if stack:
            made.append(stack)
    return sorted(made, key=lambda stack: place[stack[0]])


def check_stackable(models: Sequence[str]) -> None:
    """Refuse models that cannot be stacked."""
    for model in models:
        reason = reason_against_stacking(config_named(model))
        if reason is not None:
            raise ValueError(
                f"model: cells of {model} cannot be trained side by side: {reason}; take another "
                "executor (in-process, pool)"
            )


def run_stack(cells: Sequence[Cell], runner: Runner) -> list[Record | Exception]:
    """Return the record of each cell, or why there is none; one that fails harms no other.

    All of them have the same model, task and recipe.
    """
    assert len({(cell.model, cell.task, cell.recipe) for cell in cells}) == 1
    if cells[0].recipe.batches != "padded":
        raise ValueError(
            f"batches must be padded for cells side by side, got {cells[0].recipe.batches}; take "
            "another executor"
        )
    return _Training(list(cells), runner).outcomes()


class _Training:
    """One stack from its start to its records."""

    def __init__(self, cells: list[Cell], runner: Runner) -> None:
        self.started = time.perf_counter()
        # Now: the checkout may be another one when the run ends.
        self.where = {**made_on(runner.place), "stacked": len(cells)}
        self.cells = cells
        self.cell = cells[0]
        self.task = task_named(self.cell.task)
        self.recipe = self.cell.recipe
        self.device = runner.place
        self.runner = runner
        self.failed: dict[int, Exception] = {}
        self.evaluations: list[list[dict[str, float]]] = [[] for _ in cells]
        self.counts: list[dict[str, int]] = [{} for _ in cells]
        self.about_start: list[dict[str, Any] | None] = [None for _ in cells]
        self.converting = [0.0 for _ in cells]
        self.evaluating = 0.0
        self.autocast = torch.autocast(
            self.device.type, torch.bfloat16, enabled=is_bf16(self.device)
        )

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
                self.failed[number] = diverged(cell, loss)
            if number in self.failed:
                outcomes.append(self.failed[number])
                continue
            record = Record(
                cell=cell,
                metrics=metrics_of(evaluations),
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
                micro_batch_size=cell.recipe.batch_size,
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
            stock = stock_model(self.cell)
            # Every cell of a seed goes on from here, as if it were alone.
            state = _random_state()
            stock.to(self.device)
            if self.stack is None:
                length = min(self.recipe.max_length, tisa.hf.calibration.length_limit(stock))
                self.data = prepared(
                    self.cell.model, self.task, length, self.recipe.train_rows,
                    self.runner.data_dir, self.device,
                )  # fmt: skip
                self.stack = Stack(
                    stock,
                    len(self.cells),
                    num_kernels=max(cell.variant.num_kernels for cell in self.cells),
                    fold=any(cell.variant.fold for cell in self.cells),
                    kept=self.data.tokens,
                )
            for number, cell in enumerate(self.cells):
                if cell.seed != seed:
                    continue
                begun = time.perf_counter()
                _set_random_state(state)
                try:
                    model = start_of(
                        cell, stock, self.data.tokenizer, self.data.train_rows, self.runner.starts
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
        self.steps = self.recipe.total_steps(len(self.data.train_rows))
        every = math.ceil(self.steps / self.recipe.evaluations)
        optimizer = torch.optim.AdamW(
            self.stack.groups(
                lr=self.recipe.learning_rate,
                scores_lr=self.recipe.scores_learning_rate,
                weight_decay=self.recipe.weight_decay,
            ),
            lr=self.recipe.learning_rate,
            fused=True,
        )
        schedule = transformers.get_linear_schedule_with_warmup(
            optimizer, round(self.recipe.warmup * self.steps), self.steps
        )
        order = Order(self.cells, rows)
        total = torch.zeros(len(self.cells), device=self.device)
        self.stack.train()
        for step, (index, longest, padded) in zip(range(1, self.steps + 1), order, strict=False):
            if self.runner.progress is not None:
                self.runner.progress(step - 1, self.steps)
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
                    self.failed[number] = diverged(self.cells[number], losses[number])
                    continue
                metrics = score(self.task, predictions, labels)
                found[number] |= {
                    f"{name}{suffix}": value
                    for name, value in {"loss": losses[number], **metrics}.items()
                }
        steps_per_epoch = math.ceil(len(self.data.train_rows) / self.recipe.batch_size)
        at = {"step": step, "epoch": round(step / steps_per_epoch, 4)}
        for number, metrics in enumerate(found):
            self.evaluations[number].append({**at, **metrics})
        self.stack.train()
        self.evaluating += time.perf_counter() - started


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
