"""BLiMP: of two sentences that hardly differ, does a model find the acceptable one likelier?

"BLiMP: The Benchmark of Linguistic Minimal Pairs for English" (Warstadt et al., TACL 2020): 67
paradigms of 1,000 pairs each, which belong to 13 phenomena. A decoder is asked for the sum of the
tokens' log-probabilities after its begin token, an encoder for the pseudo-log-likelihood (Salazar
et al., ACL 2020): the same sum with one token hidden at a time, so as many passes as there are
tokens.

A file of sentences is cut with the model's tokenizer. A file of tokens (`tokens_of`) knows which
tokenizer that was, and needs none.
"""

import json
import lzma
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import cross_entropy

from tisa.shapes import Float, Int, Tensor
from tisa.store import told
from tisa.transformer import LanguageModel
from tisa_lab.pretrain.text import Tokenizer, Vocabulary

# Of the larger tensors of a pass: hidden states, and logits of the vocabulary.
TOKENS_AT_ONCE, LOGITS_AT_ONCE = 16384, 4096


@dataclass(frozen=True)
class Paradigm:
    """Pairs of sentences as tokens, the acceptable one first, and the phenomenon they are about."""

    phenomenon: str
    pairs: list[list[list[int]]]


Blimp = Mapping[str, Paradigm]


def read(path: Path, vocabulary: Vocabulary, tokenizer: Callable[[], Tokenizer]) -> Blimp:
    """Return the paradigms of a file: sentences, or the tokens that they were cut into."""
    found = _json(path)
    made_with = found.pop("tokenizer", None)
    if made_with is None:
        found = tokens_of(found, tokenizer())
        made_with = found.pop("tokenizer")
    if made_with != vocabulary.fingerprint:
        raise ValueError(
            f"blimp: expected sentences, or tokens of {vocabulary.name!r} "
            f"({vocabulary.fingerprint}), got those of {made_with} in {path}; give the sentences"
        )
    return {name: Paradigm(one["term"], one["pairs"]) for name, one in sorted(found.items())}


def tokens_of(sentences: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the content of a file with tokens in the place of sentences."""
    found: dict[str, Any] = {"tokenizer": tokenizer.vocabulary.fingerprint}
    for name, one in sentences.items():
        cut = tokenizer.encode([sentence for pair in one["pairs"] for sentence in pair])
        found[name] = {
            "term": one["term"],
            "pairs": [cut[i : i + 2] for i in range(0, len(cut), 2)],
        }
    return found


def _json(path: Path) -> dict[str, Any]:
    with told(path, reading=True):
        content = path.read_bytes()
    try:
        found = json.loads(lzma.decompress(content) if path.suffix == ".xz" else content)
        for name, one in found.items():
            assert name == "tokenizer" or (one["pairs"] and isinstance(one["term"], str))
    except (lzma.LZMAError, ValueError, TypeError, KeyError, AttributeError, AssertionError):
        raise ValueError(
            f"blimp: expected a JSON file, or .json.xz, of paradigms with a term and pairs, got "
            f"{path}"
        ) from None
    return dict(found)


def some_of(paradigm: Paradigm, count: int) -> list[list[list[int]]]:
    """Return that many pairs, evenly spread over all, or all where there are fewer."""
    pairs = paradigm.pairs
    return [pairs[i * len(pairs) // count] for i in range(count)] if count < len(pairs) else pairs


def preferred(
    model: LanguageModel, blimp: Blimp, vocabulary: Vocabulary, *, pairs: int, bf16: bool = False
) -> dict[str, Any]:
    """Return the share of pairs whose first sentence is the likelier, by paradigm and phenomenon.

    Of each paradigm so many pairs, the same for every model. A phenomenon's share is the mean of
    its paradigms', `right` that of all paradigms.
    """
    chosen = {name: some_of(paradigm, pairs) for name, paradigm in blimp.items()}
    sentences = [sentence for some in chosen.values() for pair in some for sentence in pair]
    scores = log_probabilities(model, sentences, vocabulary, bf16=bf16).reshape(-1, 2)
    better = scores[:, 0] > scores[:, 1]
    ends = np.cumsum([len(some) for some in chosen.values()])
    parts = np.split(better, ends[:-1])
    shares = {name: float(part.mean()) for name, part in zip(chosen, parts, strict=True)}
    by_phenomenon: dict[str, list[float]] = {}
    for name, share in shares.items():
        by_phenomenon.setdefault(blimp[name].phenomenon, []).append(share)
    return {
        "pairs": len(better),
        "right": float(np.mean(list(shares.values()))),
        "phenomena": {name: float(np.mean(some)) for name, some in sorted(by_phenomenon.items())},
        "paradigms": shares,
    }


@torch.no_grad()
def log_probabilities(
    model: LanguageModel,
    sentences: list[list[int]],
    vocabulary: Vocabulary,
    *,
    bf16: bool = False,
) -> npt.NDArray[np.float64]:
    """Return each sentence's (pseudo-)log-likelihood; the model is in its evaluation mode."""
    device = next(model.parameters()).device
    asked = _decoder if model.config.is_causal else _encoder
    found = torch.zeros(len(sentences), dtype=torch.float64, device=device)
    for numbers, tokens in _by_length(sentences):
        ids = torch.from_numpy(tokens).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            found[torch.from_numpy(numbers).to(device)] = asked(model, ids, vocabulary)
    return found.cpu().numpy()


def _by_length(
    sentences: list[list[int]],
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield numbers and tokens of sentences of one length, as many as are read at once."""
    lengths = np.array([len(sentence) for sentence in sentences])
    for length in np.unique(lengths):
        alike = np.flatnonzero(lengths == length)
        some = max(1, TOKENS_AT_ONCE // (int(length) + 2))
        for first in range(0, len(alike), some):
            numbers = alike[first : first + some]
            yield numbers, np.array([sentences[number] for number in numbers])


def _decoder(
    model: LanguageModel, tokens: Int[Tensor, "rows length"], vocabulary: Vocabulary
) -> Float[Tensor, " rows"]:
    begin = tokens.new_full((len(tokens), 1), vocabulary.specials.begin)
    # The last token is predicted, and predicts nothing.
    hidden = model.transformer(torch.cat((begin, tokens[:, :-1]), dim=1))
    losses = _losses(model, hidden.flatten(0, 1), tokens.flatten())
    return -losses.view_as(tokens).sum(1)


def _encoder(
    model: LanguageModel, tokens: Int[Tensor, "rows length"], vocabulary: Vocabulary
) -> Float[Tensor, " rows"]:
    special = vocabulary.specials
    assert special.mask is not None
    begin, end = (tokens.new_full((len(tokens), 1), n) for n in (special.begin, special.end))
    total = torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device)
    for place in range(1, tokens.shape[1] + 1):
        ids = torch.cat((begin, tokens, end), dim=1)
        ids[:, place] = special.mask
        hidden = model.transformer(ids)[:, place]
        total -= _losses(model, hidden, tokens[:, place - 1])
    return total


def _losses(
    model: LanguageModel, hidden: Float[Tensor, "places width"], labels: Int[Tensor, " places"]
) -> Float[Tensor, " places"]:
    parts = zip(hidden.split(LOGITS_AT_ONCE), labels.split(LOGITS_AT_ONCE), strict=True)
    return torch.cat(
        [cross_entropy(model.head(h).float(), label, reduction="none") for h, label in parts]
    ).double()
