"""One run: a config and a corpus in, a trained model in a folder and its record out.

Underneath is `accelerate`: started by its launcher or by torchrun, the same call trains on several
processes (DDP, FSDP2 by its config). The loss is a sum over labels divided by the number of labels
of all processes and micro-batches, so that what they share does not change what is computed.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tisa.experiments.pretrain import checkpoints
from tisa.experiments.pretrain.batches import BEGINNING, Reading, Share, steps
from tisa.experiments.pretrain.config import PretrainConfig
from tisa.experiments.pretrain.corpus import Corpus, Place
from tisa.experiments.pretrain.evaluation import validation_batches, validation_loss
from tisa.experiments.pretrain.launching import (
    DEFAULTS,
    Settings,
    accelerator_for,
    lost_process,
    micro_batches,
    trackers_of,
)
from tisa.experiments.pretrain.live import SILENT, View, spoken
from tisa.experiments.pretrain.loading import ahead
from tisa.experiments.pretrain.loop import Loop
from tisa.experiments.pretrain.model import WithLoss, build, parameter_groups
from tisa.experiments.pretrain.observing import observed
from tisa.experiments.pretrain.outcome import RECORD, record_of, write_outcome
from tisa.experiments.pretrain.throughput import peak_flops

RUN = "run.json"


@dataclass
class Progress:
    """How far a run is: everything that a checkpoint holds beside weights and optimiser."""

    step: int = 0
    reading: Reading = BEGINNING
    seconds: float = 0.0
    evaluations: list[dict[str, Any]] | None = None

    def state(self) -> dict[str, Any]:
        """Return plain values, for a JSON file."""
        return asdict(self)

    @classmethod
    def of(cls, state: dict[str, Any]) -> "Progress":
        """Return the progress of a checkpoint."""
        place = Place(**state["reading"]["place"])
        return cls(**{**state, "reading": Reading(place, state["reading"]["used"])})


def run(
    config: PretrainConfig,
    corpus: Corpus,
    out: Path,
    *,
    valid: Corpus | None = None,
    settings: Settings = DEFAULTS,
    view: View = SILENT,
    command: str = "",
    stop: Callable[[], bool] = lambda: False,
    save_tokenizer: Callable[[Path], None] = lambda folder: None,
) -> dict[str, Any] | None:
    """Return the record of the finished run, also of one that was finished before.

    A run that was interrupted goes on from its last checkpoint. None: it was told to `stop`, or
    `settings.max_seconds` are over; the checkpoint is written.
    """
    identity = {
        "config": config.to_dict(),
        "corpus": corpus.fingerprint,
        "tokenizer": corpus.vocabulary.fingerprint,
    }
    check_identity(out, identity)
    if (out / RECORD).is_file():
        view.say(f"finished before: {out / RECORD}")
        return json.loads((out / RECORD).read_text())
    check_corpora(config, corpus, valid)
    accelerator = accelerator_for(settings, out)
    share = Share(
        accelerator.process_index,
        accelerator.num_processes,
        micro_batches(config, corpus, settings, accelerator.num_processes),
    )
    if accelerator.is_main_process:
        out.mkdir(parents=True, exist_ok=True)
        write_identity(out, identity)
    accelerator.wait_for_everyone()

    model = build(config, corpus.vocabulary.size)
    whole = WithLoss(model)
    counts = model.transformer.num_parameters()
    groups = parameter_groups(whole, config)
    optimizer = torch.optim.AdamW(
        groups, betas=(0.9, config.beta2), eps=1e-8, fused=accelerator.device.type == "cuda"
    )
    prepared, optimizer = accelerator.prepare(whole, optimizer)
    progress, losses = Progress(evaluations=[]), np.empty(0)
    found = checkpoints.latest(out)
    if found is not None:
        accelerator.load_state(str(found))
        state, losses = checkpoints.read(found)
        progress = Progress.of(state)
        view.say(f"goes on from {found}")
    evaluations = progress.evaluations
    assert evaluations is not None
    trackers_of(accelerator, settings, config)

    rows = max(1, config.batch_tokens // config.longest // share.processes // share.micro)
    held_out = (
        validation_batches(
            valid, config, settings.valid_tokens, rows=rows, rank=share.rank,
            processes=share.processes,
        )
        if valid is not None
        else []
    )  # fmt: skip
    plain = accelerator.unwrap_model(prepared, keep_torch_compile=False)
    loop = Loop(accelerator, prepared, optimizer, config, model.config, share, losses.tolist())
    began, before = time.monotonic(), progress.seconds
    peak = settings.peak_flops or peak_flops(accelerator.device)

    def evaluate(step: int) -> None:
        if evaluations and evaluations[-1]["step"] == step:
            return
        seen: dict[str, Any] = {"step": step, "tokens": step * config.batch_tokens}
        if held_out:
            seen["loss"] = validation_loss(accelerator, plain, held_out, config)
            view.say(f"validation loss {seen['loss']:.4f} after {step:,} steps")
            accelerator.log({"validation_loss": seen["loss"]}, step=step)
        evaluations.append(seen | {"position": observed(plain.model)})

    def save() -> None:
        progress.seconds = before + time.monotonic() - began
        loop.fetch()
        checkpoints.write(accelerator, out, progress.state(), np.array(loop.losses))

    def told() -> None:
        loop.fetch()
        speed = loop.speed(peak)
        recent = loop.losses[-settings.log_every :]
        numbers = {"loss": statistics.fmean(recent), **speed}
        view.step(progress.step, numbers)
        accelerator.log(numbers, step=progress.step)

    source = ahead(
        lambda: steps(
            corpus, config.phases(), batch_tokens=config.batch_tokens, objective=config.objective,
            mask_share=config.mask_share, seed=config.seed, start=progress.step,
            reading=progress.reading, share=share,
        ),
        in_a_process=accelerator.device.type == "cuda",
    )  # fmt: skip
    phases = iter(config.phases())
    phase = next(phases)
    try:
        if progress.step == 0:
            evaluate(0)
        for step in source:
            while progress.step >= phase.end:
                phase = next(phases)
            loop.take(step, progress.step, phase.length)
            progress.step += 1
            progress.reading = step.after
            done = progress.step == config.steps
            over = time.monotonic() - began > (settings.max_seconds or float("inf"))
            if progress.step % settings.log_every == 0 or done:
                told()
            if progress.step % settings.evaluate_every == 0 or done:
                loop.fetch()
                evaluate(progress.step)
                loop.restart()
            if not done and progress.step % settings.checkpoint_every == 0:
                save()
                loop.restart()
            if not done and loop.agreed(stop() or over, progress.step, settings.log_every):
                save()
                view.say(f"stopped after {progress.step:,} steps; the same command goes on")
                return None
    except RuntimeError as wrong:
        raise lost_process(wrong, progress.step, checkpoints.latest(out), share) from wrong
    progress.seconds = before + time.monotonic() - began
    record = record_of(
        config=config, corpus=corpus, progress=progress.state(), losses=loop.losses,
        speed=loop.speed(peak), share=share, counts=counts, command=command,
        device=accelerator.device,
    )  # fmt: skip
    write_outcome(accelerator, prepared, model, record, loop.losses, out, save_tokenizer)
    accelerator.end_training()
    view.say(
        f"{record['speed'].get('tokens_per_second', 0):,.0f} tokens/s, "
        f"{spoken(progress.seconds)}, written to {out}"
    )
    return record


def check_identity(out: Path, identity: dict[str, Any]) -> None:
    """Refuse a folder that holds another run."""
    if not (out / RUN).is_file():
        return
    there = json.loads((out / RUN).read_text())
    other = [
        f"{name}: {there['config'].get(name)!r} there, {value!r} asked for"
        for name, value in identity["config"].items()
        if there["config"].get(name) != value
    ]
    other += [
        f"another {name}" for name in ("corpus", "tokenizer") if there.get(name) != identity[name]
    ]
    if other:
        raise ValueError(
            f"{out} holds another run ({'; '.join(other)}); take another --out, or the same options"
        )


def write_identity(out: Path, identity: dict[str, Any]) -> None:
    """Say in the folder which run it is of."""
    unfinished = out / f".{RUN}.unfinished"
    unfinished.write_text(json.dumps(identity, indent=1) + "\n")
    unfinished.replace(out / RUN)


def check_corpora(config: PretrainConfig, corpus: Corpus, valid: Corpus | None) -> None:
    """Refuse what would fail later: a vocabulary without a mask, two tokenizers."""
    if config.objective == "mlm" and corpus.vocabulary.specials.mask is None:
        raise ValueError(
            f"tokenizer {corpus.vocabulary.name!r}: a masked language model needs a mask token, "
            "which it does not have; take another one, or --objective causal"
        )
    if valid is not None and valid.vocabulary.fingerprint != corpus.vocabulary.fingerprint:
        raise ValueError(
            f"the validation corpus was prepared with the tokenizer {valid.vocabulary.name!r} "
            f"({valid.vocabulary.fingerprint}), the training corpus with "
            f"{corpus.vocabulary.name!r} ({corpus.vocabulary.fingerprint}); prepare it again"
        )
