"""A stock model in, the same model on the operator out, in place; and back."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tisa.hf.core import Mixed, OwnScores, become
from tisa.hf.fused.alibi import (
    BloomFused,
    BloomModelFused,
    FalconFused,
    FalconModelFused,
    MptBlockFused,
    MptFused,
    MptModelFused,
)
from tisa.hf.fused.attention import NAME
from tisa.hf.fused.declared import Declared, declared_mixin
from tisa.hf.fused.mpnet import MPNetEncoderFused, MPNetFused
from tisa.hf.fused.t5 import T5Fused, UMT5Fused

# The class of an attention module, or of what is around it and makes its scores or masks, and what
# becomes of it.
FUSED: dict[str, type] = {
    "T5Attention": T5Fused,
    "MT5Attention": T5Fused,
    "UMT5Attention": UMT5Fused,
    "SwitchTransformersAttention": T5Fused,
    "Pop2PianoAttention": T5Fused,
    "Pix2StructTextAttention": T5Fused,
    "MPNetEncoder": MPNetEncoderFused,
    "MPNetSelfAttention": MPNetFused,
    "BloomModel": BloomModelFused,
    "BloomAttention": BloomFused,
    "MptModel": MptModelFused,
    "MptBlock": MptBlockFused,
    "MptAttention": MptFused,
    "FalconModel": FalconModelFused,
    "FalconAttention": FalconFused,
}
CONTENT = "its scores depend on what the tokens are, and not on the offset alone"
PLANE = "its scores are a function of two offsets, on a plane"
REFUSED = {
    "Deberta": CONTENT,
    "WavLM": "a gate that depends on the content multiplies its scores",
    "LongT5": "its encoder attends in blocks, each with the scores of its own places",
    "Udop": "to its scores of the offset it adds those of places on the page",
    "LayoutLM": "to its scores of the offset it adds those of places on the page",
    "Swin": PLANE,
    "Beit": PLANE,
    "Data2VecVision": PLANE,
}


def fuse(model: Any) -> Any:
    """Return the model, its attention on `tisa.attention`: the same numbers, faster, any length.

    In place: attention modules, and what makes their masks or scores, become instances of
    subclasses of their own classes. Weights, names,
    config and what `save_pretrained` writes stay what they were. `unfuse` undoes it.

    Args:
        model: a transformers model whose scores are a function of the offset from birth (T5, mT5,
            UMT5, Switch, Pop2Piano, Pix2Struct's text, MPNet; BLOOM, MPT, Falcon with ALiBi), one
            that has such a model in it, as a pipeline or an adapter has, or one whose attention
            modules' scores have been told to `offset_scores`.
    """
    found = _plan(model)
    for module, mixin in found:
        if hasattr(module, "config"):
            module.__dict__["implementation_before"] = module.config._attn_implementation
        become(module, mixin)
        _rehook(module)
    for config in _configs(model, [module for module, _ in found]):
        # What `set_attn_implementation` sets too; the property would set parts that are not ours.
        config._attn_implementation_internal = NAME
    return model


def unfuse(model: Any) -> Any:
    """Return the model as it was before `fuse`, in place."""
    found = fused_modules(model)
    if not found:
        raise ValueError(f"unfuse: {type(model).__name__} is not fused; there is nothing to undo")
    before = {module.__dict__.pop("implementation_before", None) for module in found} - {None}
    for config in _configs(model, found):
        config._attn_implementation_internal = next(iter(before))
    for module in found:
        for kept in ("band", "proved", "known_slopes"):
            module.__dict__.pop(kept, None)
        module.__class__ = type(module).stock
        _rehook(module)
    return model


def fused_modules(model: nn.Module) -> list[Any]:
    """Return the modules of a model that are fused."""
    mixins = (*FUSED.values(), Declared)
    return [m for m in model.modules() if isinstance(m, Mixed) and isinstance(m, mixins)]


def _plan(model: Any) -> list[tuple[Any, type]]:
    """Return what becomes what; refuse a model of which nothing can be fused."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"fuse: expected a transformers model, got {type(model).__name__}; "
            "load it with AutoModel.from_pretrained"
        )
    known = ((module, _mixin(module)) for module in model.modules())
    found = [(module, mixin) for module, mixin in known if mixin is not None]
    if not found and not fused_modules(model):
        raise ValueError(f"fuse: {type(model).__name__} cannot be fused: {_reason_against(model)}")
    there = {mixin for _, mixin in found} | {type(m).mixin for m in fused_modules(model)}
    for module, mixin in found:
        above = getattr(mixin, "above", None)
        if above is not None and above not in there:
            own = next(name for name, known in FUSED.items() if known is above)
            raise ValueError(
                f"fuse: {type(module).__name__} cannot be fused alone: the {own} that it is in "
                "tells it of positions and masks; fuse the whole model"
            )
    return found


def _mixin(module: Any) -> type | None:
    """Return what becomes of a module, or None if it is left as it is."""
    if isinstance(module, Mixed):
        return None
    if _is_stock(module) and type(module).__name__ in FUSED:
        return FUSED[type(module).__name__] if _refusal(module) is None else None
    return declared_mixin(module)


def _refusal(module: Any) -> str | None:
    """Return why a module of a known class cannot be fused."""
    against = getattr(FUSED[type(module).__name__], "against", None)
    return None if against is None else against(module)


def _is_stock(module: Any) -> bool:
    return type(module).__module__.startswith("transformers.models.")


def _reason_against(model: nn.Module) -> str:
    if any(isinstance(module, OwnScores) for module in model.modules()):
        return "it has been converted by tisa.hf.convert, and is on the operator already"
    own_classes = (m for m in model.modules() if _is_stock(m) and type(m).__name__ in FUSED)
    if known := next(filter(None, map(_refusal, own_classes)), None):
        return known
    names = {type(module).__name__ for module in model.modules()}
    for start, reason in REFUSED.items():
        if any(name.startswith(start) for name in names):
            return reason
    own = sorted(names & FUSED.keys())
    if own:
        return (
            f"{own[0]} is not transformers' own class but code of somebody else's; tell of its "
            "scores with tisa.hf.offset_scores"
        )
    return (
        "none of its attention adds scores of the offset to its logits; tisa.hf.convert gives it "
        "such scores, and tisa.hf.offset_scores tells of those in code that transformers has not"
    )


def _configs(model: nn.Module, modules: list[Any]) -> list[Any]:
    """Return the configs that say which attention these modules have, those above them too."""
    configs = {id(m.config): m.config for m in modules if hasattr(m, "config")}
    types = {config.model_type for config in configs.values()}
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config.model_type in types:
            configs[id(module.config)] = module.config
    return list(configs.values())


def _rehook(module: Any) -> None:
    """Let a hook of accelerate's, which holds the forward pass that was, call the one that is."""
    if "_old_forward" in vars(module):
        module._old_forward = type(module).forward.__get__(module)
