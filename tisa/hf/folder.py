"""A model's folder in, a converted model's folder out: what `tisa convert` does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from tisa.hf.calibration import (
    default_texts,
    length_limit,
    pieces,
    warn_of_default_text,
)
from tisa.hf.card import licence_of
from tisa.hf.conversion import Positions, Start, Window, convert
from tisa.hf.distillation import distil
from tisa.hf.measure import Score, measurements
from tisa.hf.saving import load_stock, save
from tisa.hf.sentence import sentence_folder
from tisa.hf.verdict import Verdict
from tisa.packages import device_named
from tisa.scoring.base import check_flags
from tisa.store import check_new_folder, new_folder

# With minutes alone, the clock ends it.
MANY_STEPS = 10_000


def _divided(texts: list[str]) -> tuple[list[str], list[str]]:
    """Return texts to fit and distil on, and every eighth to check on."""
    if len(texts) < 2:
        raise ValueError(
            "texts must be four or more to distil: half of them is held out, and of the others "
            f"some to check on; got {len(texts)} in that half"
        )
    return [text for i, text in enumerate(texts) if i % 8 != 1], texts[1::8]


class Done(NamedTuple):
    """A finished conversion: both models, and what was measured before and after."""

    original: PreTrainedModel
    converted: PreTrainedModel
    before: dict[str, float]
    after: dict[str, float]

    @property
    def verdict(self) -> Verdict:
        """Return up to which length the converted model may take the original's place."""
        kept = self.converted.config.tisa["positions"] == "keep"
        return Verdict.of(self.after, length_limit(self.original) if kept else None)


def convert_folder(
    model: str,
    out: str | Path,
    *,
    positions: Positions = "replace",
    num_places: int | None = None,
    init: Start | None = None,
    scoring: str = "tisa",
    num_kernels: int | None = None,
    fold: bool = True,
    shared: bool = False,
    window: Window | None = None,
    texts: list[str] | None = None,
    lengths: tuple[int, int] | None = None,
    distil_steps: int | None = None,
    distil_minutes: float | None = None,
    measured: bool | Score = False,
    device: str | torch.device | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
    progress: Callable[[int, int], None] | None = None,
    finish: Callable[[Done, Path], None] | None = None,
) -> Done:
    """Write the converted model of a folder or hub name into `out`, and return what was measured.

    Args:
        model: a folder, or a name on the hub.
        out: the folder to write; it must not be there yet, and is there only when all is done.
        positions: "replace" the position table, "extend" its slow part to any length, or "keep" it
            and add scores.
        num_places: with "extend", at how many places its vectors are kept; None: a tenth of them,
            at most 47.
        init: "fit", "zero" or "reference"; None: "fit" unless positions are kept.
        scoring: what gives the scores: kernels, or another function of the offset, by name
            (near-far) or as my_file.py:Class.
        num_kernels: kernels per head, S; None: 5, or none beside a table of the offset of the
            model's own, which stays.
        fold: keep what position vectors say besides the order.
        shared: ALBERT: one scoring function for all passes.
        window: how far a token sees, to both sides, and which tokens are seen from everywhere.
        texts: to calibrate and distil on, and to measure on; half of them is held out for that, and
            of the others an eighth to check a distillation on.
        lengths: shortest and longest: calibrate on pieces of so many tokens, about.
        distil_steps: distil so many steps, or fewer where nothing is gained.
        distil_minutes: distil so long; with `distil_steps` until one of both is over.
        measured: measure both models; or a score of one's own, (model, tokenizer) → number, and
            what is measured anyway.
        device: where to compute; None: a GPU where there is one.
        seed: of the pieces that are cut and of the distillation.
        trust_remote_code: run code that lies beside the model, as its tokenizer's.
        progress: called with (layers fitted, layers).
        finish: called with what is returned and the folder, before that has its name: what is
            written there is in `out` when the model is.
    """
    check_flags("convert_folder", fold=fold, shared=shared)
    if not callable(measured):
        check_flags("convert_folder", measured=measured)
    out = Path(out).absolute()
    check_new_folder(out)
    for name, value in (("distil_steps", distil_steps), ("distil_minutes", distil_minutes)):
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be above 0, got {value}")
    if texts is not None and len(texts) < 2:
        raise ValueError(f"texts must be two or more, half of them is held out; got {len(texts)}")
    place = device_named(device)
    original, tokenizer, checkpoint = load_stock(model, trust_remote_code=trust_remote_code)
    # What the hub does not give is known before anything is fitted.
    beside = sentence_folder(model)
    original = original.to(place).eval()
    used, held_out = (None, default_texts()) if texts is None else (texts[::2], texts[1::2])
    distils = distil_steps is not None or distil_minutes is not None
    checked: list[str] = []
    if distils:
        # To check the distillation on: neither fitted nor distilled on, and not what is measured.
        used, checked = _divided(default_texts() if used is None else used)
        if texts is None:
            warn_of_default_text()
    calibration: list[str] | None = used
    if lengths is not None:
        limit = length_limit(original)
        if lengths[1] > limit:
            raise ValueError(
                f"lengths must end at {limit}, the original takes up to {limit} tokens, got "
                f"{lengths[1]}; scores are fitted to what it does, and go on from there for longer "
                "inputs"
            )
        calibration = pieces(used or default_texts(), tokenizer, lengths, seed=seed)
    converted = convert(
        original, positions=positions, num_places=num_places, init=init, scoring=scoring,
        num_kernels=num_kernels, fold=fold, fold_by="tokens" if lengths is None else "inputs",
        shared=shared, window=None if window is None else window.tokens,
        sinks=None if window is None else window.sinks,
        calibration=calibration, tokenizer=tokenizer, progress=progress,
    ).eval()  # fmt: skip
    converted.config.tisa["made_from"] |= {
        "weights": checkpoint.digests(), "license": licence_of(checkpoint.folder),
    }  # fmt: skip
    if distils:
        distil(
            converted, original, used, held_out=checked, lengths=lengths, tokenizer=tokenizer,
            steps=distil_steps or MANY_STEPS, minutes=distil_minutes, seed=seed,
        )  # fmt: skip
    done, wrong = Done(original, converted, {}, {}), None
    if measured:
        score = measured if callable(measured) else None
        done, wrong = _measured(done, tokenizer, held_out, score)
    with new_folder(out) as unfinished:
        origin = "" if beside is None else str(beside)
        save(converted, unfinished, tokenizer=tokenizer, beside=origin)
        if finish is not None and wrong is None:
            finish(done, unfinished)
    if wrong is not None:
        raise ValueError(f"{out} is written, but could not be measured: {wrong}") from wrong
    return done


def _measured(
    done: Done, tokenizer: Any, held_out: list[str], score: Score | None
) -> tuple[Done, Exception | None]:
    """Return both models with what was measured of them, or why it could not be."""
    try:
        found = measurements(done.original, done.converted, tokenizer, held_out, score)
    except Exception as raised:
        return done, raised
    done = Done(done.original, done.converted, *found)
    done.converted.config.tisa["measured"] = done.verdict.written()
    return done, None
