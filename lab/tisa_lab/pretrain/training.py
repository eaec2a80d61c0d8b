"""One run: a config and a corpus in, a trained model in a folder and its record out.

Underneath is `accelerate`: started by its launcher or by torchrun, the same call trains on several
processes (DDP, FSDP2 by its config). The loss is a sum over labels divided by the number of labels
of all processes and micro-batches, so that what they share does not change what is computed.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tisa_lab.pretrain import checkpoints
from tisa_lab.pretrain.config import PretrainConfig
from tisa_lab.pretrain.corpus import Corpus
from tisa_lab.pretrain.launching import DEFAULTS, Settings, lost_process, precision_of
from tisa_lab.pretrain.live import SILENT, View, spoken
from tisa_lab.pretrain.outcome import RECORD, record_of, write_outcome
from tisa_lab.pretrain.session import Session

RUN = "run.json"


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
    identity = identity_of(config, corpus, valid, settings)
    check_identity(out, identity)
    if (out / RECORD).is_file():
        view.say(f"finished before: {out / RECORD}")
        return json.loads((out / RECORD).read_text())
    check_corpora(config, corpus, valid)
    session = Session(config, corpus, out, valid, settings, view)
    if session.accelerator.is_main_process:
        write_identity(out, identity)
    try:
        finished = session.train(stop)
    except torch.OutOfMemoryError as full:
        tokens = config.batch_tokens // session.share.processes // session.share.micro
        raise ValueError(
            f"out of GPU memory with {tokens:,} tokens at a time; a smaller --micro-tokens takes "
            "less, and changes no result"
        ) from full
    except RuntimeError as wrong:
        step, last = session.progress.step, checkpoints.latest(out)
        raise lost_process(wrong, step, last, session.share) from wrong
    if not finished:
        view.say(f"stopped after {session.progress.step:,} steps; the same command goes on")
        return None
    record = record_of(
        config=config, tokenizer=corpus.vocabulary.name, identity=identity,
        progress=session.progress.state(),
        losses=session.loop.losses, speed=session.loop.speed(session.peak), share=session.share,
        counts=session.counts, command=command, device=session.accelerator.device,
    )  # fmt: skip
    write_outcome(
        session.accelerator, session.prepared, session.model, record, session.loop.losses, out,
        save_tokenizer,
    )  # fmt: skip
    session.accelerator.end_training()
    # Of a few steps there is none.
    speed = record["speed"].get("tokens_per_second")
    fast = "" if speed is None else f"{speed:,.0f} tokens/s, "
    view.say(f"{fast}{spoken(session.progress.seconds)}, written to {out}")
    return record


def identity_of(
    config: PretrainConfig, corpus: Corpus, valid: Corpus | None, settings: Settings
) -> dict[str, Any]:
    """Return all that the numbers of a run depend on."""
    return {
        "config": config.to_dict(),
        "corpus": corpus.fingerprint,
        "tokenizer": corpus.vocabulary.fingerprint,
        "validation": None if valid is None else [valid.fingerprint, settings.valid_tokens],
        "precision": precision_of(settings),
    }


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
        f"another {name}"
        for name in identity
        if name != "config" and there.get(name) != identity[name]
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
