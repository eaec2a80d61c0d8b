"""A model's folder in, a converted model's folder out: what `tisa convert` does."""

import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from tisa.hf.calibration import default_texts, length_limit, tokens_of
from tisa.hf.conversion import LIFTED, Positions, Start, convert
from tisa.hf.core import model_class as converted_class
from tisa.hf.distillation import distil
from tisa.hf.measure import cosine_by_length, masked_accuracy, order_match, orders_of
from tisa.hf.registry import register_type
from tisa.hf.sentence import copy_sentence_files, sentence_folder

Score = Callable[[PreTrainedModel, Any], float]


class Done(NamedTuple):
    """A finished conversion: both models, and what was measured before and after."""

    original: PreTrainedModel
    converted: PreTrainedModel
    before: dict[str, float]
    after: dict[str, float]


def convert_folder(
    model: str,
    out: str | Path,
    *,
    positions: Positions = "replace",
    init: Start = "fit",
    num_kernels: int = 5,
    fold: bool = True,
    shared: bool = False,
    texts: list[str] | None = None,
    lengths: tuple[int, int] | None = None,
    minutes: float | None = None,
    measured: bool = False,
    score: Score | None = None,
    device: str = "cpu",
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Done:
    """Write the converted model of a folder or hub name into `out`, and return what was measured.

    Args:
        model: a folder, or a name on the hub.
        out: the folder to write; it must not be there yet, and is there only when all is done.
        positions: as for `convert`; so are `init`, `num_kernels`, `fold` and `shared`.
        init: "fit", "zero" or "reference".
        num_kernels: S.
        fold: keep what position vectors say besides the order.
        shared: ALBERT: one scoring function for all passes.
        texts: to calibrate and distil on, and to measure on; half of them is held out for that.
        lengths: (shortest, longest): calibrate on pieces of so many tokens, about.
        minutes: distil so long.
        measured: measure both models.
        score: a score of one's own: (model, tokenizer) → number.
        device: where to compute.
        seed: of the pieces that are cut and of the distillation.
        progress: called with (layers fitted, layers).
    """
    out = Path(out).resolve()
    if out.is_file():
        raise ValueError(f"--out: {out} is a file; name a new folder")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out: {out} is there already; name a new folder")
    if minutes is not None and minutes <= 0:
        raise ValueError(f"--distil: expected minutes above 0, got {minutes}")
    _check_device(device)
    original, tokenizer = load_stock(model)
    # What the hub does not give is known before anything is fitted.
    beside = sentence_folder(model)
    original = original.to(device).eval()
    used, held_out = _halves(texts)
    calibration: list[str] | None = used
    if lengths is not None:
        limit = length_limit(original)
        if lengths[1] > limit:
            raise ValueError(
                f"--lengths: the original takes up to {limit} tokens, got {lengths[1]}; scores "
                "are fitted to what it does, and go on from there for longer inputs"
            )
        calibration = pieces(used or default_texts(), tokenizer, lengths, seed=seed)
    converted = convert(
        original, positions=positions, init=init, num_kernels=num_kernels, fold=fold,
        fold_by="tokens" if lengths is None else "inputs", shared=shared,
        calibration=calibration, tokenizer=tokenizer, progress=progress,
    ).eval()  # fmt: skip
    if minutes is not None:
        distil(
            converted, original, calibration or default_texts(), tokenizer=tokenizer,
            steps=10_000, minutes=minutes, seed=seed, by_length=lengths is not None,
        )  # fmt: skip
    unfinished = out.with_name(out.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    origin = "" if beside is None else str(beside)
    save(converted, unfinished, tokenizer=tokenizer, beside=origin)
    if out.exists():
        out.rmdir()
    unfinished.rename(out)
    if not measured:
        return Done(original, converted, {}, {})
    try:
        return Done(
            original, converted, *measurements(original, converted, tokenizer, held_out, score)
        )
    except Exception as wrong:
        raise ValueError(f"{out} is written, but could not be measured: {wrong}") from wrong


def load_stock(name: str) -> tuple[PreTrainedModel, Any]:
    """Return the model in the class that its config names, and its tokenizer or None.

    Without its head, and a warning says so, where transformers does not have the class or the
    checkpoint no weights for the head, which would be random.
    """
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise ValueError(
            f"MODEL: {name} is no folder; give a model's folder or its name on the hub"
        )
    config = AutoConfig.from_pretrained(name)
    named = (getattr(config, "architectures", None) or [""])[0]
    cls = getattr(transformers, named, AutoModel)
    if named and not hasattr(transformers, named):
        warnings.warn(
            f"{name}: its config names {named}, a class that transformers does not have; taken "
            "without its head. Load it with your class, and convert it with tisa.hf.convert",
            stacklevel=2,
        )
    try:
        model, info = cls.from_pretrained(name, output_loading_info=True)
    except SafetensorError as broken:
        raise ValueError(
            f"MODEL: the weights of {name} are truncated or corrupted ({broken}); download them "
            "again"
        ) from None
    random_ones = _random_head(model, set(info["missing_keys"]))
    if random_ones:
        model = AutoModel.from_pretrained(name)
        warnings.warn(
            f"{name}: its config names {named}, but the checkpoint lacks the head's weights "
            f"({', '.join(random_ones[:3])}{', …' if len(random_ones) > 3 else ''}); taken without "
            f"the head, as {type(model).__name__}",
            stacklevel=2,
        )
    try:
        return model, AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError):
        return model, None


def _random_head(model: PreTrainedModel, missing: set[str]) -> list[str]:
    """Return the names of parameters outside the base model that no checkpoint gave a value."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # A tied weight is read under one of its names.
    read = {id(p) for key, p in parameters.items() if key not in missing}
    read |= {id(p) for p in model.base_model.parameters()}
    return sorted(k for k in missing & parameters.keys() if id(parameters[k]) not in read)


def load(name: str, *, model_class: Any = None, **kwargs: Any) -> PreTrainedModel:
    """Return a saved converted model in the class that it was saved in, whatever its type is.

    The Auto classes do the same for the types that are registered with them from the start.

    Args:
        name: a folder, or a name on the hub.
        model_class: the class of the model that was converted, where transformers does not have it.
        **kwargs: for `from_pretrained`.
    """
    values, _ = PreTrainedConfig.get_config_dict(name)
    described = values.get("tisa")
    if not isinstance(described, dict):
        raise ValueError(f"load: {name} is no converted model; make one with tisa.hf.convert")
    register_type(described["base_model_type"])
    stock = str((values.get("architectures") or [""])[0]).removeprefix("Tisa")
    if model_class is None and stock and not hasattr(transformers, stock):
        raise ValueError(
            f"load: {name} is a converted {stock}, a class that transformers does not have; give "
            f"it: tisa.hf.load(…, model_class={stock}), or model_class=AutoModel for the model "
            "without its head"
        )
    cls = model_class or getattr(transformers, stock or "AutoModel")
    # An Auto class knows the converted ones.
    cls = converted_class(cls) if hasattr(cls, "config_class") else cls
    loaded: PreTrainedModel = cls.from_pretrained(name, **kwargs)
    return loaded


def save(
    model: PreTrainedModel, folder: str | Path, *, tokenizer: Any = None, beside: str = ""
) -> None:
    """Save a converted model, its tokenizer, and what makes a sentence encoder of `beside`.

    `beside` is the folder or hub name that the model came from.
    """
    out = Path(folder)
    model.save_pretrained(out)
    unlimited = model.config.tisa["positions"] == "replace"
    if tokenizer is not None:
        limit = tokenizer.model_max_length
        if unlimited:
            tokenizer.model_max_length = LIFTED
        try:
            tokenizer.save_pretrained(out)
        finally:
            tokenizer.model_max_length = limit
    origin = sentence_folder(beside) if beside else None
    if origin is not None:
        copy_sentence_files(origin, out, max_seq_length=LIFTED if unlimited else None)


def pieces(
    texts: list[str], tokenizer: Any, lengths: tuple[int, int], *, count: int = 96, seed: int = 0
) -> list[str]:
    """Return pieces of the texts, their lengths in tokens spread evenly on a logarithmic scale."""
    shortest, longest = lengths
    if not 3 <= shortest <= longest:
        raise ValueError(f"lengths must be 3 ≤ shortest ≤ longest, got {shortest} to {longest}")
    words = " ".join(texts).split()
    tokens = len(tokenizer(" ".join(words[:500]))["input_ids"]) / len(words[:500])
    generator = random.Random(seed)
    made = []
    for _ in range(count):
        wanted = shortest * (longest / shortest) ** generator.random()
        size = max(3, round((wanted - 2) / tokens))
        start = generator.randrange(max(1, len(words) - size))
        made.append(" ".join(words[start : start + size]))
    return made


def measurements(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    tokenizer: Any,
    texts: list[str],
    score: Score | None = None,
) -> tuple[dict[str, float], dict[str, float]]:
    """Return what both models do on held-out texts, by name: before and after."""
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    if score is not None:
        before["score"], after["score"] = (score(m, tokenizer) for m in (original, converted))
    if tokenizer is None:
        return before, after
    mask = getattr(tokenizer, "mask_token_id", None)
    if type(original).__name__.endswith("ForMaskedLM") and mask is not None:
        sequences = tokens_of(texts, original, tokenizer)
        for model, found in ((original, before), (converted, after)):
            found["masked-token accuracy"] = masked_accuracy(model, sequences, mask)[0]
    with torch.no_grad():
        some = texts[:64]
        # SMILES, or texts of a few words, have no other order of words.
        if any(orders_of(text, random.Random(0)) for text in some):
            before["order-match"] = 1.0
            after["order-match"] = order_match(converted, original, tokenizer, some)
        longest = [*texts, *(" ".join(texts[i:]) for i in range(min(8, len(texts))))]
        lengths = [n for n in (16, 64, 128, 256, 512) if n <= length_limit(original)]
        by = cosine_by_length(converted, original, tokenizer, longest, lengths)
    for length, value in by.items():
        before[f"cosine to original at {length} tokens"] = 1.0
        after[f"cosine to original at {length} tokens"] = value
    return before, after


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as refused:
        reason = str(refused).splitlines()[0]
        raise ValueError(f"--device: cannot compute on {device!r}: {reason}") from None


def _halves(texts: list[str] | None) -> tuple[list[str] | None, list[str]]:
    if texts is None:
        return None, default_texts()
    if len(texts) < 2:
        raise ValueError(f"--text: expected some lines, got {len(texts)}; one text per line")
    return texts[::2], texts[1::2]
