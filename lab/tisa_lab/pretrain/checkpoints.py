"""Checkpoints that are there whole or not at all.

Everything is written into a folder with another name, flushed to the disk, and renamed. What a
killed process leaves behind is a folder that nobody looks at, and the checkpoint before it.
"""

import json
import os
import re
import shutil
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError

STATE, LOSSES = "state.json", "losses.npy"
KEPT = 2


def folder_of(out: Path) -> Path:
    """Return where the checkpoints of a run are."""
    return out / "checkpoints"


def latest(out: Path) -> Path | None:
    """Return the newest finished checkpoint of a run, None where there is none."""
    found = [p for p in folder_of(out).glob("step-*") if re.fullmatch(r"step-\d+", p.name)]
    return max(found, key=lambda p: int(p.name.removeprefix("step-")), default=None)


def read(checkpoint: Path) -> tuple[dict[str, Any], npt.NDArray[np.float64]]:
    """Return the state that lies beside the weights, and the losses of all steps before it."""
    try:
        state = json.loads((checkpoint / STATE).read_text())
        losses: npt.NDArray[np.float64] = np.load(checkpoint / LOSSES)
    except (OSError, ValueError) as wrong:
        raise _broken(checkpoint, wrong) from None
    return state, losses


def load(accelerator: Any, checkpoint: Path) -> tuple[dict[str, Any], npt.NDArray[np.float64]]:
    """Give weights and optimiser the values of a checkpoint; return what `read` returns."""
    found = read(checkpoint)
    try:
        accelerator.load_state(str(checkpoint))
    except torch.OutOfMemoryError:
        raise
    except (OSError, EOFError, ValueError, RuntimeError, UnpicklingError, SafetensorError) as wrong:
        # Whole when it was written: a disk or a copy has lost a part of it.
        raise _broken(checkpoint, wrong) from wrong
    return found


def _broken(checkpoint: Path, wrong: Exception) -> ValueError:
    first = next(iter(str(wrong).strip().splitlines()), type(wrong).__name__)
    return ValueError(
        f"{checkpoint}: expected a checkpoint of `tisa-lab pretrain`, got {first}; remove the "
        "folder to go on from the one before it"
    )


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
        finish(unfinished, place)
        remove_old(out)
    accelerator.wait_for_everyone()
    return place


def finish(unfinished: Path, place: Path) -> None:
    """Give a written folder its name, all of it on the disk first."""
    for path in (*unfinished.rglob("*"), unfinished):
        _flush(path)
    shutil.rmtree(place, ignore_errors=True)
    os.replace(unfinished, place)
    _flush(place.parent)


def remove_old(out: Path) -> None:
    """Remove all but the newest checkpoints, and what killed processes left behind."""
    there = sorted(folder_of(out).glob("step-*"))
    for old in (*there[:-KEPT], *folder_of(out).glob(".*.unfinished")):
        shutil.rmtree(old, ignore_errors=True)


def _flush(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
