"""A run's folder: which run it is of, checkpoints, and at the end the model and the record.

What a killed process leaves behind is a folder that nobody looks at, and the checkpoint before it.
The record is written last: with it the run is finished.
"""

import hashlib
import io
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError

from tisa import store
from tisa.transformer import LanguageModel
from tisa.transformer.saving import KIND as TRANSFORMER
from tisa.transformer.saving import save
from tisa_lab.pretrain.asking import EVALUATE
from tisa_lab.pretrain.batches import BEGINNING, Reading
from tisa_lab.pretrain.corpus import Place
from tisa_lab.pretrain.model import curves, position_table

RUN, RECORD, LOSSES, TABLE, MODEL = "run.json", "record.json", "losses.npy", "table.npy", "model"
STATE, KEPT = "state.json", 2
# Of a checkpoint: with it there is a manifest.
KIND, FORMAT = "pretraining checkpoint", 2
# A process that makes batches outlives a killed trainer for some seconds, and has its locks.
PATIENCE = 12.0
AGAIN = "remove it, and start the run again"


@dataclass
class Progress:
    """How far a run is: everything that a checkpoint holds beside weights and optimiser."""

    step: int = 0
    reading: Reading = BEGINNING
    seconds: float = 0.0
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    # The versions that it was trained with, one after the other.
    code: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, state: dict[str, Any]) -> "Progress":
        """Return the progress of a checkpoint."""
        place = Place(**state["reading"]["place"])
        return cls(**{**state, "reading": Reading(place, state["reading"]["used"])})

    def note(self, code: str, say: Callable[[str], None]) -> None:
        """Keep the version of the code; say where it is another one than before."""
        before = self.code[-1:]
        if before == [code]:
            return
        if before:
            told = f"it was trained with {before[0]} so far, and goes on with {code}"
            say(f"{told}: its numbers may differ from those of one version")
        self.code.append(code)


def held(out: Path) -> AbstractContextManager[None]:
    """Keep other processes out of a run's folder; say who has it where that is another one."""
    return store.only_writer(out / ".lock", out, patience=PATIENCE)


def check_run(out: Path, identity: dict[str, Any]) -> None:
    """Refuse a folder that holds another run."""
    if not (out / RUN).is_file():
        return
    other = differences(store.read_json(out / RUN, remedy=AGAIN), identity)
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
    if EVALUATE in identity and EVALUATE not in there:
        other.append("no evaluation")
    # What an earlier version did not know of a run is not compared.
    return other + [
        f"another {name}"
        for name in sorted(identity.keys() & there.keys() - {"config", store.CODE})
        if there[name] != identity[name]
    ]


def write_run(out: Path, identity: dict[str, Any]) -> None:
    """Say in the folder which run it is of."""
    store.write_json(out / RUN, identity)


