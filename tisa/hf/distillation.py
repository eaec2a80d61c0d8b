"""A converted model trained towards the one it came from: scores and folded vectors alone."""

import io
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cosine_similarity, kl_div, log_softmax
from transformers import PreTrainedModel

import tisa
from tisa.hf.calibration import Batch, Tokens, batches_of, inner, load_tokenizer, tokens_of
from tisa.parameters import is_score, is_vector
from tisa.scoring.base import check_flags
from tisa.shapes import Tensor
from tisa.store import CODE, Damaged, read_bytes, tensors_digest, told, write_sealed

# Of an input's tokens, for models with an MLM head.
MASKED, MASKED_WEIGHT = 0.15, 10.0
KIND = "distillation checkpoint"


class Progress(NamedTuple):
    """Where a distillation stands: steps taken, seconds spent, the last step's loss."""

    step: int
    seconds: float
    loss: float


def distil(
    converted: PreTrainedModel,
    original: PreTrainedModel,
    texts: Any,
    *,
    steps: int = 60,
    minutes: float | None = None,
    tokenizer: Any = None,
    scores_lr: float = 0.05,
    fold_lr: float = 0.002,
    pooled_weight: float = 1.0,
    batch_tokens: int = 2048,
    by_length: bool = False,
    mask_token_id: int | None = None,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    accelerator: Any = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[float]:
    """Train the scores and folded vectors of a converted model in place; return the losses.

    The target is the original's last hidden states and their mean or, where both have an MLM head
    and a mask token is known, its logits, masked tokens counting ten times. Adam, rates falling
    linearly to 0, gradients clipped at 1. A progress bar is drawn where `rich` is installed.

    Args:
        converted: from `convert`; on the device where it is to be trained.
        original: the model that it came from, on the same device.
        texts: unlabelled texts, pairs or token ids, as for `convert`.
        steps: at most so many steps.
        minutes: at most so long; the rates then fall with the time.
        tokenizer: by default the one beside the original.
        scores_lr: rate of the kernels.
        fold_lr: rate of the folded vectors, and of those at some places.
        pooled_weight: what 1 − cosine of the mean hidden states counts, beside their relative
            squared error.
        batch_tokens: most tokens in a batch of at most 32 texts; more make sense on a GPU.
        by_length: give all lengths (by powers of 2) as many steps, not all batches.
        mask_token_id: by default the tokenizer's.
        seed: of the order of the batches and of the masked places.
        checkpoint: a file to write after every tenth step and to go on from if it is there.
        accelerator: an `accelerate.Accelerator`, for several processes: each takes batches of its
            own, so a step has as many as there are processes; the first one writes and draws.
        progress: called after each step in every process, instead of the bar.
    """
    check_flags("distil", by_length=by_length)
    if steps < 1:
        raise ValueError(f"distil: steps must be 1 or more, got {steps}")
    if minutes is not None and minutes <= 0:
        raise ValueError(f"distil: minutes must be above 0, got {minutes}")
    tokenizer = load_tokenizer(original) if tokenizer is None else tokenizer
    sequences = tokens_of(texts, original, tokenizer)
    if mask_token_id is None:
        mask_token_id = getattr(tokenizer, "mask_token_id", None)
    masked = mask_token_id is not None and type(original).__name__.endswith("ForMaskedLM")
    trained = {n: p for n, p in converted.named_parameters() if is_score(n)}
    if not trained:
        raise ValueError("distil: converted has no scores; pass what tisa.hf.convert returned")
    if batch_tokens < 1:
        raise ValueError(f"distil: batch_tokens must be 1 or more, got {batch_tokens}")
    batches = _batches(sequences, original, seed, batch_tokens, by_length)
    # transformers draws a pooler anew where the checkpoint has none, and no loss here reads it.
    read = {n: v for n, v in original.state_dict().items() if not n.startswith("pooler.")}
    identity = {} if checkpoint is None else {
        "original": tensors_digest(read),
        "converted": converted.config.model_type,
        "texts": sha256(repr(sequences).encode()).hexdigest(),
        "rates": [scores_lr, fold_lr, pooled_weight],
        "batches": [seed, batch_tokens, by_length],
    }  # fmt: skip
    state = _State(trained, scores_lr, fold_lr, checkpoint, identity)
    processes = _Processes(accelerator)
    if len(set(processes.all(state.step))) > 1:
        raise ValueError(
            f"distil: not every process finds the same checkpoint; put {checkpoint} where all of "
            "them read it"
        )
    began = time.perf_counter() - state.seconds
    with (
        _only(converted, trained),
        _still(converted, original),
        _bar(steps, progress, drawn=processes.index == 0) as told,
    ):
        # After the others are frozen: DDP waits for gradients of whatever is trainable here.
        student, state.optimizer = processes.prepare(converted, state.optimizer)
        # What was measured before is not so any more.
        converted.config.tisa.pop("measured", None)
        while state.step < steps:
            spent = time.perf_counter() - began
            if minutes is not None:
                # Their clocks differ; rates and the last step must not.
                spent = processes.all(spent)[0]
                if spent >= 60 * minutes:
                    break
            done = state.step / steps
            state.rate(1 - max(done, spent / (60 * minutes) if minutes else 0.0))
            turn = state.step * processes.count + processes.index
            batch = batches[turn % len(batches)]
            generator = torch.Generator().manual_seed(seed + turn)
            mask = mask_token_id if masked else None
            loss = _loss(student, original, batch, mask, generator, pooled_weight)
            processes.backward(loss)
            processes.clip(list(trained.values()))
            state.advance(processes.mean(loss.detach()), time.perf_counter() - began)
            told(Progress(state.step, state.seconds, state.losses[-1]))
            if processes.index == 0 and (state.step % 10 == 0 or state.step == steps):
                state.write(trained)
    return state.losses


class _Processes:
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


class _State:
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
        self.path = None if path is None else Path(path)
        if self.path is not None and (self.path.exists() or self.before.exists()):
            self._read(trained)

    def rate(self, share: float) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * max(0.0, share)

    def advance(self, loss: float, seconds: float) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step, self.seconds = self.step + 1, seconds
        self.losses.append(loss)

    def write(self, trained: dict[str, nn.Parameter]) -> None:
        if self.path is None:
            return
        kept = {
            "weights": {n: p.detach() for n, p in trained.items()},
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "losses": self.losses,
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
        with torch.no_grad():
            for name, value in kept["weights"].items():
                trained[name].copy_(value)
        self.optimizer.load_state_dict(kept["optimizer"])
        self.step, self.seconds = kept["step"], kept["seconds"]
        self.losses = list(kept["losses"])


def _batches(
    sequences: list[Tokens], model: PreTrainedModel, seed: int, tokens: int, by_length: bool
) -> list[Batch]:
    """Return small batches in a random order, those of one length together."""
    made = list(
        itertools.chain.from_iterable(
            batches_of(part, model, elements=1, tokens=tokens)
            for part in _parts(sorted(sequences, key=lambda s: len(s.ids)), 32)
        )
    )
    generator = torch.Generator().manual_seed(seed)
    made = [made[i] for i in torch.randperm(len(made), generator=generator).tolist()]
    if not by_length:
        return made
    classes: dict[int, list[Batch]] = {}
    for batch in made:
        classes.setdefault((batch.inputs["input_ids"].shape[1] - 1).bit_length(), []).append(batch)
    rounds = max(len(part) for part in classes.values())
    return [part[i % len(part)] for i in range(rounds) for part in classes.values()]


def _parts(sequences: list[Tokens], size: int) -> Iterator[list[Tokens]]:
    for start in range(0, len(sequences), size):
        yield sequences[start : start + size]


def _loss(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    batch: Batch,
    mask_token_id: int | None,
    generator: torch.Generator,
    pooled_weight: float,
) -> Tensor:
    inputs = dict(batch.inputs)
    real = inputs["attention_mask"].bool()
    if mask_token_id is None:
        with torch.no_grad():
            wanted = _hidden(teacher, inputs)
        found = _hidden(student, inputs)
        error = ((found - wanted)[real] ** 2).sum() / (wanted[real] ** 2).sum()
        weight = real.unsqueeze(-1).to(found.dtype)
        ours, theirs = ((x * weight).sum(1) / weight.sum(1) for x in (found, wanted))
        return error + pooled_weight * (1 - cosine_similarity(ours, theirs, dim=-1)).mean()
    chosen = torch.rand(real.shape, generator=generator).to(real.device) < MASKED
    # Not the ends, which are always the same.
    chosen &= inner(real)
    inputs["input_ids"] = inputs["input_ids"].masked_fill(chosen, mask_token_id)
    with torch.no_grad():
        target = log_softmax(teacher(**inputs).logits.float(), -1)
    logs = log_softmax(student(**inputs).logits.float(), -1)
    each = kl_div(logs, target, reduction="none", log_target=True).sum(-1)
    weights = real + (MASKED_WEIGHT - 1) * chosen
    return (each * weights).sum() / weights.sum()


def _hidden(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return the last hidden states, whatever stands on top of them."""
    found = model(**inputs, output_hidden_states=True)
    hidden = getattr(found, "last_hidden_state", None)
    return (found.hidden_states[-1] if hidden is None else hidden).float()


@contextmanager
def _only(model: nn.Module, trained: dict[str, nn.Parameter]) -> Iterator[None]:
    """Let only these parameters have gradients, and put everything back."""
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    try:
        yield
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(before[name])


@contextmanager
def _still(*models: nn.Module) -> Iterator[None]:
    """Keep dropout out of it, and put everything back."""
    before = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, training in zip(models, before, strict=True):
            model.train(training)


@contextmanager
def _bar(
    steps: int, progress: Callable[[Progress], None] | None, *, drawn: bool = True
) -> Iterator[Callable[[Progress], None]]:
    if progress is not None:
        yield progress
        return
    if not drawn:
        yield lambda told: None
        return
    try:
        from rich.progress import Progress as Bar
    except ModuleNotFoundError:
        yield lambda told: None
        return
    with Bar(transient=True) as bar:
        task = bar.add_task("distil", total=steps)

        def draw(told: Progress) -> None:
            bar.update(task, completed=told.step, description=f"distil, loss {told.loss:.4f}")

        yield draw
