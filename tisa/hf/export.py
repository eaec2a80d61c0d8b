"""A converted model as a graph: `torch.export` and ONNX, for any batch and any length."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tisa.shapes import Int, Tensor


class Exported(nn.Module):
    """What is exported: ids and mask in, the model's first output out."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Int[Tensor, "batch length"], attention_mask: Int[Tensor, "batch length"]
    ) -> Tensor:
        """Return logits, or the last hidden states of a model without a head."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=False)[0]


def export_program(model: PreTrainedModel) -> torch.export.ExportedProgram:
    """Return the exported program of (input_ids, attention_mask), batch and length being free.

    Attention is spelled out ("eager") with the scores as a dense bias: plain operators, which every
    runtime has.
    """
    model_inputs = _sample(model)
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with _ready(model):
        return torch.export.export(
            Exported(model), model_inputs, dynamic_shapes=(free, free), strict=False
        )


def export_onnx(model: PreTrainedModel, path: str | Path) -> Path:
    """Write the model of (input_ids, attention_mask) as ONNX, batch and length being free."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "export_onnx needs the packages onnx and onnxscript: pip install onnx onnxscript"
        ) from missing
    program = export_program(model)
    path = Path(path)
    torch.onnx.export(
        program,
        f=path,
        input_names=["input_ids", "attention_mask"],
        output_names=["output"],
        dynamo=True,
        verbose=False,
    )
    return path


def _sample(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    ids = torch.full((2, 7), 4, device=model.device)
    mask = torch.ones_like(ids)
    # Padding in the sample, so that no mask is left out of the graph for being all ones.
    mask[0, 5:] = 0
    return ids, mask


@contextmanager
def _ready(model: PreTrainedModel) -> Iterator[None]:
    """Evaluate without a cache in the implementation that can be traced, and put it all back."""
    training, implementation = model.training, model.config._attn_implementation
    before: Any = getattr(model.config, "use_cache", None)
    model.eval()
    model.set_attn_implementation("eager")
    if before is not None:
        model.config.use_cache = False
    try:
        yield
    finally:
        model.train(training)
        model.set_attn_implementation(implementation)
        if before is not None:
            model.config.use_cache = before
