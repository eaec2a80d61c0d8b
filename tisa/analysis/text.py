"""What attention really does with distance: mean logits and weights by offset, over a text.

The only part of the analysis that runs the model. Attention weights of every layer and head are
taken as the model returns them, so whatever it adds to its logits (a T5 table, TISA's scores) is in
them. log(weight) is the logit but for a constant of the row, which is taken off: what is averaged
is by how much a logit lies above the mean of its row. Special tokens ([CLS], [SEP]) are left out,
as queries and as keys: they are where attention rests when it has nothing to look at.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tisa.offsets import offset_range, sum_diagonals
from tisa.packages import needed
from tisa.shapes import Bool, Float, Int, Tensor
from tisa.store import told
from tisa.weights import Checkpoint


@dataclass(frozen=True)
class TextCurves:
    """By layer, head and offset: mean logit above its row's mean, and mean attention weight."""

    offsets: Int[Tensor, " span"]
    logits: Float[Tensor, "layers heads span"]
    weights: Float[Tensor, "layers heads span"]
    pairs: Float[Tensor, " span"]
    tokens: int


def read_text(path: Path) -> str:
    """Return the file's text."""
    try:
        with told(path, reading=True):
            text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"text: expected UTF-8 text, got something else in {path}") from None
    if not text.strip():
        raise ValueError(f"text: expected some text, got an empty file, {path}")
    return text


def attention_by_offset(
    checkpoint: Checkpoint,
    text: str,
    *,
    length: int = 256,
    windows: int = 16,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
) -> TextCurves:
    """Return logits and weights by offset, averaged over windows of the text."""
    model, tokenizer = _load(checkpoint, trust_remote_code)
    batches, before, after = _windows(tokenizer, text, length, windows)
    total = None
    for number, ids in enumerate(batches):
        if progress:
            progress(f"text, window {number + 1} of {len(batches)}")
        plain = torch.zeros(len(ids), dtype=torch.bool)
        plain[before : len(ids) - after] = True
        with torch.no_grad():
            output = model(torch.tensor([ids]), output_attentions=True)
        layers = output.attentions
        if model.config.model_type == "longformer":
            layers = tuple(_unrolled(layer[0])[None] for layer in layers)
        if not layers or any(layer is None for layer in layers):
            raise ValueError(
                f"text: {checkpoint.folder} returns no attention weights; give no text"
            )
        sums = torch.stack([_by_offset(layer[0].float(), plain, length) for layer in layers], 1)
        total = sums if total is None else total + sums
    assert total is not None
    pairs, logits, weights = total
    shared = pairs[0, 0]
    count = pairs.clamp_min(1)
    return TextCurves(
        offset_range(length, length),
        torch.where(pairs > 0, logits / count, torch.nan).float(),
        torch.where(pairs > 0, weights / count, torch.nan).float(),
        shared.float(),
        sum(map(len, batches)),
    )


def _by_offset(
    attention: Float[Tensor, "heads queries keys"], plain: Bool[Tensor, " queries"], length: int
) -> Float[Tensor, "3 heads span"]:
    """Return pairs, summed logits and summed weights of each offset, for sequences of `length`."""
    seen = (attention > 0) & plain[:, None] & plain[None, :]
    logits = torch.where(seen, attention.clamp_min(1e-38).log(), 0.0)
    row_mean = logits.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp_min(1)
    logits = torch.where(seen, logits - row_mean, 0.0)
    parts = torch.stack((seen.float(), logits, attention * seen)).double()
    sums = sum_diagonals(parts)
    room = length - attention.shape[-1]
    return torch.nn.functional.pad(sums, (room, room))


def _unrolled(attention: Float[Tensor, "heads queries window"]) -> Tensor:
    """Return Longformer's weights, which are by offset within a window, as a matrix."""
    heads, queries, window = attention.shape
    reach = window // 2
    dense = attention.new_zeros(heads, queries, queries + 2 * reach)
    columns = torch.arange(queries)[:, None] + torch.arange(window)[None]
    dense.scatter_(2, columns.expand(heads, -1, -1), attention)
    return dense[..., reach : reach + queries]


def _windows(
    tokenizer: Any, text: str, length: int, windows: int
) -> tuple[list[list[int]], int, int]:
    """Return windows of the text, and how many special tokens stand before and after in each."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < 8:
        raise ValueError(f"text: expected at least 8 tokens, got {len(ids)}; give a longer text")
    share = ids.count(tokenizer.unk_token_id) / len(ids)
    if share > 0.25:
        raise ValueError(
            f"text: the tokenizer does not know {share:.0%} of the text; is it in another "
            "language, or are the tokenizer's files missing in the model's folder?"
        )
    word = text.split()[0]
    bare = tokenizer(word, add_special_tokens=False)["input_ids"]
    dressed = tokenizer(word)["input_ids"]
    before = next((i for i in range(len(dressed)) if dressed[i : i + len(bare)] == bare), 0)
    first, last = dressed[:before], dressed[before + len(bare) :]
    size = length - len(first) - len(last)
    parts = [ids[start : start + size] for start in range(0, len(ids), size)][:windows]
    return [[*first, *part, *last] for part in parts], len(first), len(last)


def _load(checkpoint: Checkpoint, trust_remote_code: bool) -> tuple[Any, Any]:
    needed("transformers", "text", "tisa[hf]")
    # Registers converted models with the Auto classes too.
    loading = import_module("tisa.hf.registry")
    try:
        tokenizer = loading.tokenizer_of(checkpoint.folder, trust_remote_code=trust_remote_code)
        if tokenizer is None:
            raise ValueError("there is no tokenizer that it can read")
        config = loading.config_of(checkpoint, trust_remote_code=trust_remote_code)
        model = loading.proved(
            loading.base_class(config, checkpoint), config, checkpoint,
            attn_implementation="eager", dtype=torch.float32,
        )  # fmt: skip
    except Exception as failed:
        # transformers raises whatever its models and tokenizers raise.
        reason = " ".join(str(failed).split())[:300]
        raise ValueError(
            f"text: transformers cannot load model and tokenizer from {checkpoint.folder} "
            f"({reason}); without a text the weights alone are analysed"
        ) from None
    model = model.eval()
    reads_words = isinstance(model.get_input_embeddings(), torch.nn.Embedding)
    if not reads_words or model.config.model_type == "whisper":
        raise ValueError(
            f"text: expected a model that reads text, got {model.config.model_type}; "
            "without a text the weights alone are analysed"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        model = model.encoder
    return model, tokenizer
