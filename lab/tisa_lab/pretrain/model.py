"""A language model with its loss, and its parameters in groups for an optimiser."""

from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tisa.positions import build_position
from tisa.scoring import ScoringFunction
from tisa.shapes import Float, Int, Int32, Tensor
from tisa.transformer import LanguageModel
from tisa.transformer.model import initialise
from tisa_lab.pretrain.batches import NO_LABEL
from tisa_lab.pretrain.config import PretrainConfig
from tisa_lab.pretrain.keyed import key_of


class WithLoss(nn.Module):
    """A language model whose output is the summed loss: what is compiled, sharded, replicated."""

    # For accelerate's wrapping by layer.
    _no_split_modules = ("Block",)

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Int[Tensor, " total"],
        cu_seqlens: Int32[Tensor, " ends"],
        positions: Int[Tensor, " places"],
        labels: Int[Tensor, " places"],
        max_seqlen: int,
    ) -> Float[Tensor, ""]:
        """Return the sum of the losses of all labels."""
        hidden = self.model.transformer(input_ids, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        if not self.model.config.is_causal:
            hidden = hidden.index_select(0, positions)
        logits = self.model.head(hidden).float()
        return cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum")


def build(config: PretrainConfig, vocab_size: int) -> LanguageModel:
    """Return the model at step 0.

    The same seed gives the same weights to every method: they are drawn by the name of their map,
    so that a method which has fewer maps changes none of the others.
    """
    model = LanguageModel(config.transformer(vocab_size))
    for name, part in model.named_modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            torch.manual_seed(int(key_of(config.seed, crc32(name.encode()))[0]))
            initialise(part, model.config.initializer_range)
    torch.manual_seed(config.seed + 1_000_003)
    model.transformer.position = build_position(config.position, model.config.position_config())
    return model


def parameter_groups(model: nn.Module, config: PretrainConfig) -> list[dict[str, Any]]:
    """Return weights, weights without decay (biases, norms) and scores, with their rates."""
    of_scores = {
        id(p) for m in model.modules() if isinstance(m, ScoringFunction) for p in m.parameters()
    }
    decayed, plain, scores = [], [], []
    for parameter in model.parameters():
        if id(parameter) in of_scores:
            scores.append(parameter)
        elif parameter.ndim < 2:
            plain.append(parameter)
        else:
            decayed.append(parameter)
    own = config.scores_learning_rate
    rates = (config.learning_rate, config.learning_rate,
             10 * config.learning_rate if own is None else own)  # fmt: skip
    decays = (config.weight_decay, 0.0, 0.0)
    return [
        {"params": parameters, "lr": rate, "peak": rate, "weight_decay": decay}
        for parameters, rate, decay in zip((decayed, plain, scores), rates, decays, strict=True)
        if parameters
    ]
