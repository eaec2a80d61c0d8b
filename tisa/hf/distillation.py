"""A converted model trained towards the one it came from: scores and folded vectors alone.

It cannot hurt: texts that are not trained on are checked every few steps, the start among what is
compared, and the best state is kept. A state that is worse than the start at any length (by powers
of 2) is never the best one.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from tisa.hf.calibration import Batch, Tokens, length_limit, load_tokenizer, pieces, tokens_of
from tisa.hf.distillation_loss import Check, batches_by, divided, loss_of, score_of
from tisa.hf.distillation_state import Processes, State
from tisa.parameters import is_score
from tisa.scoring.base import check_flags
from tisa.shapes import Tensor
from tisa.store import tensors_digest

# Shares of the rates that are tried out, and steps of each: one of so many, at most.
RATES, TRIAL = (1.0, 0.3, 0.1), (12, 10)
# Steps from one check to the next, likewise.
EVERY = (6, 10)
# Pieces that texts are cut into, where lengths are given: to train on, and to check on.
PIECES = (192, 48)
TOO_FEW = (
    "distil: texts must be two or more, one of them to check on, got one; give held_out, or "
    "check=False"
)


class Progress(NamedTuple):
    """Where a distillation stands: steps taken, seconds spent, the last step's loss.

    `held_out` is the best state's loss on held-out texts by that of the start, `share` is how much
    of the rates is taken.
    """

    step: int
    seconds: float
    loss: float
    held_out: float = 1.0
    share: float = 1.0


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
    lengths: tuple[int, int] | None = None,
    held_out: Any = None,
    check: bool = True,
    mask_token_id: int | None = None,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    accelerator: Any = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[float]:
    """Train the scores and folded vectors of a converted model in place; return the losses.

    The target is the original's last hidden states and their mean or, where both have an MLM head
    and a mask token is known, its logits, masked tokens counting ten times. Adam, rates falling
    linearly to 0, gradients clipped at 1; a step changes a kernel's sharpness by a share of it.
    A progress bar is drawn where `rich` is installed.

    On held-out texts three shares of the rates are tried out for some steps, the best state is
    kept, the start among them, and it ends when nothing is gained. What is kept is at no length
    (by powers of 2) worse on these texts than the start.

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
        lengths: shortest and longest: the texts are cut into pieces of so many tokens, about, and
            each length has as many steps.
        held_out: texts to check on, best of all some that nothing was fitted to; None: an eighth of
            the texts, which are then not trained on.
        check: False trains all the steps at the rates given, and keeps the last state.
        mask_token_id: by default the tokenizer's.
        seed: of the order of the batches and of the masked places.
        checkpoint: a file to write after every tenth step and to go on from if it is there.
        accelerator: an `accelerate.Accelerator`, for several processes: each takes batches of its
            own, so a step has as many as there are processes; the first one writes and draws.
        progress: called after each step in every process, instead of the bar.
    """
    check_flags("distil", by_length=by_length, check=check)
    if steps < 1:
        raise ValueError(f"distil: steps must be 1 or more, got {steps}")
    if minutes is not None and minutes <= 0:
        raise ValueError(f"distil: minutes must be above 0, got {minutes}")
    tokenizer = load_tokenizer(original) if tokenizer is None else tokenizer
    sequences, held = _sequences(
        texts, held_out, original, tokenizer, lengths=lengths, check=check, seed=seed
    )
    if mask_token_id is None:
        mask_token_id = getattr(tokenizer, "mask_token_id", None)
    masked = mask_token_id is not None and type(original).__name__.endswith("ForMaskedLM")
    trained = {n: p for n, p in converted.named_parameters() if is_score(n)}
    if not trained:
        raise ValueError("distil: converted has no scores; pass what tisa.hf.convert returned")
    if batch_tokens < 1:
        raise ValueError(f"distil: batch_tokens must be 1 or more, got {batch_tokens}")
    by_length = by_length or lengths is not None
    batches = batches_by(sequences, original, seed, batch_tokens, by_length)
    mask = mask_token_id if masked else None
    checker = None
    if held:
        checked = batches_by(held, original, seed, batch_tokens, False)
        checker = Check(checked, original, mask, pooled_weight, seed)
    # transformers draws a pooler anew where the checkpoint has none, and no loss here reads it.
    read = {n: v for n, v in original.state_dict().items() if not n.startswith("pooler.")}
    identity = {} if checkpoint is None else {
        "original": tensors_digest(read),
        "converted": converted.config.model_type,
        "texts": sha256(repr(sequences).encode()).hexdigest(),
        "rates": [scores_lr, fold_lr, pooled_weight],
        "batches": [seed, batch_tokens, by_length],
        "held out": sha256(repr(held).encode()).hexdigest(),
    }  # fmt: skip
    state = State(trained, scores_lr, fold_lr, checkpoint, identity)
    processes = Processes(accelerator)
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
        run = _Run(
            converted, student, original, batches, checker, state, processes, mask, pooled_weight,
            seed, began, None if minutes is None else 60 * minutes,
        )  # fmt: skip
        run.to_the_end(steps, told)
    return state.losses


@dataclass(frozen=True)
class _Run:
    """Models, texts and state of a distillation."""

    converted: PreTrainedModel
    student: Any
    original: PreTrainedModel
    batches: list[Batch]
    checker: Check | None
    state: State
    processes: Processes
    mask: int | None
    pooled_weight: float
    seed: int
    began: float
    limit: float | None

    def to_the_end(self, steps: int, told: Callable[[Progress], None]) -> None:
        """Take the steps, and leave the best state."""
        state, limit = self.state, self.limit
        if self.checker is not None and state.start is None:
            self._scored()
            self._choose_rate(min(steps // TRIAL[0] or 1, TRIAL[1]))
        every, checked = min(steps // EVERY[0] or 1, EVERY[1]), state.step
        while state.step < steps and not state.ended:
            spent = self._spent()
            if limit is not None and spent >= limit:
                break
            left = 1 - max(state.step / steps, spent / limit if limit else 0.0)
            state.rate(state.share * left)
            loss = self._learn()
            state.advance(self.processes.mean(loss), time.perf_counter() - self.began)
            if self.checker is not None and (state.step % every == 0 or state.step == steps):
                state.checked(self._scored())
                checked = state.step
            told(Progress(state.step, state.seconds, state.losses[-1], state.score, state.share))
            at_end = state.step == steps or state.ended
            if self.processes.index == 0 and (state.step % 10 == 0 or at_end):
                state.write()
        if self.checker is not None:
            if state.step > checked:
                state.consider(self._scored())
            state.restore(state.best)

    def _spent(self) -> float:
        """Return the seconds: clocks of processes differ, and rates and the last step must not."""
        passed = time.perf_counter() - self.began
        return passed if self.limit is None else self.processes.all(passed)[0]

    def _scored(self) -> float:
        assert self.checker is not None
        found = self.checker.losses(self.converted)
        found = {name: self.processes.all(value)[0] for name, value in found.items()}
        if self.state.start is None:
            self.state.start = found
        return score_of(found, self.state.start)

    def _learn(self) -> Tensor:
        """Return the loss of the next batch, and leave gradients."""
        turn = self.state.step * self.processes.count + self.processes.index
        batch = self.batches[turn % len(self.batches)]
        generator = torch.Generator().manual_seed(self.seed + turn)
        loss = loss_of(self.student, self.original, batch, self.mask, generator, self.pooled_weight)
        self.processes.backward(loss)
        self.processes.clip(list(self.state.trained.values()))
        return loss.detach()

    def _choose_rate(self, steps: int) -> None:
        """Set the share of the rates with which the first steps gain most on held-out texts."""
        state = self.state
        start, fresh = state.parameters(), state.optimizer.state_dict()
        found: list[tuple[float, float]] = []
        for number, share in enumerate(RATES, start=1):
            state.rate(share)
            for turn in range(steps):
                # All of them together take a quarter of the time, at most.
                late = self.limit and self._spent() > self.limit * number / (4 * len(RATES))
                if turn and late:
                    break
                state.step = turn
                self._learn()
                state.update()
            score = self._scored()
            state.consider(score)
            found.append((score, share))
            state.step = 0
            state.restore(start)
            state.optimizer.load_state_dict(fresh)
        # Where none gains anything, the smallest is left.
        state.share = min(found)[1]


def _sequences(
    texts: Any,
    held_out: Any,
    original: PreTrainedModel,
    tokenizer: Any,
    *,
    lengths: tuple[int, int] | None,
    check: bool,
    seed: int,
) -> tuple[list[Tokens], list[Tokens]]:
    """Return what is trained on, and what is checked on."""
    if lengths is not None:
        texts, held_out = _cut(texts, held_out, original, tokenizer, lengths, seed)
    sequences = tokens_of(texts, original, tokenizer)
    if not check:
        return sequences, []
    if held_out is not None:
        return sequences, tokens_of(held_out, original, tokenizer)
    if len(sequences) < 2:
        raise ValueError(TOO_FEW)
    return divided(sequences)


def _cut(
    texts: Any,
    held_out: Any,
    original: PreTrainedModel,
    tokenizer: Any,
    lengths: tuple[int, int],
    seed: int,
) -> tuple[list[str], list[str]]:
    """Return pieces of the texts to train on, and of others to check on."""
    train, held = (
        list(given) if isinstance(given, Sequence) else [] for given in (texts, held_out)
    )
    if not train or not all(isinstance(text, str) for text in (*train, *held)):
        raise TypeError("distil: lengths are for a list of texts, which are cut; got none of texts")
    limit = length_limit(original)
    if lengths[1] > limit:
        raise ValueError(
            f"distil: lengths must end at {limit}, the original takes up to {limit} tokens, got "
            f"{lengths[1]}"
        )
    if not held and len(train) < 2:
        raise ValueError(TOO_FEW)
    if not held:
        held, train = train[1::8], [text for i, text in enumerate(train) if i % 8 != 1]
    return (
        pieces(train, tokenizer, lengths, count=PIECES[0], seed=seed),
        pieces(held, tokenizer, lengths, count=PIECES[1], seed=seed + 1),
    )


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
