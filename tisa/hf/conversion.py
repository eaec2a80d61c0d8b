"""A pretrained model in, the same model with scores of the offset out."""

import copy
import hashlib
import json
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import torch
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tisa.hf import families
from tisa.hf.calibration import (
    Tokens,
    batches_of,
    ends_of,
    fold_vectors,
    load_tokenizer,
    tokens_of,
)
from tisa.hf.core import LIFTED, TABLES, Folded, Places, model_class
from tisa.hf.fit import Fit, fit_kernels_to, fit_scores
from tisa.hf.registry import register_type
from tisa.positions import Given
from tisa.scoring.base import check_flags
from tisa.store import tensors_digest

# Buffers with an entry for each place of the table.
PER_PLACE = ("position_ids", "token_type_ids")
Positions = Literal["keep", "replace", "extend"]
Start = Literal["reference", "zero", "fit"]
Sinks = Literal["ends", "global"]


class Window(NamedTuple):
    """How far a token sees, and what is seen from everywhere: `window` and `sinks` of `convert`."""

    tokens: int | None
    sinks: Sinks | None = None


def convert(
    model: PreTrainedModel,
    *,
    scoring: Given = "tisa",
    num_kernels: int | None = None,
    positions: Positions = "replace",
    num_places: int | None = None,
    init: Start | None = None,
    fold: bool = True,
    fold_by: Literal["tokens", "inputs"] = "tokens",
    shared: bool = False,
    window: int | None = None,
    sinks: Sinks | None = None,
    calibration: Any = None,
    tokenizer: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> PreTrainedModel:
    """Return a converted copy of a transformers model; the model given stays as it was.

    Args:
        model: any model whose attention goes through transformers' attention interface, and MPNet.
        scoring: what gives the scores: TISA's kernels; any other function of the offset by its name
            ("near-far"), a class of your own, or "my_file.py:Class". Options follow a name after
            colons. It is needed again to load the model.
        num_kernels: S, kernels per head, for a function that has some; None: 5. A model that has a
            table of the offset of its own (MPNet) and gives up its positions keeps that table, and
            has no kernels, unless this, `init` or `scoring` asks for scores in its place.
        positions: "replace" leaves the learned position table out (the paper's b), and the model
            takes any length; "extend" too, and keeps the table's slow part, its vectors at some
            places and lines between them: nearer to the model on long inputs, and not
            translation-invariant up to its old limit; "keep" adds scores to the positions that the
            model has (the paper's a).
        num_places: with "extend", at how many places; None: a tenth of the table's, at most 47. One
            more lies beyond the table, where place has faded out.
        init: "fit", scores fitted to the model's own heads (the default unless positions are
            kept); "reference", the author's random kernels (the default with "keep"); "zero",
            which changes nothing yet.
        fold: with "replace", keep what the position vectors say besides the order: one vector for
            the token that always stands first, one for the last, one for all others.
        fold_by: what counts alike in these vectors: the calibration's "tokens", or its "inputs",
            which is better where inputs are of very different lengths.
        shared: ALBERT: one scoring function for all passes, and not one for each.
        window: how far a token sees, to both sides: time and memory then grow with the length, and
            not with its square. None: without limit. Scores are fitted without it.
        sinks: "ends": the first and the last real token of a sequence are seen by all, however far
            away. (In a decoder nobody sees the last one before it is there.) "global": these two
            see all, too; for encoders, and no time is saved. None: none are. Sinks are tokens here,
            not the learned logits which are called attention sinks elsewhere.
        calibration: texts, pairs of texts or token ids, like those the model will see; for "fit"
            and for the fold. None: a small built-in English text, and a warning says so.
        tokenizer: for calibration by text; by default the one that lies beside the model.
        progress: called with (layers fitted, layers).
    """
    check_flags("convert", fold=fold, shared=shared)
    own_table = families.has_offset_table(model) and positions != "keep"
    own_table = own_table and num_kernels is None and init is None and scoring == "tisa"
    if num_kernels is None:
        num_kernels = 0 if own_table else 5
    scores: dict[str, Any] = {"num_kernels": num_kernels}
    if init is None:
        init = "fit" if positions != "keep" and num_kernels else "reference"
    _check(model, num_kernels, positions, init, shared, fold_by)
    _check_places(model, positions, num_places)
    _check_window(model, window, sinks)
    if scoring != "tisa":
        from tisa.hf.other_scores import described_scoring

        scores = described_scoring(scoring, model, num_kernels, init)
    fold = fold and positions == "replace"
    sequences, ends = None, None
    if fold or init == "fit":
        tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
        sequences = tokens_of(calibration, model, tokenizer)
        ends = ends_of(sequences, tokenizer)
    described = {
        "format": 1,
        "base_model_type": model.config.model_type,
        **scores,
        "positions": positions,
        "init": "zero" if init == "zero" else "reference",
        "start": init,
        "shared": shared,
        "fold": fold,
        "first_token_id": ends.first if ends else -1,
        "last_token_id": ends.last if ends else -1,
        "replaced_parameters": 0 if positions == "keep" else _table_size(model, own_table),
        "made_from": {
            "model": model.config.name_or_path,
            "tensors": tensors_digest(model.state_dict()),
            "calibration": None if sequences is None else _digest(sequences),
        },
    }
    if positions == "extend":
        described |= {"format": 3, "places": _places(model, num_places)}
    if own_table:
        described |= {"format": 3, "keeps_relative_bias": True}
    converted = _rebuilt(model, described)
    if positions == "extend":
        _set_places(converted, model)
    if fold:
        assert sequences is not None
        assert ends is not None
        _set_fold(converted, model, sequences, ends, fold_by)
    if init == "fit":
        assert sequences is not None
        fit: Fit = fit_kernels_to
        if "scoring" in scores:
            from tisa.hf.descent import fit_by_descent

            fit = fit_by_descent
        fit_scores(converted, model, batches_of(sequences, model), fit=fit, progress=progress)
    if window is not None:
        # Now: the fit's own texts are whole.
        converted.config.tisa |= {"format": 4, "window": window, "sinks": sinks}
    return converted.train(model.training)


def _check(
    model: PreTrainedModel,
    num_kernels: int,
    positions: str,
    init: str,
    shared: bool,
    fold_by: str,
) -> None:
    """Refuse what cannot be done, before anything is done."""
    for name, value, allowed in (
        ("positions", positions, ("keep", "replace", "extend")),
        ("init", init, ("reference", "zero", "fit")),
        ("fold_by", fold_by, ("tokens", "inputs")),
    ):
        if value not in allowed:
            raise ValueError(f"convert: {name} must be one of {', '.join(allowed)}, got {value!r}")
    if not isinstance(num_kernels, int) or num_kernels < 0:
        raise ValueError(f"convert: num_kernels must be a whole number from 0, got {num_kernels}")
    reason = families.reason_against(model, positions)
    if reason is None and model.config.model_type not in CONFIG_MAPPING:
        reason = f"{model.config.model_type} is no model type of transformers, which would load it"
    if reason is not None:
        raise ValueError(f"convert: this model cannot be converted: {reason}")
    if init == "fit" and positions == "keep":
        raise ValueError(
            'convert: init="fit" copies what the positions do, and with positions="keep" they do '
            'it still; take positions="replace", or init="zero"'
        )
    if shared and not families.is_albert(model):
        raise ValueError(
            "convert: shared=True is for ALBERT, whose passes share one layer; "
            f"the layers of {type(model).__name__} have weights of their own"
        )
    table = families.position_table(model)
    words = model.get_input_embeddings()
    width = words.embedding_dim if table is None else table.embedding.embedding_dim
    if positions != "keep" and width != words.embedding_dim:
        raise ValueError(
            f"convert: position vectors are {width} wide and word vectors {words.embedding_dim}, "
            'a projection between them; only positions="keep" works here'
        )


def _check_places(model: PreTrainedModel, positions: str, num_places: int | None) -> None:
    if positions != "extend":
        if num_places is not None:
            raise ValueError(
                f'convert: num_places is for positions="extend", got {num_places} with '
                f'"{positions}"'
            )
        return
    most = len(families.table_rows(model))
    if num_places is not None and not (isinstance(num_places, int) and 2 <= num_places <= most):
        raise ValueError(
            f"convert: num_places must be a whole number from 2 to {most}, the table's positions, "
            f"got {num_places}"
        )


def _check_window(model: PreTrainedModel, window: int | None, sinks: str | None) -> None:
    if sinks not in (None, "ends", "global"):
        raise ValueError(f'convert: sinks must be "ends", "global" or None, got {sinks!r}')
    if window is None:
        if sinks is not None:
            raise ValueError(f'convert: sinks is for a window, got "{sinks}" without one')
        return
    if not isinstance(window, int) or isinstance(window, bool) or window < 0:
        raise ValueError(f"convert: window must be a whole number from 0, got {window!r}")
    if sinks == "global" and families.is_causal(model):
        raise ValueError(
            'convert: sinks="global" is for encoders: a token of a decoder that is the last one '
            'while it is written would see what it does not see in a whole text; take "ends"'
        )
    if families.has_window(model):
        raise ValueError(
            "convert: window must be None for this model, whose layers have a window of their own"
        )


def _digest(sequences: list[Tokens]) -> str:
    """Return the SHA-256 of token sequences."""
    return hashlib.sha256(json.dumps(sequences).encode()).hexdigest()


def _table_size(model: PreTrainedModel, own_table: bool) -> int:
    table = families.position_table(model)
    size = 0 if table is None else table.embedding.weight.numel()
    for module in model.modules():
        if hasattr(module, "relative_attention_bias") and not own_table:
            size += module.relative_attention_bias.weight.numel()
    return size


def _rebuilt(model: PreTrainedModel, described: dict[str, Any]) -> PreTrainedModel:
    """Return the converted class with the model's weights, on its device and in its dtype."""
    register_type(model.config.model_type)
    cls = model_class(cast(Any, type(model)))
    values = copy.deepcopy(model.config.to_dict())
    values.pop("model_type", None)
    config = cls.config_class.from_dict(values)
    config.name_or_path = model.config.name_or_path
    config.tisa = described
    if described["positions"] != "keep":
        config.max_position_embeddings = LIFTED
    with torch.device(model.device):
        converted = cls._from_config(config, dtype=model.dtype)
    _leave_out(converted, model)
    state = model.state_dict()
    if described["positions"] != "keep":
        state = {k: v for k, v in state.items() if k.split(".")[-1] not in PER_PLACE}
    missing, unexpected = converted.load_state_dict(state, strict=False)
    allowed = set(TABLES) | {"relative_attention_bias"}
    lost = [k for k in unexpected if not allowed & set(k.split("."))]
    made = ("fold", "places", *PER_PLACE)
    new = [k for k in missing if "offset_scores" not in k and k.split(".")[-1] not in made]
    assert not lost, lost
    assert not new, new
    converted.tie_weights()
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    for name, parameter in converted.named_parameters():
        parameter.requires_grad_(name not in frozen)
    if model.can_generate():
        converted.generation_config = copy.deepcopy(model.generation_config)
    return converted


def _leave_out(converted: PreTrainedModel, model: PreTrainedModel) -> None:
    """Take out of the converted model what the model was built without, as a pooling layer."""
    for name in [name for name, _ in converted.named_modules() if name]:
        parent, _, leaf = name.rpartition(".")
        try:
            absent = getattr(model.get_submodule(parent), leaf, model) is None
        except AttributeError:
            continue
        if absent:
            setattr(converted.get_submodule(parent), leaf, None)


def _places(model: PreTrainedModel, count: int | None) -> list[int]:
    """Return the rows of the table whose places are kept."""
    # Here: who replaces positions need not open it.
    from tisa.hf.places import knots_of, most_places

    table = families.position_table(model)
    assert table is not None
    positions = len(families.table_rows(model))
    count = most_places(positions) if count is None else count
    return [table.first_row + knot for knot in knots_of(positions, count)]


def _set_places(converted: PreTrainedModel, model: PreTrainedModel) -> None:
    from tisa.hf.places import place_vectors

    rows = families.table_rows(model)
    (found,) = (module for module in converted.modules() if isinstance(module, Places))
    # The places are rows of the table, which may begin with those of no position.
    knots = [knot - found.knots[0] for knot in found.knots]
    with torch.no_grad():
        found.places.copy_(place_vectors(rows, knots))


def _set_fold(
    converted: PreTrainedModel, model: PreTrainedModel, sequences: Any, ends: Any, by: Any
) -> None:
    table = families.position_table(model)
    assert table is not None
    rows = families.table_rows(model)
    words = converted.get_input_embeddings()
    assert isinstance(words, Folded)
    # What is multiplied outside of the embeddings is so with the folded vectors in them.
    scale = 1.0 if hasattr(words, "embed_scale") else getattr(table.parent, "embed_scale", 1.0)
    with torch.no_grad():
        words.fold.copy_(fold_vectors(rows, sequences, ends, by=by) / scale)
