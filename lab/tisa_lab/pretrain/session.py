"""A run while it lasts: model, optimiser and progress, trained, told about and checkpointed."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tisa_lab.pretrain import checkpoints
from tisa_lab.pretrain.batches import BEGINNING, Reading, Share, steps
from tisa_lab.pretrain.config import PretrainConfig
from tisa_lab.pretrain.corpus import Corpus, Place
from tisa_lab.pretrain.evaluation import validation_batches, validation_loss
from tisa_lab.pretrain.launching import (
    Settings,
    accelerator_for,
    micro_batches,
    trackers_of,
)
from tisa_lab.pretrain.live import View
from tisa_lab.pretrain.loading import ahead
from tisa_lab.pretrain.loop import Loop
from tisa_lab.pretrain.model import WithLoss, build, parameter_groups
from tisa_lab.pretrain.observing import observed
from tisa_lab.pretrain.throughput import peak_flops


@dataclass
class Progress:
    """How far a run is: everything that a checkpoint holds beside weights and optimiser."""

    step: int = 0
    reading: Reading = BEGINNING
    seconds: float = 0.0
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        """Return plain values, for a JSON file."""
        return asdict(self)

    @classmethod
    def of(cls, state: dict[str, Any]) -> "Progress":
        """Return the progress of a checkpoint."""
        place = Place(**state["reading"]["place"])
        return cls(**{**state, "reading": Reading(place, state["reading"]["used"])})


class Session:
    """Everything of a run that is in memory, at its beginning or at its last checkpoint."""

    def __init__(
        self,
        config: PretrainConfig,
        corpus: Corpus,
        out: Path,
        valid: Corpus | None,
        settings: Settings,
        view: View,
    ) -> None:
        self.config, self.corpus, self.out = config, corpus, out
        self.settings, self.view = settings, view
        self.began = time.monotonic()
        self.accelerator = accelerator_for(settings, out)
        processes = self.accelerator.num_processes
        micro = micro_batches(config, corpus, settings, processes)
        self.share = Share(self.accelerator.process_index, processes, micro)
        if self.accelerator.is_main_process:
            out.mkdir(parents=True, exist_ok=True)
        self.accelerator.wait_for_everyone()
        device = self.accelerator.device
        self.peak = settings.peak_flops or peak_flops(device)
        self.model = build(config, corpus.vocabulary.size)
        positional = self.model.transformer.num_parameters()[0]
        self.counts = (positional, sum(p.numel() for p in self.model.parameters()) - positional)
        whole = WithLoss(self.model)
        optimizer = torch.optim.AdamW(
            parameter_groups(whole, config), betas=(0.9, config.beta2), fused=device.type == "cuda"
        )
        self.prepared, optimizer = self.accelerator.prepare(whole, optimizer)
        # The same weights, not compiled: for the few forward passes of an evaluation.
        self.plain = self.accelerator.unwrap_model(self.prepared, keep_torch_compile=False)
        self.progress, losses = Progress(), np.empty(0)
        found = checkpoints.latest(out)
        if found is not None:
            state, losses = checkpoints.load(self.accelerator, found)
            self.progress = Progress.of(state)
            view.say(f"goes on from {found}")
        self.loop = Loop(
            self.accelerator, self.prepared, optimizer, config, self.model.config, self.share,
            losses.tolist(),
        )  # fmt: skip
        trackers_of(self.accelerator, settings, config)
        rows = max(1, config.batch_tokens // config.longest // processes // micro)
        self.held_out = []
        if valid is not None:
            self.held_out = validation_batches(
                valid, config, settings.valid_tokens, rows=rows, rank=self.share.rank,
                processes=processes,
            )  # fmt: skip

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
            self.loop.take(step, progress.step, phase.length)
            progress.step += 1
            progress.reading = step.after
            progress.seconds = before + time.monotonic() - began
            done = progress.step == config.steps
            if done or progress.step % settings.log_every == 0:
                self.tell()
            if done or progress.step % settings.evaluate_every == 0:
                self.loop.fetch()
                self.evaluate()
                self.loop.restart()
            if done:
                break
            if progress.step % settings.checkpoint_every == 0:
                self.save()
                self.loop.restart()
            over = time.monotonic() - self.began > (settings.max_seconds or float("inf"))
            if self.loop.agreed(stop() or over, progress.step, settings.log_every):
                self.save()
                return False
        return True

    def evaluate(self) -> None:
        """Measure the loss on held-out documents, and look at the positions."""
        step = self.progress.step
        seen: dict[str, Any] = {"step": step, "tokens": step * self.config.batch_tokens}
        if self.held_out:
            loss = validation_loss(self.accelerator, self.plain, self.held_out, self.config)
            self.view.say(f"validation loss {loss:.4f} after {step:,} steps")
            self.accelerator.log({"validation_loss": loss}, step=step)
            seen["loss"] = loss
        self.progress.evaluations.append(seen | {"position": observed(self.plain.model)})

    def save(self) -> None:
        """Write a checkpoint."""
        self.loop.fetch()
        losses = np.array(self.loop.losses)
        checkpoints.write(self.accelerator, self.out, self.progress.state(), losses)

    def tell(self) -> None:
        """Tell loss and speed to whoever watches."""
        self.loop.fetch()
        recent = self.loop.losses[-self.settings.log_every :]
        numbers = {"loss": statistics.fmean(recent), **self.loop.speed(self.peak)}
        self.view.step(self.progress.step, numbers)
        self.accelerator.log(numbers, step=self.progress.step)
