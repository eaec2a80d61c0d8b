"""One run from top to bottom: a config and a corpus in, a trained model and its record out.

`run` checks, opens or goes on (`Training`), trains, and writes what is left. Underneath is
`accelerate`: started by its launcher or by torchrun, the same call trains on several processes
(DDP, FSDP2 by its config). The loss is a sum over labels divided by the number of labels of all
processes and micro-batches, so that what they share does not change what is computed. A loss that
is no number ends a run and is its result.
"""

import math
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tisa.store import CODE
from tisa_lab.pretrain import asking, checkpoints
from tisa_lab.pretrain.batches import (
    NO_LABEL,
    Batch,
    Share,
    Step,
    ahead,
    steps,
    validation_batches,
)
from tisa_lab.pretrain.config import PretrainConfig, RunSettings
from tisa_lab.pretrain.corpus import Corpus
from tisa_lab.pretrain.model import (
    WithLoss,
    accelerator_for,
    build,
    check_corpora,
    from_main,
    lost_process,
    micro_batches,
    observed,
    parameter_groups,
    peak_flops,
    precision_of,
    step_flops,
)
from tisa_lab.record import code, surroundings
from tisa_lab.view import Silent, spoken

DEFAULTS, SILENT = RunSettings(), Silent()
# Of the loss curve in a record.
POINTS = 400


