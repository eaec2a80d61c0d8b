"""The model of a run: its weights at step 0, its loss, its work, what it knows about position."""

import math
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from tisa.parameters import grouped, of_scoring
from tisa.positions import build_position
from tisa.positions.absolute import Absolute
from tisa.positions.from_scoring import FromScoring
from tisa.positions.tupe import Tupe
from tisa.scoring import ScoringFunction
from tisa.shapes import Float, Int, Int32, Tensor
from tisa.transformer import LanguageModel, TransformerConfig
from tisa.transformer.model import initialise
from tisa_lab.pretrain.batches import NO_LABEL, key_of
from tisa_lab.pretrain.config import PretrainConfig

# Dense bfloat16 products with float32 sums, FLOP/s, as the manufacturer states them.
PEAKS = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "B200": 2250e12, "A100": 312e12,
         "L40S": 362e12, "RTX 4090": 165e12}  # fmt: skip
BLOCK = 128


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
    groups = grouped(
        model, of_scoring(model), lr=config.learning_rate,
        scores_lr=config.scores_learning_rate, weight_decay=config.weight_decay,
    )  # fmt: skip
    return [group | {"peak": group["lr"]} for group in groups]


def step_flops(config: TransformerConfig, tokens: int, labels: int, squares: int) -> float:
    """Return the floating-point operations of a step: 3 × those of its forward pass.

    Matrix products only, two operations for each multiplication, nothing for what is recomputed;
    `squares` is Σ (length of a piece)², of which a causal model needs half. Position methods with
    products of their own (Shaw, FLOATER) are counted like the others.
    """
    width, inner = config.hidden_size, config.feed_forward_size
    layer = 2 * (4 * width * width + 2 * width * inner)
    seen = squares / 2 if config.is_causal else squares
    attention = 4 * width * seen
    head = 2 * config.embedding_width * config.vocab_size
    if config.embedding_size is not None or not config.is_causal:
        head += 2 * width * config.embedding_width
    widen = 0 if config.embedding_size is None else 2 * width * config.embedding_size
    body = config.num_hidden_layers * (layer * tokens + attention) + widen * tokens
    return 3.0 * (body + head * labels)


def peak_flops(device: torch.device) -> float | None:
    """Return what the device can do in bfloat16, None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def position_table(model: LanguageModel) -> Float[Tensor, "positions width"] | None:
    """Return the learned vectors of positions, None where the method has none."""
    position: nn.Module = model.transformer.position
    if not isinstance(position, (Absolute, Tupe)):
        return None
    weight: Tensor = position.table.weight.detach()
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
    # TUPE's first row is [CLS]'s own.
    return weight.float().cpu()[1 if isinstance(position, Tupe) else 0 :]


def observed(model: LanguageModel) -> dict[str, Any]:
    """Return the Toeplitz R² of P beside chance, and how far P looks like blocks of 128."""
    table = position_table(model)
    if table is None:
        return {}
    # Not before it is needed: it brings the whole of the analysis.
    from tisa.analysis.toeplitz import toeplitz_r2

    null = _null(*table.shape)
    whole, off = (toeplitz_r2(table, off_diagonal=o) for o in (False, True))
    return {
        "r2": None if math.isnan(whole) else whole,
        "r2_off_diagonal": None if math.isnan(off) else off,
        "chance": null.whole,
        "chance_off_diagonal": null.off_diagonal,
        **block_contrast(table),
    }


def block_contrast(table: Float[Tensor, "positions width"]) -> dict[str, float]:
    """Return how far the first 128 positions are a block of P: means in it, beside it, around it.

    `block` is the share of P's variance off the diagonal that these three means explain: near 0
    for a Toeplitz matrix of short range, large where the block is of one brightness.
    `block_squares` is the share of all squares off the diagonal that lie in it, whatever its
    pattern: of 512 positions it has a sixteenth of the places, and of a Toeplitz matrix of short
    range a fourth of the squares.
    """
    if table.shape[0] < 2 * BLOCK:
        return {}
    gram = (table @ table.T).double()
    inside = torch.arange(table.shape[0]) < BLOCK
    pairs = inside.long()[:, None] + inside.long()[None, :]
    off = ~torch.eye(table.shape[0], dtype=torch.bool)
    total = gram[off].var(correction=0)
    fitted = torch.zeros_like(gram)
    found = {}
    for name, number in (("others", 0), ("between", 1), ("first", 2)):
        here = (pairs == number) & off
        found[f"mean_{name}"] = float(gram[here].mean())
        fitted[here] = gram[here].mean()
    found["block"] = float(fitted[off].var(correction=0) / total) if total > 0 else 0.0
    squares = gram.square() * off
    found["block_squares"] = float(squares[:BLOCK, :BLOCK].sum() / squares.sum().clamp_min(1e-300))
    norms = table.norm(dim=1)
    found["norm_first"] = float(norms[inside].mean())
    found["norm_others"] = float(norms[~inside].mean())
    return found


def curves(model: LanguageModel, farthest: int) -> dict[str, Any]:
    """Return every head's score at near and some far offsets, {} for other methods; on the CPU."""
    position = model.transformer.position
    if not isinstance(position, FromScoring):
        return {}
    near = torch.arange(-64, 65)
    far = torch.unique(torch.logspace(6, 13, 57, base=2.0).round().long())
    far = far[(far > 64) & (far <= max(128, 8 * farthest))]
    offsets = torch.cat((-far.flip(0), near, far))
    scores = []
    for scoring in position.scoring:
        assert isinstance(scoring, ScoringFunction)
        with torch.no_grad():
            scores.append(scoring.scores(offsets))
    return {
        "offsets": offsets.tolist(),
        "scores": [[[round(v, 5) for v in head] for head in s.tolist()] for s in scores],
    }


@lru_cache(maxsize=4)
def _null(positions: int, width: int) -> Any:
    from tisa.analysis.resampling import gaussian_null

    return gaussian_null(positions, width, draws=3)
