"""Which class a model has, ours among transformers', and a checkpoint in it, each parameter proved.

For a stock class there is one subclass, `TisaBertModel` for `BertModel`, whose config is a subclass
too and has a model type of its own, "tisa-bert": a stock class would drop the scores as unexpected
weights. `core` makes them on demand, of what this package hands to it.

transformers makes the names of a file those of a class, draws what the file lacks, and logs it.
Here it is handed the tensors of a `Checkpoint`, which has been proved, and reads no file itself;
what it would have drawn is an error, but for a head that the caller asks for.
"""

import copy
import inspect
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tisa.hf import core, implementations
from tisa.hf.families import LOADED_TYPES
from tisa.offsets import to_matrix
from tisa.positions import recalled, resolve
from tisa.scoring import TISA, ScoringFunction
from tisa.store import alone, told
from tisa.store.files import DISK
from tisa.weights import FLOATS, Checkpoint

# Beside the weights a model may have a new head, and buffers such as masks and rows of places.
ROOM, BUFFERS = 2**20, 2**28
# A tokenizer is in one or more of these.
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model",
    "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip


class TisaModel(core.Converted):
    """Mixin: saved with a copy of its code, and a card, for people without this package; sealed."""

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Save like any other model, the code and the card beside it, with a manifest."""
        from tisa.hf import card

        folder, first = Path(save_directory), kwargs.get("is_main_process", True)
        # Into a folder that may hold another model: what is left of both is told by the manifest.
        with told(folder, whole=False), alone(folder) if first else nullcontext():
            super().save_pretrained(save_directory, **kwargs)
            if first:
                card.write_remote_code(self, save_directory)
                card.write_card(self, save_directory)
                card.seal(self, save_directory, ("*.safetensors", "*.safetensors.index.json"))

    def _upload_modified_files(self, working_dir: Any, *args: Any, **kwargs: Any) -> Any:
        from tisa.hf import card

        card.replace_template(self, working_dir)
        return super()._upload_modified_files(working_dir, *args, **kwargs)


@cache
def register_type(model_type: str) -> None:
    """Register the converted form of a stock model type with every Auto class that knows it."""
    stock_config = CONFIG_MAPPING[model_type]
    config = core.config_class(stock_config)
    AutoConfig.register(config.model_type, config, exist_ok=True)
    for name in dir(modeling_auto):
        if not name.startswith("AutoModel"):
            continue
        stock = core.auto_class(name, stock_config)
        if stock is not None:
            made = core.model_class(stock)
            getattr(modeling_auto, name).register(config, made, exist_ok=True)


def scoring_of(heads: int, tisa: dict[str, Any]) -> ScoringFunction:
    """Return the scoring function that a config describes: kernels, or a class that is at hand."""
    told = tisa.get("scoring")
    if told is None:
        return TISA(heads, tisa["num_kernels"], init=tisa["init"])
    cls = resolve(recalled(told["name"], told["source"], what="scoring")).scoring
    assert cls is not None
    return cls(heads, **told["options"])


def register() -> None:
    """Hand the operator to `core`; register the usual model types with the Auto classes."""
    core.parts = core.Parts(
        scoring=scoring_of,
        scores=ScoringFunction,
        to_matrix=to_matrix,
        functions={
            "tisa": implementations.on_operator,
            "eager": implementations.eager,
            "sdpa": core.sdpa,
            "flex_attention": implementations.flex,
        },
        default="tisa",
        more="",
        mpnet=implementations.mpnet,
        together=implementations.together,
        model=TisaModel,
    )
    core.register()
    # For the model itself, and for modules of it that have no scores; without a mask there is none.
    AttentionInterface.register("tisa", implementations.on_operator)
    AttentionMaskInterface.register("tisa", implementations.mask)
    for model_type in LOADED_TYPES:
        if model_type in CONFIG_MAPPING:
            register_type(model_type)


class Lacking(ValueError):  # noqa: N818
    """A file lacks parameters; `whole_head`: all of the model's head, and nothing else."""

    def __init__(self, said: str, names: str, whole_head: bool) -> None:
        super().__init__(said)
        self.names, self.whole_head = names, whole_head


