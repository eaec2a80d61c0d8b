"""The training loop's inside: forward, backward, update, and how fast it goes."""

import statistics
import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from tisa.transformer import TransformerConfig
from tisa_lab.pretrain.batches import Batch, Share, Step
from tisa_lab.pretrain.config import PretrainConfig
from tisa_lab.pretrain.throughput import step_flops


class Loop:
    """Forward, backward, update; losses stay on the device until they are asked for."""

    def __init__(
        self,
        accelerator: Any,
        model: Any,
        optimizer: Any,
        config: PretrainConfig,
        sizes: TransformerConfig,
        share: Share,
        losses: list[float],
    ) -> None:
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer
        self.config, self.sizes, self.share, self.losses = config, sizes, share, losses
        self._held: list[torch.Tensor] = []
        self._times: list[tuple[float, int, float]] = []
        self._since: float | None = None
        self._work = (0, 0.0)

    def take(self, step: Step, number: int, length: int) -> None:
        """Train on one step."""
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
            with accelerator.no_sync(self.model) if not last else nullcontext():
                loss = self._loss(batch, length)
                # DDP and FSDP take the mean over processes; the sum is wanted.
                accelerator.backward(loss * (self.share.processes / count).to(loss.dtype))
            total += loss.detach()
        accelerator.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._held.append(torch.stack((total, count / self.share.processes)))
        places = sum(batch.positions.shape[0] for batch in step.batches)
        tokens = sum(batch.input_ids.shape[0] for batch in step.batches)
        flops = step_flops(self.sizes, tokens, places, step.squares)
        self._work = (self._work[0] + tokens, self._work[1] + flops)

    def _loss(self, batch: Batch, length: int) -> torch.Tensor:
        if self.accelerator.device.type == "cuda":
            batch = batch.pinned().to(self.accelerator.device)
            torch.compiler.cudagraph_mark_step_begin()
        with self.accelerator.autocast():
            loss: torch.Tensor = self.model(
                batch.input_ids, batch.cu_seqlens, batch.positions, batch.labels, length
            )
        return loss

    def fetch(self) -> None:
        """Bring the losses of all processes together."""
        if not self._held:
            return
        sums = self.accelerator.reduce(torch.stack(self._held), reduction="sum")
        self._held = []
        new = (sums[:, 0] / sums[:, 1]).tolist()
        for number, loss in enumerate(new, len(self.losses)):
            if not np.isfinite(loss):
                raise ValueError(
                    f"the loss is {loss} at step {number:,}; a smaller --learning-rate helps"
                )
        self.losses.extend(new)
        now = time.monotonic()
        if self._since is not None:
            self._times.append((now - self._since, *self._work))
        self._since, self._work = now, (0, 0.0)

    def restart(self) -> None:
        """Leave what was done since the last `fetch`, no training, out of the speed."""
        self._since = time.monotonic()

    def speed(self, peak: float | None) -> dict[str, float]:
        """Return tokens per second of all processes and, where the peak is known, the MFU."""
        # What came before the first `fetch`, compiling above all, is not among them.
        if not self._times:
            return {}
        rate = statistics.median(tokens / seconds for seconds, tokens, _ in self._times)
        work = statistics.median(flops / seconds for seconds, _, flops in self._times)
        found = {
            "tokens_per_second": rate * self.share.processes,
            "flops_per_second": work,
            "step_seconds": self.config.batch_tokens / (rate * self.share.processes),
        }
        return found if peak is None else found | {"mfu": work / peak}

    def agreed(self, wanted: bool, step: int, every: int) -> bool:
        """Return whether to stop, which all processes have to do at the same step."""
        if self.share.processes == 1:
            return wanted
        if step % every:
            return False
        flag = torch.tensor(float(wanted), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, reduction="sum") > 0)