class Diverged(Exception):  # noqa: N818
    """The loss is no number any more, or infinite."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(f"the loss is {loss} at step {step:,}; a smaller learning rate helps")
        self.step = step


def run(
    config: PretrainConfig,
    corpus: Corpus,
    out: Path,
    *,
    valid: Corpus | None = None,
    settings: RunSettings = DEFAULTS,
    view: Silent = SILENT,
    command: str = "",
    stop: Callable[[], bool] = lambda: False,
    save_tokenizer: Callable[[Path], None] = lambda folder: None,
    evaluate: asking.Evaluate | None = None,
) -> dict[str, Any] | None:
    """Return the record of the finished run, also of one that was finished before.

    A run that was interrupted goes on from its last checkpoint. None: it was told to `stop`, or
    `settings.max_seconds` are over; the checkpoint is written. The record of a run whose loss
    became no number has the step at which it did, as `diverged`, and no model beside it. What
    `evaluate` answers is `evaluated` in the record.
    """
    identity = identity_of(config, corpus, valid, settings, evaluate)
    checkpoints.check_run(out, identity)
    before = checkpoints.finished(out, identity)
    if before is not None:
        view.say(f"finished before: {out / checkpoints.RECORD}")
        return before
    check_corpora(config, corpus, valid)
    accelerator = accelerator_for(settings, config, out)
    asking.check_processes(evaluate, accelerator.num_processes)
    with checkpoints.held(out) if accelerator.is_main_process else nullcontext():
        if accelerator.is_main_process:
            checkpoints.write_run(out, identity)
        accelerator.wait_for_everyone()
        training = Training(accelerator, config, corpus, out, valid, settings, view, identity)
        more: dict[str, Any] = {}
        try:
            if not training.train(stop):
                step = training.progress.step
                view.say(f"stopped after {step:,} steps; the same command goes on")
                return None
            if evaluate is not None:
                view.say("evaluating")
                answers = evaluate(
                    training.plain.model, config, valid, corpus.vocabulary,
                    bf16=accelerator.mixed_precision == "bf16",
                )  # fmt: skip
                more = asking.told(answers, view.say)
        except Diverged as nan:
            view.say(str(nan), wrong=True)
            more = {"diverged": {"step": nan.step}}
        except torch.OutOfMemoryError as full:
            tokens = config.batch_tokens // training.share.processes // training.share.micro
            raise ValueError(
                f"out of GPU memory with {tokens:,} tokens at a time; a smaller micro_tokens takes "
                "less, and changes no result"
            ) from full
        except RuntimeError as wrong:
            step, last = training.progress.step, next(iter(checkpoints.all_of(out)), None)
            raise lost_process(wrong, step, last, training.share) from wrong
        finally:
            training.writer.settle()
        record = training.record(identity, command) | more
        checkpoints.write_outcome(
            accelerator, training.prepared, training.model, record, training.losses, out,
            save_tokenizer,
        )  # fmt: skip
    accelerator.end_training()
    # Of a few steps there is none.
    speed = record["speed"].get("tokens_per_second")
    fast = "" if speed is None else f"{speed:,.0f} tokens/s, "
    view.say(f"{fast}{spoken(training.progress.seconds)}, written to {out}")
    return record


def identity_of(
    config: PretrainConfig,
    corpus: Corpus,
    valid: Corpus | None,
    settings: RunSettings,
    evaluate: asking.Evaluate | None = None,
) -> dict[str, Any]:
    """Return all that the numbers of a run depend on."""
    return {
        **({} if evaluate is None else {asking.EVALUATE: evaluate.identity()}),
        "config": config.to_dict(),
        "corpus": corpus.fingerprint,
        "corpus_sha256": corpus.sha256,
        "tokenizer": corpus.vocabulary.fingerprint,
        "validation": None if valid is None else [valid.fingerprint, settings.valid_tokens],
        "validation_sha256": None if valid is None else valid.sha256,
        "precision": precision_of(settings),
        CODE: code(),
    }


class Training:
    """A run while it lasts: model, optimiser and progress, at the beginning or a checkpoint."""

    def __init__(
        self,
        accelerator: Any,
        config: PretrainConfig,
        corpus: Corpus,
        out: Path,
        valid: Corpus | None,
        settings: RunSettings,
        view: Silent,
        identity: dict[str, Any],
    ) -> None:
        self.accelerator, self.config, self.corpus, self.out = accelerator, config, corpus, out
        self.settings, self.view, self.began = settings, view, time.monotonic()
        self.identity = identity
        processes, device = accelerator.num_processes, accelerator.device
        micro = micro_batches(config, corpus, settings, processes)
        self.share = Share(accelerator.process_index, processes, micro)
        self.peak = settings.peak_flops or peak_flops(device)
        self.model = build(config, corpus.vocabulary.size)
        whole = WithLoss(self.model)
        positional = self.model.transformer.num_parameters()[0]
        others = sum(p.numel() for p in self.model.parameters()) - positional
        self.counts = {"positional": positional, "others": others}
        optimizer = torch.optim.AdamW(
            parameter_groups(whole, config), betas=(0.9, config.beta2), fused=device.type == "cuda"
        )
        self.prepared, self.optimizer = accelerator.prepare(whole, optimizer)
        # The same weights, not compiled: for the few forward passes of an evaluation.
        self.plain = accelerator.unwrap_model(self.prepared, keep_torch_compile=False)
        self.progress, self.losses = checkpoints.Progress(), []
        self.writer = checkpoints.Writer(accelerator, out, identity)
        # One process proves it; all begin at the same.
        warn = partial(view.say, wrong=True)
        found = from_main(accelerator, lambda: checkpoints.latest(out, identity, warn))
        if found is not None:
            self.progress, losses = checkpoints.load(accelerator, found)
            self.losses = losses.tolist()
            view.say(f"goes on from {found}")
        self.progress.note(identity[CODE], warn)
        view.begin(config.steps, self.progress.step)
        self.held_out: list[Batch] = []
        if valid is not None:
            rows = max(1, config.batch_tokens // config.longest // processes // micro)
            self.held_out = validation_batches(
                valid, config, settings.valid_tokens, rows=rows, rank=self.share.rank,
                processes=processes,
            )  # fmt: skip
        # Losses that are still on the device; (seconds, tokens, operations) since the last `fetch`.
        self._held: list[torch.Tensor] = []
        self._times: list[tuple[float, int, float]] = []
        self._since: float | None = None
        self._work = (0, 0.0)

    def train(self, stop: Callable[[], bool]) -> bool:
        """Return whether the run is finished; if it was told to stop, a checkpoint is written."""
        config, settings, progress = self.config, self.settings, self.progress
        began, before = time.monotonic(), progress.seconds
        if progress.step == 0:
            self.evaluate()
        source = ahead(
            lambda: steps(
                self.corpus, config.phases(), batch_tokens=config.batch_tokens,
                objective=config.objective, mask_share=config.mask_share, seed=config.seed,
                start=progress.step, reading=progress.reading, share=self.share,
            ),
            in_a_process=self.accelerator.device.type == "cuda",
        )  # fmt: skip
        for step in source:
            phase = next(p for p in config.phases() if progress.step < p.end)
            self.take(step, progress.step, phase.length)
            progress.step += 1
            progress.reading = step.after
            progress.seconds = before + time.monotonic() - began
            done = progress.step == config.steps
            if done or progress.step % settings.log_every == 0:
                self.tell()
            if done or progress.step % settings.evaluate_every == 0:
                self.fetch()
                self.evaluate()
                self._since = time.monotonic()
            if done:
                break
            if progress.step % settings.checkpoint_every == 0:
                self.save()
                self._since = time.monotonic()
            over = time.monotonic() - self.began > (settings.max_seconds or float("inf"))
            if self.agreed(stop() or over):
                self.save()
                return False
        return True

    def take(self, step: Step, number: int, length: int) -> None:
        """Train on one step: forward, backward, update."""
        accelerator = self.accelerator
        # Filled on the device: a number copied from the host would make it wait.
        count = torch.full((), step.labels, dtype=torch.float64, device=accelerator.device)
        if self.share.processes > 1:
            count = accelerator.reduce(count, reduction="sum")
        total = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * self.config.rate(number)
        for place, batch in enumerate(step.batches):
            last = place == len(step.batches) - 1
            with accelerator.no_sync(self.prepared) if not last else nullcontext():
                loss = self._loss(batch, length)
                # DDP and FSDP take the mean over processes; the sum is wanted.
                accelerator.backward(loss * (self.share.processes / count).to(loss.dtype))
            total += loss.detach()
        accelerator.clip_grad_norm_(self.prepared.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._held.append(torch.stack((total, count / self.share.processes)))
        places = sum(batch.positions.shape[0] for batch in step.batches)
        tokens = sum(batch.input_ids.shape[0] for batch in step.batches)
        flops = step_flops(self.model.config, tokens, places, step.squares)
        self._work = (self._work[0] + tokens, self._work[1] + flops)

    def _loss(self, batch: Batch, length: int) -> torch.Tensor:
        if self.accelerator.device.type == "cuda":
            batch = batch.pinned().to(self.accelerator.device)
            torch.compiler.cudagraph_mark_step_begin()
        with self.accelerator.autocast():
            loss: torch.Tensor = self.prepared(
                batch.input_ids, batch.cu_seqlens, batch.positions, batch.labels, length
            )
        return loss

    def fetch(self) -> None:
        """Bring the losses of all processes together."""
        if not self._held:
            return
        sums = self.accelerator.reduce(torch.stack(self._held), reduction="sum")
        self._held = []
        for loss in (sums[:, 0] / sums[:, 1]).tolist():
            if not math.isfinite(loss):
                raise Diverged(len(self.losses), loss)
            self.losses.append(loss)
        now = time.monotonic()
        # What came before the first `fetch`, compiling above all, is not counted; what comes after
        # an evaluation or a checkpoint begins anew.
        if self._since is not None:
            self._times.append((now - self._since, *self._work))
        self._since, self._work = now, (0, 0.0)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Measure the loss on held-out documents, and look at the positions."""
        step, accelerator = self.progress.step, self.accelerator
        seen: dict[str, Any] = {"step": step, "tokens": step * self.config.batch_tokens}
        if self.held_out:
            self.plain.eval()
            sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
            with accelerator.autocast():
                for batch in self.held_out:
                    on = batch.to(accelerator.device)
                    sums[0] += self.plain(
                        on.input_ids, on.cu_seqlens, on.positions, on.labels, self.config.longest
                    )
                    sums[1] += (on.labels != NO_LABEL).sum()
            self.plain.train()
            total = accelerator.reduce(sums, reduction="sum")
            loss = float(total[0] / total[1])
            if not math.isfinite(loss):
                raise Diverged(step, loss)
            self.view.say(f"validation loss {loss:.4f} after {step:,} steps")
            accelerator.log({"validation_loss": loss}, step=step)
            seen["loss"] = loss
        self.progress.evaluations.append(seen | {"position": observed(self.plain.model)})

    def save(self) -> None:
        """Write a checkpoint; the run goes on while it is proved."""
        self.fetch()
        self.writer.write(self.progress, np.array(self.losses))

    def tell(self) -> None:
        """Tell loss and speed to whoever watches."""
        self.fetch()
        recent = self.losses[-self.settings.log_every :]
        numbers = {"loss": statistics.fmean(recent), **self.speed()}
        words = [f"loss {numbers['loss']:.4f}"]
        if "tokens_per_second" in numbers:
            words.append(f"{numbers['tokens_per_second']:,.0f} tokens/s")
        if "mfu" in numbers:
            words.append(f"MFU {numbers['mfu']:.1%}")
        self.view.step(self.progress.step, ", ".join(words))
        self.accelerator.log(numbers, step=self.progress.step)

    def speed(self) -> dict[str, float]:
        """Return tokens per second of all processes and, where the peak is known, the MFU."""
        if not self._times:
            return {}
        rate = statistics.median(tokens / seconds for seconds, tokens, _ in self._times)
        work = statistics.median(flops / seconds for seconds, _, flops in self._times)
        found = {
            "tokens_per_second": rate * self.share.processes,
            "flops_per_second": work,
            "step_seconds": self.config.batch_tokens / (rate * self.share.processes),
        }
        return found if self.peak is None else found | {"mfu": work / self.peak}

    def agreed(self, wanted: bool) -> bool:
        """Return whether to stop, which all processes have to do at the same step."""
        if self.share.processes == 1:
            return wanted
        if self.progress.step % self.settings.log_every:
            return False
        flag = torch.tensor(float(wanted), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, reduction="sum") > 0)

    def record(self, identity: dict[str, Any], command: str) -> dict[str, Any]:
        """Return what tables and figures are made of."""
        every = max(1, -(-len(self.losses) // POINTS))
        return {
            "kind": "pretrain",
            "config": self.config.to_dict(),
            "tokenizer": self.corpus.vocabulary.name,
            **{k: v for k, v in identity.items() if k not in ("config", "tokenizer", CODE)},
            CODE: self.progress.code,
            "tokens": self.config.steps * self.config.batch_tokens,
            "parameters": self.counts,
            # Pairs of a step and the mean loss of the steps up to it.
            "loss": [
                [min(at + every, len(self.losses)), float(np.mean(self.losses[at : at + every]))]
                for at in range(0, len(self.losses), every)
            ],
            "evaluations": self.progress.evaluations,
            "seconds": self.progress.seconds,
            "speed": self.speed(),
            "processes": self.share.processes,
            "surroundings": surroundings(command, self.accelerator.device),
        }