def config_of(checkpoint: Checkpoint, *, trust_remote_code: bool = False) -> Any:
    """Return the config in the class of its type; code that lies beside it is run if trusted."""
    values = checkpoint.config
    kind = values.get("model_type")
    if not values:
        raise ValueError(f"{checkpoint.name}: expected a config.json beside its weights, got none")
    foreign = kind is not None and kind not in CONFIG_MAPPING
    if foreign and not (trust_remote_code and "auto_map" in values):
        needs = "auto_map" in values
        raise ValueError(
            f"{checkpoint.name}: {kind} is no model type of transformers {transformers.__version__}"
            + (", and needs code of its own, which is not run; if you trust it, give "
               "trust_remote_code=True" if needs else "; upgrade it, or take another model")
        )  # fmt: skip
    with told(Path(checkpoint.folder) / "config.json", reading=True):
        try:
            config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=foreign)
        except Exception as wrong:
            if getattr(wrong, "errno", None) in DISK:
                raise
            # Whatever the classes of transformers raise of values that they do not expect.
            raise ValueError(
                f"{checkpoint.name}: its config.json is none of a {kind} ({_first(wrong)}); take "
                "the config that belongs to its weights"
            ) from None
    config.name_or_path = checkpoint.name
    return config


def model_classes(config_class: Any) -> dict[str, Any]:
    """Return the model classes that transformers has for a class of configs, by their names."""
    try:
        module = import_module(config_class.__module__.replace("configuration_", "modeling_"))
    except ImportError:
        return {}
    found = (getattr(module, name) for name in getattr(module, "__all__", ()))
    return {
        one.__name__: one
        for one in found
        if inspect.isclass(one) and getattr(one, "config_class", None) is config_class
        and not one.__name__.endswith("PreTrainedModel")
    }  # fmt: skip


def base_class(config: Any, checkpoint: Checkpoint) -> Any:
    """Return the class of the model without a head."""
    if type(config) in AutoModel._model_mapping:
        found = AutoModel._model_mapping[type(config)]
        return found[0] if isinstance(found, tuple) else found
    if config.model_type not in CONFIG_MAPPING and "AutoModel" in config.auto_map:
        return get_class_from_dynamic_module(config.auto_map["AutoModel"], checkpoint.folder)
    raise ValueError(f"{checkpoint.name}: transformers has no AutoModel for {config.model_type}")