def finished(out: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """Return the record of a finished run, None where it is not finished."""
    if not (out / RECORD).is_file():
        return None
    record = store.read_json(out / RECORD, remedy=AGAIN)
    # Of the tokenizer a record has the name alone; records of before lack others.
    told = {k: v for k, v in identity.items() if k in record and k != "tokenizer"}
    other = differences(record, told)
    if other:
        raise store.Damaged(f"{out / RECORD}: is of another run ({'; '.join(other)}); {AGAIN}")
    return record


def folder_of(out: Path) -> Path:
    """Return where the checkpoints of a run are."""
    return out / "checkpoints"


def all_of(out: Path) -> list[Path]:
    """Return the finished checkpoints of a run, the newest first."""
    found = [p for p in folder_of(out).glob("step-*") if re.fullmatch(r"step-\d+", p.name)]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")), reverse=True)


def latest(out: Path, identity: dict[str, Any], say: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint that is whole and of this run, None where there never was one.

    What is wrong with those after it is said.
    """
    found = all_of(out)
    for checkpoint in found:
        try:
            # One that was written before there were manifests has none, and no format.
            manifest = store.check_folder(checkpoint, KIND, identity=identity, remedy="left aside")
            if manifest is None and "format" in store.read_json(checkpoint / STATE, remedy=AGAIN):
                raise store.Damaged(f"{checkpoint}: its {store.MANIFEST} is missing; left aside")
        except (OSError, ValueError) as damaged:
            say(str(damaged))
        else:
            return checkpoint
    if found:
        raise store.Damaged(
            f"{folder_of(out)}: expected a checkpoint that is whole, got none of {len(found)}; "
            "remove the folder to begin from the first step"
        )
    return None


def load(accelerator: Any, checkpoint: Path) -> tuple[Progress, npt.NDArray[np.float64]]:
    """Give weights and optimiser the values of a checkpoint; return its progress and its losses."""
    try:
        state = store.read_json(checkpoint / STATE, remedy=AGAIN)
        losses: npt.NDArray[np.float64] = np.load(checkpoint / LOSSES)
        accelerator.load_state(str(checkpoint))
    except torch.OutOfMemoryError:
        raise
    except (OSError, EOFError, ValueError, RuntimeError, UnpicklingError, SafetensorError) as wrong:
        # Written before there were checksums, or for another number of processes.
        first = next(iter(str(wrong).strip().splitlines()), type(wrong).__name__)
        raise ValueError(
            f"{checkpoint}: expected a checkpoint of `tisa-lab pretrain`, got {first}; remove the "
            "folder to go on from the one before it"
        ) from wrong
    state.pop("format", None)
    return Progress.of(state), losses


class Writer:
    """Writes checkpoints, all processes together; a run goes on while one is proved and flushed."""

    def __init__(self, accelerator: Any, out: Path, identity: dict[str, Any]) -> None:
        self.accelerator, self.out, self.identity = accelerator, out, identity
        self._beside = ThreadPoolExecutor(1)
        self._finishing: Future[None] | None = None

    def write(self, progress: Progress, losses: npt.NDArray[np.float64]) -> None:
        """Write a checkpoint; it has its name when `settle` returns."""
        self.settle()
        accelerator = self.accelerator
        place = folder_of(self.out) / f"step-{progress.step:08d}"
        unfinished = place.with_name(f".{place.name}.unfinished")
        if accelerator.is_main_process:
            shutil.rmtree(unfinished, ignore_errors=True)
            store.make_folder(unfinished)
        accelerator.wait_for_everyone()
        with store.told(place):
            accelerator.save_state(str(unfinished), safe_serialization=True)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            with store.told(place):
                np.save(unfinished / LOSSES, losses)
                store.write_json(unfinished / STATE, {"format": FORMAT, **asdict(progress)})
            self._finishing = self._beside.submit(self._finish, unfinished, place)

    def settle(self) -> None:
        """Wait until the checkpoint that was written last has its name; raise what was wrong."""
        finishing, self._finishing = self._finishing, None
        if finishing is not None:
            finishing.result()

    def _finish(self, unfinished: Path, place: Path) -> None:
        with store.told(place):
            store.seal_folder(unfinished, KIND, self.identity)
            store.finish_folder(unfinished, place)
        for old in (*all_of(self.out)[KEPT:], *folder_of(self.out).glob(".*.unfinished")):
            shutil.rmtree(old, ignore_errors=True)


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
        kept = {LOSSES: np.array(losses)}
        if state:
            own = LanguageModel(model.config)
            # The prefixes are those of torch.compile and of `WithLoss`.
            names = {name: name.removeprefix("_orig_mod.").removeprefix("model.") for name in state}
            own.load_state_dict({names[name]: value.cpu() for name, value in state.items()})
            with store.new_folder(out / MODEL, replace=True) as unfinished:
                save(own, unfinished)
                save_tokenizer(unfinished)
                told = {name: record[name] for name in ("config", "corpus", store.CODE)}
                # Again, with the tokenizer.
                store.seal_folder(unfinished, TRANSFORMER, {"model": "LanguageModel", **told})
            table = position_table(own)
            if table is not None:
                kept[TABLE] = table.half().numpy()
            record["curves"] = curves(own, record["config"]["lengths"][-1][0])
        record["files"] = {}
        for name, array in kept.items():
            content = io.BytesIO()
            np.save(content, array)
            store.write_bytes(out / name, content.getvalue())
            record["files"][name] = hashlib.sha256(content.getvalue()).hexdigest()
        store.write_json(out / RECORD, record, indent=None)
    accelerator.wait_for_everyone()
