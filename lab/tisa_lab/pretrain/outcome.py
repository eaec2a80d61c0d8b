"""What a finished run leaves behind: the model, and a record of numbers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tisa.transformer import LanguageModel
from tisa.transformer.saving import save
from tisa_lab.pretrain.batches import Share
from tisa_lab.pretrain.config import PretrainConfig
from tisa_lab.pretrain.observing import curves, position_table
from tisa_lab.record import surroundings

RECORD, LOSSES, TABLE, MODEL = "record.json", "losses.npy", "table.npy", "model"
POINTS = 400


def record_of(
    *,
    config: PretrainConfig,
    tokenizer: str,
    identity: dict[str, Any],
    progress: dict[str, Any],
    losses: list[float],
    speed: dict[str, float],
    share: Share,
    counts: tuple[int, int],
    command: str,
    device: torch.device,
) -> dict[str, Any]:
    """Return what tables and figures are made of."""
    return {
        "kind": "pretrain",
        "config": config.to_dict(),
        "tokenizer": tokenizer,
        **{name: identity[name] for name in ("corpus", "validation", "precision")},
        "tokens": config.steps * config.batch_tokens,
        "parameters": {"positional": counts[0], "others": counts[1]},
        "loss": thinned(losses),
        "evaluations": progress["evaluations"],
        "seconds": progress["seconds"],
        "speed": speed,
        "processes": share.processes,
        "surroundings": surroundings(command, device),
    }


def thinned(losses: list[float]) -> list[list[float]]:
    """Return at most `POINTS` pairs of a step and the mean loss of the steps up to it."""
    every = max(1, -(-len(losses) // POINTS))
    return [
        [min(first + every, len(losses)), float(np.mean(losses[first : first + every]))]
        for first in range(0, len(losses), every)
    ]


def write_outcome(
    accelerator: Any,
    prepared: Any,
    model: LanguageModel,
    record: dict[str, Any],
    losses: list[float],
    out: Path,
    save_tokenizer: Callable[[Path], None],
) -> None:
    """Write model, tokenizer and losses, and the record last: with it the run is finished."""
    # Of sharded weights every process gives its part.
    state = accelerator.get_state_dict(prepared)
    if accelerator.is_main_process:
        own = LanguageModel(model.config)
        # The prefixes are those of torch.compile and of `WithLoss`.
        names = {name: name.removeprefix("_orig_mod.").removeprefix("model.") for name in state}
        own.load_state_dict({names[name]: value.cpu() for name, value in state.items()})
        save(own, out / MODEL)
        save_tokenizer(out / MODEL)
        np.save(out / LOSSES, np.array(losses))
        table = position_table(own)
        if table is not None:
            np.save(out / TABLE, table.half().numpy())
        record["curves"] = curves(own, record["config"]["lengths"][-1][0])
        unfinished = out / f".{RECORD}.unfinished"
        unfinished.write_text(json.dumps(record, ensure_ascii=False) + "\n")
        unfinished.replace(out / RECORD)
    accelerator.wait_for_everyone()
