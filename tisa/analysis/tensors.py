"""A model's tensors under the names of its family: none missing, and all of them of one model."""

import re
from collections.abc import Sequence

import torch

from tisa.shapes import Tensor
from tisa.weights import Checkpoint


class Reader:
    """The checkpoint's tensors in float32, under the prefix of the task model."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.checkpoint, self.prefix = checkpoint, prefix

    def __call__(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """Return a tensor, which must be there, and be of that shape."""
        full = self.prefix + name
        if full not in self.checkpoint.tensors:
            # What TensorFlow's models call it, in BERT's first files.
            old = full.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
            if old not in self.checkpoint.tensors:
                raise ValueError(
                    f"{self.checkpoint.name}: the tensor {full!r} is missing; "
                    "the file is incomplete, download it again"
                )
            full = old
        found = self.checkpoint.read(full)
        if shape is not None and found.shape != torch.Size(shape):
            raise ValueError(
                f"{self.checkpoint.name}: {full!r} must be of shape {tuple(shape)}, as others are, "
                f"got {tuple(found.shape)}; the file is of two models"
            )
        return found

    def has(self, name: str | None, end: str = "") -> bool:
        """Return whether the file has such a tensor."""
        return name is not None and self.prefix + name + end in self.checkpoint.tensors

    def layers(self, query: str, told_by: Sequence[str]) -> list[int]:
        """Return the layers, of which none may be missing, and none more than the config says."""
        name = re.escape(self.prefix + query).replace(r"\{\}", r"(\d+)")
        pattern = re.compile(rf"{name}\.(weight|bias)")
        there: dict[str, set[int]] = {"weight": set(), "bias": set()}
        for tensor in self.checkpoint.tensors:
            if match := pattern.fullmatch(tensor):
                there[match[2]].add(int(match[1]))
        told = next((self.checkpoint.config[n] for n in told_by
                     if n in self.checkpoint.config), len(there["weight"]))  # fmt: skip
        layers = list(range(int(told)))
        for end, found in there.items():
            other = found ^ set(layers)
            # All have a bias, or none has.
            if other and (found or end == "weight"):
                raise ValueError(
                    f"{self.checkpoint.name}: '{self.prefix + query.format(min(other))}.{end}' "
                    f"is missing, or beyond the {len(layers)} layers of its config.json; the file "
                    "is incomplete or of another model"
                )
        return layers

    def check_tables(self, rows: int, table: Tensor, words: Tensor | None) -> None:
        """Refuse tables of positions and of words of other sizes than those of the config."""
        name, config = self.checkpoint.name, self.checkpoint.config
        sizes = {"max_position_embeddings": rows, "n_positions": rows}
        if words is not None:
            sizes["vocab_size"] = words.shape[0]
        for size, found in sizes.items():
            if config.get(size, found) != found:
                raise ValueError(
                    f"{name}: its config.json says {size} {config[size]}, and the weights have "
                    f"{found}; they are of two models"
                )
        if words is not None and words.shape[1] != table.shape[1]:
            raise ValueError(
                f"{name}: vectors of words have {words.shape[1]} numbers and vectors of positions "
                f"{table.shape[1]}; the file is of two models"
            )

    def check_maps(self, query: str, width: int, weights: list[Tensor]) -> None:
        """Refuse maps to queries and keys, (input, output), that are not alike or of the width."""
        if any(weight.shape != (width, weights[0].shape[1]) for weight in weights):
            raise ValueError(
                f"{self.checkpoint.name}: {self.prefix}{query} must be of a shape that takes "
                f"{width} numbers, as its keys are; the file is of two models"
            )
