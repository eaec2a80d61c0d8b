"""TISA in Hugging Face models: converted, fitted to the model's own heads, saved like any other.

    converted = tisa.hf.convert(model, calibration=texts)

core.py          all that a saved model needs to run: imported here, and copied beside the model
families.py      what there is to convert in a model, or why there is none
implementations.py  what the package hands to `core`: the operator, FlexAttention, layers together
card.py          what lies beside a saved model: a card, the copy of `core`
registry.py      which class a model has; a checkpoint in it, each parameter proved
transformer.py   our own pretrained transformers behind the Auto classes
default_text.py  what is calibrated on where no text is given
calibration.py   texts in, token batches and folded vectors out
places.py        a position table's slow part: vectors at some places
fit.py           scores from a model's own heads: kernels
descent.py       any other scoring function brought to them, by descent
other_scores.py  what a config says of scores: kernels, or another function
conversion.py    a model in, a converted one out
distillation.py  a converted model trained towards the one it came from, and never away from it
distillation_loss.py   what it counts, and the check on held-out texts
distillation_state.py  where it stands, the best of it, its checkpoint
measure.py       what a conversion kept
verdict.py       up to which length it may take the original's place
sentence.py      what makes a sentence encoder of a transformer
saving.py        stock models from folders, converted ones from and into folders
fused/           stock models that have scores of the offset from birth (T5, …) on the operator
folder.py        folder in, folder out: what `tisa convert` does
report.py        one page about a conversion
export.py        torch.export and ONNX
"""

try:
    import transformers
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "tisa.hf needs the package transformers (5.17 or newer): pip install 'tisa[hf]'"
    ) from missing
if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 17):
    raise ImportError(
        f"tisa.hf needs transformers 5.17 or newer, got {transformers.__version__}: "
        "pip install --upgrade 'tisa[hf]'"
    )

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tisa.hf.conversion import convert
from tisa.hf.registry import register, register_type
from tisa.hf.transformer import register as _register_transformer
from tisa.parameters import parameter_groups

if TYPE_CHECKING:
    from tisa.hf.distillation import distil
    from tisa.hf.fused import PackedCollator, fuse, offset_scores, unfuse
    from tisa.hf.saving import load, save

register()
_register_transformer()

# Whoever follows a model's forward pass or its conversion meets none of these.
_ON_FIRST_USE = {
    "PackedCollator": "fused",
    "distil": "distillation",
    "fuse": "fused",
    "load": "saving",
    "offset_scores": "fused",
    "save": "saving",
    "unfuse": "fused",
}


def __getattr__(name: str) -> Any:
    if name in _ON_FIRST_USE:
        return getattr(import_module(f"tisa.hf.{_ON_FIRST_USE[name]}"), name)
    raise AttributeError(f"module 'tisa.hf' has no attribute {name!r}")


__all__ = [
    "PackedCollator",
    "convert",
    "distil",
    "fuse",
    "load",
    "offset_scores",
    "parameter_groups",
    "register",
    "register_type",
    "save",
    "unfuse",
]
