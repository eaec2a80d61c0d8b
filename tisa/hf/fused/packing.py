"""Examples end to end in one row: no padding, and no token sees another example's.

    trainer = Seq2SeqTrainer(fused, …, data_collator=tisa.hf.PackedCollator(fused))

A fused T5 is told where examples end in the words that transformers has for it: `cu_seq_lens_k`
and `max_length_k` of the encoder's row, `cu_seq_lens_q` and `max_length_q` of the decoder's.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from tisa.hf.families import FUSED_TYPES
from tisa.shapes import Tensor

# What a label is where no loss is wanted.
IGNORED = -100


class PackedCollator:
    """Puts the examples of a batch into one row, for a fused model of T5's kind.

    An example has `input_ids` and, if it has them, `labels`: for a model with a decoder the target
    tokens, of any number, else one label for each token. Its `attention_mask` leaves padding out.
    """

    def __init__(self, model: Any) -> None:
        """Read from the model whether it has a decoder, and what each target begins with.

        Args:
            model: the model that is trained, or its config.
        """
        config = getattr(model, "config", model)
        if getattr(config, "model_type", None) in FUSED_TYPES:
            raise ValueError(
                f"PackedCollator: the code of a {config.model_type} model does not say where "
                "examples end, and they would see each other; give it padded batches"
            )
        self.with_decoder = bool(config.is_encoder_decoder)
        if isinstance(model, nn.Module):
            # The encoder of a pair keeps the pair's config.
            names = (name.rpartition(".")[2] for name, _ in model.named_modules())
            self.with_decoder = self.with_decoder and "decoder" in names
        self.start: int | None = config.decoder_start_token_id if self.with_decoder else None
        self.pad: int | None = getattr(config, "pad_token_id", None)
        if self.with_decoder and self.start is None:
            raise ValueError(
                "PackedCollator: the config has no decoder_start_token_id, with which every "
                "target begins; set it (T5's is its pad_token_id)"
            )

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what the model is called with."""
        known = {"input_ids", "attention_mask", "labels"}
        if not examples:
            raise ValueError("PackedCollator needs examples, got none")
        for number, example in enumerate(examples):
            if "input_ids" not in example or not known.issuperset(example):
                raise ValueError(
                    f"PackedCollator: example {number} must have input_ids, and labels and "
                    f"attention_mask if there are any, got {', '.join(example)}; "
                    "take other columns out"
                )
        rows = [_real(e["input_ids"], e.get("attention_mask")) for e in examples]
        for number, row in enumerate(rows):
            if not row:
                raise ValueError(f"PackedCollator: example {number} has no tokens; leave it out")
        packed: dict[str, Any] = {"input_ids": _row(rows)}
        _tell(packed, "k", rows)
        if not self.with_decoder:
            _tell(packed, "q", rows)
        if not all("labels" in e for e in examples):
            if self.with_decoder:
                raise ValueError(
                    "PackedCollator: a model with a decoder needs labels in every example; "
                    "to generate, give it padded batches"
                )
            return packed
        if self.with_decoder:
            targets = [_ids(e["labels"]) for e in examples]
            packed["labels"] = _row(targets)
            packed["decoder_input_ids"] = _row([self._shifted(target) for target in targets])
            _tell(packed, "q", targets)
        else:
            packed["labels"] = _row([_real(e["labels"], e.get("attention_mask")) for e in examples])
        return packed

    def _shifted(self, target: list[int]) -> list[int]:
        """Return what the decoder reads, as stock code makes it of each example."""
        if self.start is None or (self.pad is None and IGNORED in target):
            raise ValueError(
                f"PackedCollator: a label is {IGNORED}, for which the decoder reads padding, and "
                "the config has no pad_token_id; set it"
            )
        begun = [self.start, *target[:-1]][: len(target)]
        return [self.pad if t == IGNORED and self.pad is not None else t for t in begun]


def _ids(values: Any) -> list[int]:
    return [int(v) for v in (values.tolist() if isinstance(values, Tensor) else values)]


def _real(values: Any, mask: Any) -> list[int]:
    """Return an example's values without those of its padding."""
    ids = _ids(values)
    return ids if mask is None else [i for i, seen in zip(ids, _ids(mask), strict=True) if seen]


def _row(rows: list[list[int]]) -> Tensor:
    return torch.tensor([[i for row in rows for i in row]], dtype=torch.long)


def _tell(packed: dict[str, Any], side: str, rows: list[list[int]]) -> None:
    lengths = [len(row) for row in rows]
    ends = list(accumulate(lengths, initial=0))
    packed[f"cu_seq_lens_{side}"] = torch.tensor(ends, dtype=torch.int32)
    packed[f"max_length_{side}"] = max(lengths)
