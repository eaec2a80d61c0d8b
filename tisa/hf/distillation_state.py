"""Where a distillation stands, what it has found, and a checkpoint of both; several processes."""

import io
import os
import warnings
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

import tisa
from tisa.parameters import is_vector
from tisa.shapes import Tensor
from tisa.store import CODE, Damaged, read_bytes, told, write_sealed

KIND = "distillation checkpoint"
# Of the search, what a checkpoint keeps beside the best state.
SEARCH = ("start", "share", "falls", "stale", "ended", "score")
# Checks without a gain after which rates fall to a share of what they are, and how often.
PATIENCE, FALL, FALLS = 4, 0.3, 2


class Processes:
    """Several processes with one model, through `accelerate`; or this one alone."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self.count = 1 if accelerator is None else int(accelerator.num_processes)
        self.index = 0 if accelerator is None else int(accelerator.process_index)

    def prepare(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Return both as they are to be trained."""
        if self.accelerator is None:
            return model, optimizer
        model, optimizer = self.accelerator.prepare(model, optimizer)
        return model, optimizer

    def backward(self, loss: Tensor) -> None:
        """Give every process the mean of the gradients."""
        if self.accelerator is None:
            loss.backward()
        else:
            self.accelerator.backward(loss)

    def clip(self, parameters: list[nn.Parameter]) -> None:
        """Shorten the gradient to 1; accelerate takes the scale of float16 off it first."""
        if self.accelerator is None:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        else:
            self.accelerator.clip_grad_norm_(parameters, 1.0)

    def mean(self, loss: Tensor) -> float:
        """Return the mean over the processes."""
        return float(loss if self.count == 1 else self.accelerator.reduce(loss, "mean"))

    def all(self, value: float) -> list[float]:
        """Return every process's value."""
        if self.count == 1:
            return [value]
        mine = torch.tensor([value], device=self.accelerator.device)
        found: list[float] = self.accelerator.gather(mine).tolist()
        return found


class State:
    """Optimiser, place and losses, which a checkpoint keeps."""

    def __init__(
        self,
        trained: dict[str, nn.Parameter],
        scores_lr: float,
        fold_lr: float,
        path: Any,
        identity: dict[str, Any],
    ) -> None:
        self.identity = identity
        fold = [p for n, p in trained.items() if is_vector(n)]
        scores = [p for n, p in trained.items() if not is_vector(n)]
        groups = [{"params": scores, "lr": scores_lr}, {"params": fold, "lr": fold_lr}]
        self.rates = [scores_lr, fold_lr] if fold else [scores_lr]
        self.optimizer: Any = torch.optim.Adam(groups[: len(self.rates)])
        self.step, self.seconds, self.losses = 0, 0.0, list[float]()
        self.trained = trained
        self.sharpness = [p for n, p in trained.items() if n.endswith("kernel_sharpness")]
        # The search: loss at the start by length, share of the rates, best state and its score.
        self.start: dict[int, float] | None = None
        self.share, self.falls, self.stale, self.ended = 1.0, 0, 0, False
        self.score, self.best = 1.0, self.parameters()
        self.path = None if path is None else Path(path)
        if self.path is not None and (self.path.exists() or self.before.exists()):
            self._read(trained)

    def parameters(self) -> dict[str, Tensor]:
        """Return a copy of what is trained."""
        return {name: p.detach().clone() for name, p in self.trained.items()}

    @torch.no_grad()
    def restore(self, weights: dict[str, Tensor]) -> None:
        """Give back what was copied."""
        for name, value in weights.items():
            self.trained[name].copy_(value)

    def rate(self, share: float) -> None:
        """Set the rates to a share of what they were asked to be."""
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * max(0.0, share)

    def update(self) -> None:
        """Take a step of Adam, whose length is a share of the sharpness, not a sharpness.

        Added, the step that moves a narrow kernel (b near 1) a little is fifty times the sharpness
        of one that reaches 30 tokens (b near 0.001), and ends it at once.
        """
        before = [p.detach().clone() for p in self.sharpness]
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for p, old in zip(self.sharpness, before, strict=True):
                p.copy_(old * torch.exp(old.sign() * (p - old)))

    def advance(self, loss: float, seconds: float) -> None:
        """Take a step, and note it."""
        self.update()
        self.step, self.seconds = self.step + 1, seconds
        self.losses.append(loss)

    def consider(self, score: float) -> bool:
        """Keep what is trained if nothing was as good; return whether it was kept."""
        if not score < self.score:
            return False
        self.score, self.best = score, self.parameters()
        return True

    def checked(self, score: float) -> None:
        """Note a score; without a gain for long, go back to the best, slower, and at last end."""
        if self.consider(score):
            self.stale = 0
            return
        self.stale += 1
        if self.stale == PATIENCE:
            self.stale, self.ended = 0, self.falls == FALLS
            self.falls, self.share = self.falls + 1, self.share * FALL
            self.restore(self.best)

    def write(self) -> None:
        """Write the checkpoint, if there is to be one."""
        if self.path is None:
            return
        kept = {
            "weights": {n: p.detach() for n, p in self.trained.items()},
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "losses": self.losses,
            "best": self.best,
            "search": {name: getattr(self, name) for name in SEARCH},
        }
        content = io.BytesIO()
        torch.save(kept, content)
        about = {"kind": KIND, "identity": self.identity, CODE: tisa.__version__}
        with told(self.path):
            if self.path.exists():
                os.replace(self.path, self.before)
            write_sealed(self.path, about, content.getvalue())

    @property
    def before(self) -> Path:
        """Where the checkpoint before the last one is, for when that one is damaged."""
        assert self.path is not None
        return self.path.with_name(f"{self.path.name}.before")

    def _read(self, trained: dict[str, nn.Parameter]) -> None:
        assert self.path is not None
        try:
            about, content = read_bytes(self.path, remedy=f"remove it to go on from {self.before}")
        except (Damaged, FileNotFoundError) as damaged:
            if not self.before.exists():
                raise
            warnings.warn(f"{damaged}; goes on from {self.before}", stacklevel=4)
            about, content = read_bytes(self.before, remedy="remove it to begin from the start")
        if about.get("identity", self.identity) != self.identity or about.get("kind", KIND) != KIND:
            raise ValueError(
                f"distil: checkpoint {self.path} is of another model, other texts or another seed; "
                "name another file"
            )
        if about.get(CODE, tisa.__version__) != tisa.__version__:
            warnings.warn(
                f"{self.path}: begun with tisa {about[CODE]}, goes on with {tisa.__version__}; its "
                "numbers may differ from those of one version",
                stacklevel=4,
            )
        try:
            # Without a seal it was written by an earlier version.
            kept = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
            shapes = {name: value.shape for name, value in kept["weights"].items()}
        except (RuntimeError, UnpicklingError, KeyError, EOFError) as wrong:
            raise Damaged(
                f"{self.path}: no checkpoint of tisa.hf.distil ({type(wrong).__name__}); remove it"
            ) from wrong
        if shapes != {name: parameter.shape for name, parameter in trained.items()}:
            raise ValueError(
                f"distil: checkpoint {self.path} is of another model; name another file"
            )
        self.restore(kept["weights"])
        # An earlier version kept the last state.
        self.best = kept.get("best", self.parameters())
        for name, value in kept.get("search", {}).items():
            setattr(self, name, value)
        self.optimizer.load_state_dict(kept["optimizer"])
        self.step, self.seconds = kept["step"], kept["seconds"]
        self.losses = list(kept["losses"])
