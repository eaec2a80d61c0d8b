"""Batches without any padding: the rows of a batch one after another, as one.

Every classification head of the models named here reads the first token alone. So the encoder gives
the first tokens of the packed rows as if they were rows of one token, and the head needs no change.
"""

from typing import Any

import torch

import tisa.hf
from tisa.hf import families
from tisa.shapes import Tensor

# Known to hand what they are called with down to their attention, and to read the first token.
PACKABLE = (
    "albert", "bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta",
)  # fmt: skip


def check_packable(model_type: str) -> None:
    """Refuse a model whose rows cannot be packed."""
    if model_type.removeprefix("tisa-") not in PACKABLE:
        raise ValueError(
            f'batches: "packed" is for {", ".join(PACKABLE)}, got a {model_type}; take "padded"'
        )


class Packer:
    """Makes a packed batch of tokenized rows; the model must have been through `read_packed`."""

    def __init__(self, model: Any) -> None:
        table = families.position_table(model)
        # RoBERTa counts positions from 2 on.
        self.first_position = 0 if table is None else table.first_row
        # In (b) nothing reads positions.
        self.has_positions = table is not None and model.config.tisa["positions"] == "keep"
        self.has_types = getattr(model.config, "type_vocab_size", 0) > 0

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the inputs of the model; `tisa_packed` says where rows end, known on this side."""
        lengths = [len(row["input_ids"]) for row in rows]
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        batch: dict[str, Any] = {
            "input_ids": _joined([row["input_ids"] for row in rows]),
            "labels": torch.tensor([row["labels"] for row in rows]),
            "tisa_packed": (ends, max(lengths)),
        }
        if self.has_types:
            blank = [row.get("token_type_ids", [0] * len(row["input_ids"])) for row in rows]
            batch["token_type_ids"] = _joined(blank)
        if self.has_positions:
            places = [range(self.first_position, self.first_position + n) for n in lengths]
            batch["position_ids"] = _joined([list(place) for place in places])
        return batch


def _joined(parts: list[list[int]]) -> Tensor:
    return torch.tensor([[x for part in parts for x in part]])


def read_packed(model: Any) -> None:
    """Let a converted model read packed batches; padded ones it reads as before."""
    check_packable(model.config.model_type)
    body = model.base_model
    encoder = body.encoder if hasattr(body, "encoder") else body.transformer
    # A second hook would look for first tokens among the first tokens.
    if _first_tokens not in encoder._forward_hooks.values():
        encoder.register_forward_hook(_first_tokens, with_kwargs=True)


def _first_tokens(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    packed = tisa.hf.core.call_of(kwargs).packed
    if packed is not None:
        hidden = output["last_hidden_state"]
        output["last_hidden_state"] = hidden[0, packed[0][:-1].long()].unsqueeze(1)
    return output