def tokenizer_of(name: Any, *, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer that lies beside a model's weights, or None where there is none."""
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    # What the tokenizers' own library says is an exception without a class.
    except Exception as wrong:
        if "trust_remote_code" in str(wrong):
            raise ValueError(
                f"{name}: its tokenizer needs code of its own, which is not run; if you trust it, "
                "give trust_remote_code=True"
            ) from None
        there = [file for file in TOKENIZER if (Path(name) / file).is_file()]
        if there:
            said = (str(wrong) or repr(wrong)).splitlines()[0]
            raise ValueError(
                f"{name}: its tokenizer ({', '.join(there)}) could not be loaded: {said}; make its "
                "files whole, or take them away to go on without a tokenizer"
            ) from wrong
        if isinstance(wrong, OSError | ValueError | KeyError):
            return None
        raise


def proved(
    cls: Any,
    config: Any,
    checkpoint: Checkpoint,
    *,
    new_head: bool = False,
    dtype: torch.dtype | str | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Return a model each of whose parameters is the checkpoint's.

    Args:
        cls: its class.
        config: its config.
        checkpoint: where it comes from.
        new_head: what the file lacks of a head, the pooler with it, is drawn at random.
        dtype: to load it in; None: as the config says, else as the file has it.
        **kwargs: for `from_pretrained`.
    """
    if "add_pooling_layer" in inspect.signature(cls).parameters and not any(
        "pooler" in name.split(".") for name in checkpoint.tensors
    ):
        # Of a sentence encoder, which has its own pooling, or of a model with another head.
        kwargs.setdefault("add_pooling_layer", False)
    name = config.name_or_path
    with quiet():
        _check_sizes(cls, config, checkpoint, kwargs)
        try:
            model, info = cls.from_pretrained(
                None, config=config, dtype=_dtype(checkpoint) if dtype is None else dtype,
                state_dict=checkpoint.tensors.unread(),
                output_loading_info=True, **{"trust_remote_code": False, **kwargs},
            )  # fmt: skip
        except RuntimeError as wrong:
            raise ValueError(
                f"{checkpoint.name}: the weights do not fit a {cls.__name__} of their config "
                f"({_first(wrong)})"
            ) from None
    _check_missing(model, set(info["missing_keys"]), checkpoint, new_head)
    _check_unexpected(model, sorted(info["unexpected_keys"]), checkpoint)
    model.name_or_path = model.config.name_or_path = name
    if model.can_generate() and (checkpoint.folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint.folder)
    return model


def _check_sizes(cls: Any, config: Any, checkpoint: Checkpoint, kwargs: dict[str, Any]) -> None:
    """Make the model without memory; refuse what its weights do not bear out."""
    if checkpoint.config.get("quantization_config"):
        raise ValueError(
            f"{checkpoint.name}: its weights are quantised, as its config.json says; take the "
            "model that they were made from"
        )
    takes = inspect.signature(cls).parameters
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            made = cls(copy.deepcopy(config), **{k: v for k, v in kwargs.items() if k in takes})
    except Exception as wrong:
        # A size of 0, heads that do not divide a width: whatever a class makes of them.
        raise ValueError(
            f"{checkpoint.name}: no {cls.__name__} can be made of its config.json "
            f"({_first(wrong)}); take the config that belongs to its weights"
        ) from None
    prefix = f"{made.base_model_prefix}."
    wanted = dict(made.named_parameters())
    for name, (shape, dtype) in checkpoint.tensors.entries.items():
        places = (name, prefix + name, name.removeprefix(prefix))
        own = next((wanted[place] for place in places if place in wanted), None)
        if dtype not in FLOATS and (own is not None or name.endswith(".weight")):
            raise ValueError(
                f"{checkpoint.name}: {name} holds {dtype}, quantised weights; take the model that "
                "they were made from"
            )
        # Some names stand for tensors of another shape, which transformers makes of the file's.
        if own is not None and own.numel() != torch.Size(shape).numel():
            raise ValueError(
                f"{checkpoint.name}: {name} must be of shape {tuple(own.shape)} by its "
                f"config.json, got {shape}; they are of two models"
            )
    asked, has = sum(p.numel() for p in wanted.values()), checkpoint.numbers
    if asked > 2 * has + ROOM or sum(b.numel() for b in made.buffers()) > has + BUFFERS:
        raise ValueError(
            f"{checkpoint.name}: its config.json describes a {cls.__name__} of {asked:,} numbers, "
            f"and its weights have {has:,}; they are of two models"
        )


def _dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the type that the config names, else that of most numbers in the file."""
    counts = dict.fromkeys(FLOATS, 0)
    for shape, dtype in checkpoint.tensors.entries.values():
        if dtype in counts:
            counts[dtype] += torch.Size(shape).numel()
    there = max(counts, key=lambda name: counts[name])
    told = checkpoint.config.get("dtype", checkpoint.config.get("torch_dtype")) or there
    if isinstance(told, str) and told not in FLOATS:
        raise ValueError(
            f"{checkpoint.name}: its config.json must name a type of {', '.join(FLOATS)}, got "
            f"dtype {told!r}"
        )
    told = told if isinstance(told, str) else there
    if told != there:
        warnings.warn(
            f"{checkpoint.name}: its weights are {there}, and are taken as {told}, as its "
            "config.json says", stacklevel=4,
        )  # fmt: skip
    found: torch.dtype = getattr(torch, told)
    return found


def _check_missing(
    model: PreTrainedModel, missing: set[str], checkpoint: Checkpoint, new_head: bool
) -> None:
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors |= {name: b for name, b in model.named_buffers() if b.is_floating_point()}
    # A tied weight is read under one of its names.
    read = {id(tensor) for name, tensor in tensors.items() if name not in missing}
    lacking = sorted(n for n in missing & tensors.keys() if id(tensors[n]) not in read)
    body = "" if model.base_model is model else f"{model.base_model_prefix}."
    head = [n for n in lacking if not n.startswith(body) or "pooler" in n.split(".")]
    if not lacking or (new_head and lacking == head):
        return
    own = {id(p) for name, p in tensors.items() if name.startswith(body)}
    part = any(id(p) in read - own for p in tensors.values())
    raise Lacking(
        f"{checkpoint.name}: the weights lack {_some(lacking)} of a {type(model).__name__}; "
        "take the whole file, or the config that belongs to it",
        _some(lacking), whole_head=bool(body) and lacking == head and not part,
    )  # fmt: skip


def _check_unexpected(model: PreTrainedModel, names: list[str], checkpoint: Checkpoint) -> None:
    """Refuse layers that the config leaves out; say what else of the file is nobody's."""

    def kind(name: str) -> str:
        return re.sub(r"\.\d+(?=\.)", ".*", name.removeprefix(f"{model.base_model_prefix}."))

    kinds = {kind(name) for name in model.state_dict()}
    beyond = [name for name in names if kind(name) in kinds]
    if beyond:
        raise ValueError(
            f"{checkpoint.name}: its config.json says fewer layers than the weights have, which "
            f"hold {_some(beyond)} as well; take the config that belongs to them"
        )
    # Another class than the file's leaves the head out: that is what it is asked for.
    if names and type(model).__name__ in (checkpoint.config.get("architectures") or ()):
        warnings.warn(
            f"{checkpoint.name}: a {type(model).__name__} has no place for {_some(names)} in its "
            "weights; not read", stacklevel=3,
        )  # fmt: skip


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def _first(wrong: Exception) -> str:
    """Return the first words of what a library says."""
    said = " ".join(str(wrong).split()) or type(wrong).__name__
    return said[:200]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from logging what is told here, and from a bar in a live view."""
    logging = transformers.logging
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
