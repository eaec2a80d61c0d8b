"""A run's folder: which run it is of, checkpoints, and at the end the model and the record.

What a killed process leaves behind is a folder that nobody looks at, and the checkpoint before it.
The record is written last: with it the run is finished.
"""

import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError

from tisa.store import finish_folder, locked, new_file, write_text
from tisa.transformer import LanguageModel
from tisa.transformer.saving import save
from tisa_lab.pretrain.model import curves, position_table

RUN, RECORD, LOSSES, TABLE, MODEL = "run.json", "record.json", "losses.npy", "table.npy", "model"
STATE, KEPT = "state.json", 2
# A process that makes batches outlives a killed trainer for some seconds, and has its locks.
PATIENCE = 12.0


@contextmanager
def held(out: Path) -> Iterator[None]:
    """Keep other processes out of a run's folder; say who has it where that is another one."""
    end = time.monotonic() + PATIENCE
    while True:
        with locked(out / ".lock", wait=False) as had:
            if had:
                write_text(out / ".held-by", f"process {os.getpid()} on {platform.node()}")
                yield
                return
        if time.monotonic() > end:
            holder = out / ".held-by"
            who = holder.read_text() if holder.is_file() else "another process"
            raise BlockingIOError(
                f"{out}: expected a folder in which nobody trains, got one that {who} trains in; "
                "wait for its end, or take another folder"
            )
        time.sleep(0.2)


def check_run(out: Path, identity: dict[str, Any]) -> None:
    """Refuse a folder that holds another run."""
    if not (out / RUN).is_file():
        return
    other = differences(json.loads((out / RUN).read_text()), identity)
    if other:
        raise ValueError(
            f"{out} holds another run ({'; '.join(other)}); take another folder, or the same "
            "options"
        )


def differences(there: dict[str, Any], identity: dict[str, Any]) -> list[str]:
    """Return in words what of a run that was found is not as in the run that is asked for."""
    config = there["config"]
    other = [
        f"{name}: {config.get(name)!r} there, {value!r} asked for"
        for name, value in identity["config"].items()
        if config.get(name) != value
    ]
    return other + [
        f"another {name}"
        for name in identity
        if name != "config" and there.get(name) != identity[name]
    ]


def write_run(out: Path, identity: dict[str, Any]) -> None:
    """Say in the folder which run it is of."""
    write_text(out / RUN, json.dumps(identity, indent=1) + "\n")


def finished(out: Path) -> dict[str, Any] | None:
    """Return the record of a finished run, None where it is not finished."""
    return json.loads((out / RECORD).read_text()) if (out / RECORD).is_file() else None


def folder_of(out: Path) -> Path:
    """Return where the checkpoints of a run are."""
    return out / "checkpoints"


def latest(out: Path) -> Path | None:
    """Return the newest finished checkpoint of a run, None where there is none."""
    found = [p for p in folder_of(out).glob("step-*") if re.fullmatch(r"step-\d+", p.name)]
    return max(found, key=lambda p: int(p.name.removeprefix("step-")), default=None)


def load(accelerator: Any, checkpoint: Path) -> tuple[dict[str, Any], npt.NDArray[np.float64]]:
    """Give weights and optimiser the values of a checkpoint; return its state and its losses."""
    try:
        state = json.loads((checkpoint / STATE).read_text())
        losses: npt.NDArray[np.float64] = np.load(checkpoint / LOSSES)
        accelerator.load_state(str(checkpoint))
    except torch.OutOfMemoryError:
        raise
    except (OSError, EOFError, ValueError, RuntimeError, UnpicklingError, SafetensorError) as wrong:
        # Whole when it was written: a disk or a copy has lost a part of it.
        first = next(iter(str(wrong).strip().splitlines()), type(wrong).__name__)
        raise ValueError(
            f"{checkpoint}: expected a checkpoint of `tisa-lab pretrain`, got {first}; remove the "
            "folder to go on from the one before it"
        ) from wrong
    return state, losses


def write(
    accelerator: Any, out: Path, state: dict[str, Any], losses: npt.NDArray[np.float64]
) -> Path:
    """Return the new checkpoint, which all processes have written together."""
    place = folder_of(out) / f"step-{state['step']:08d}"
    unfinished = place.with_name(f".{place.name}.unfinished")
    if accelerator.is_main_process:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(unfinished), safe_serialization=True)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        np.save(unfinished / LOSSES, losses)
        (unfinished / STATE).write_text(json.dumps(state))
        finish_folder(unfinished, place, replace=True)
        for old in (
            *sorted(folder_of(out).glob("step-*"))[:-KEPT],
            *folder_of(out).glob(".*.unfinished"),
        ):
            shutil.rmtree(old, ignore_errors=True)
    accelerator.wait_for_everyone()
    return place


def write_outcome(
    accelerator: Any,
    prepared: Any,
    model: LanguageModel,
    record: dict[str, Any],
    losses: list[float],
    out: Path,
    save_tokenizer: Callable[[Path], None],
) -> None:
    """Write model, tokenizer and losses, and the record last; of a run that diverged no model."""
    # Of sharded weights every process gives its part.
    state = accelerator.get_state_dict(prepared) if "diverged" not in record else {}
    if accelerator.is_main_process:
        with new_file(out / LOSSES) as place, open(place, "wb") as file:
            np.save(file, np.array(losses))
        if state:
            own = LanguageModel(model.config)
            # The prefixes are those of torch.compile and of `WithLoss`.
            names = {name: name.removeprefix("_orig_mod.").removeprefix("model.") for name in state}
            own.load_state_dict({names[name]: value.cpu() for name, value in state.items()})
            save(own, out / MODEL)
            save_tokenizer(out / MODEL)
            table = position_table(own)
            if table is not None:
                np.save(out / TABLE, table.half().numpy())
            record["curves"] = curves(own, record["config"]["lengths"][-1][0])
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
        write_text(out / RECORD, text + "\n")
    accelerator.wait_for_everyone()
