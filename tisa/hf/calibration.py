"""Text to fit scores on: from what the user gives to checked token sequences and small batches."""

import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from transformers import PreTrainedModel

from tisa.hf import families
from tisa.hf.registry import tokenizer_of
from tisa.shapes import Bool, Float, Int, Tensor

# Of one layer's attention weights, over all batches: enough to fit a curve, and soon gone through.
ELEMENTS = 2_500_000


class Tokens(NamedTuple):
    """One input: token ids, and token types where the model has them (pairs of sentences)."""

    ids: list[int]
    types: list[int] | None = None


class Batch(NamedTuple):
    """Padded inputs of similar length, and the queries whose attention is looked at."""

    inputs: dict[str, Tensor]
    rows: Int[Tensor, " rows"]
    valid: Bool[Tensor, "batch rows"]


class Ends(NamedTuple):
    """The tokens that always stand first and last; −1 where there is none."""

    first: int
    last: int


def tokens_of(calibration: Any, model: PreTrainedModel, tokenizer: Any = None) -> list[Tokens]:
    """Return the token sequences of a calibration, checked against the model.

    `calibration` is a list of texts, of pairs of texts, or of token ids; None is a small built-in
    English text, and a warning says so. Padding is cut off: what `attention_mask` hides, or the
    padding tokens at both ends of bare ids.
    """
    if calibration is None:
        if tokenizer is None:
            raise ValueError(
                "calibration: no text given, and no tokenizer is found with the model to read the "
                "built-in one; pass texts and a tokenizer, or token ids"
            )
        warn_of_default_text()
        calibration = default_texts()
    if isinstance(calibration, Tensor) and calibration.ndim == 2:
        calibration = list(calibration)
    if isinstance(calibration, (str, bytes)) or not isinstance(calibration, Sequence):
        raise TypeError(
            "calibration: expected a list of texts, of pairs of texts or of token ids, "
            f"got {type(calibration).__name__}; split a long text into a list"
        )
    if len(calibration) == 0:
        raise ValueError("calibration: expected some texts, got an empty list")
    found = [_tokens(item, model, tokenizer) for item in calibration]
    _check(found, model, tokenizer)
    return found


def warn_of_default_text() -> None:
    """Say that scores are fitted to text that is not the user's."""
    from tisa.hf.default_text import SENTENCES

    warnings.warn(
        f"no calibration given: the scores are fitted on {len(SENTENCES)} built-in English "
        "sentences; text like that the model will see is better",
        stacklevel=4,
    )


def default_texts() -> list[str]:
    """Return the built-in sentences, and some paragraphs made of them for longer offsets."""
    from tisa.hf.default_text import SENTENCES

    texts = list(SENTENCES)
    for size in (2, 3, 5, 8):
        texts += [" ".join(SENTENCES[i : i + size]) for i in range(0, len(SENTENCES), 3 * size)]
    return texts


def pieces(
    texts: list[str], tokenizer: Any, lengths: tuple[int, int], *, count: int = 96, seed: int = 0
) -> list[str]:
    """Return pieces of the texts, their lengths in tokens spread evenly on a logarithmic scale."""
    shortest, longest = lengths
    if not 3 <= shortest <= longest:
        raise ValueError(f"lengths must be 3 ≤ shortest ≤ longest, got {shortest} to {longest}")
    words = " ".join(texts).split()
    tokens = len(tokenizer(" ".join(words[:500]))["input_ids"]) / len(words[:500])
    generator = random.Random(seed)
    made = []
    for _ in range(count):
        wanted = shortest * (longest / shortest) ** generator.random()
        size = max(3, round((wanted - 2) / tokens))
        start = generator.randrange(max(1, len(words) - size))
        made.append(" ".join(words[start : start + size]))
    return made


def load_tokenizer(model: PreTrainedModel) -> Any:
    """Return the tokenizer that lies beside the model's weights, or None."""
    name = getattr(model, "name_or_path", "")
    return tokenizer_of(name) if name else None


def ends_of(sequences: list[Tokens], tokenizer: Any = None) -> Ends:
    """Return the tokens that stand first and last in every sequence."""
    special = set(getattr(tokenizer, "all_special_ids", []) or [])

    def always(place: int) -> int:
        found = {s.ids[place] for s in sequences}
        alone = len(found) == 1 and (len(sequences) > 1 or not found.isdisjoint(special))
        return found.pop() if alone else -1

    return Ends(always(0), always(-1))


def fold_vectors(
    table: Float[Tensor, "positions dim"],
    sequences: list[Tokens],
    ends: Ends,
    *,
    by: Literal["tokens", "inputs"] = "tokens",
) -> Float[Tensor, "3 dim"]:
    """Return what stands for the position vectors: of any token, of the last one, of the first one.

    Each is the mean of the table over the places where such tokens really stand, so that what a
    position vector says besides the order stays in the model. Every token counts alike, or every
    input, however long it is.
    """
    weights = torch.zeros(3, len(table), dtype=torch.float64)
    for sequence in sequences:
        kinds = torch.tensor(
            [2 if t == ends.first else 1 if t == ends.last else 0 for t in sequence.ids]
        )
        for kind in range(3):
            places = (kinds == kind).nonzero().squeeze(1)
            weights[kind, places] += 1 / max(1, len(places)) if by == "inputs" else 1.0
    # A kind that is nowhere takes any token's; where there are ends alone, theirs.
    other = weights[:1] if weights[0].any() else weights.sum(0, keepdim=True)
    weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, other)
    shares = (weights / weights.sum(1, keepdim=True)).to(table.device)
    return (shares @ table.double()).to(table.dtype)


def batches_of(
    sequences: list[Tokens],
    model: PreTrainedModel,
    *,
    seed: int = 0,
    elements: int = ELEMENTS,
    tokens: int = 2048,
) -> list[Batch]:
    """Return the sequences in padded batches of similar length, with some of their queries chosen.

    All queries where they are few; of more, as many as keep one layer's weights below `elements`.
    A batch has at most so many `tokens`, or one sequence.
    """
    generator = torch.Generator().manual_seed(seed)
    heads = families.num_heads(families.attention_modules(model)[0], model.config)
    ordered = sorted(sequences, key=lambda s: len(s.ids))
    groups = list(_groups(ordered, tokens))
    padded = sum(len(group) * len(group[-1].ids) for group in groups)
    most = max(4, elements // (heads * padded))
    pad_id = getattr(model.config, "pad_token_id", None) or 0
    made = []
    for group in groups:
        length = len(group[-1].ids)
        ids = torch.full((len(group), length), pad_id)
        types = torch.zeros_like(ids)
        mask = torch.zeros_like(ids)
        for i, sequence in enumerate(group):
            ids[i, : len(sequence.ids)] = torch.tensor(sequence.ids)
            mask[i, : len(sequence.ids)] = 1
            if sequence.types is not None:
                types[i, : len(sequence.ids)] = torch.tensor(sequence.types)
        inputs = {"input_ids": ids, "attention_mask": mask}
        if any(s.types is not None for s in group):
            inputs["token_type_ids"] = types
        rows = torch.randperm(length, generator=generator)[:most].sort().values
        device = next(model.parameters()).device
        made.append(
            Batch(
                {name: value.to(device) for name, value in inputs.items()},
                rows.to(device),
                mask[:, rows].bool().to(device),
            )
        )
    return made


def _groups(ordered: list[Tokens], tokens: int) -> Iterator[list[Tokens]]:
    group: list[Tokens] = []
    for sequence in ordered:
        too_long = group and len(sequence.ids) > 1.3 * len(group[0].ids) + 4
        if too_long or (len(group) + 1) * len(sequence.ids) > tokens:
            if group:
                yield group
            group = []
        group.append(sequence)
    yield group


def _tokens(item: Any, model: PreTrainedModel, tokenizer: Any) -> Tokens:
    limit = length_limit(model)
    if isinstance(item, Mapping):
        ids = _ints(item["input_ids"])
        mask, types = (_of_each(item, name, ids) for name in ("attention_mask", "token_type_ids"))
        places = _unpadded(ids, model, tokenizer)
        if mask is not None:
            places = [i for i, seen in enumerate(mask) if seen]
        places = places[:limit]
        return Tokens(
            [ids[i] for i in places], None if types is None else [types[i] for i in places]
        )
    if isinstance(item, str) or (
        isinstance(item, (tuple, list)) and item and all(isinstance(x, str) for x in item)
    ):
        if tokenizer is None:
            raise ValueError(
                "calibration: texts need the model's tokenizer, and none is found beside the "
                "model; pass tokenizer=…, or token ids"
            )
        parts = (item,) if isinstance(item, str) else tuple(item)
        encoded = tokenizer(*parts, truncation=True, max_length=limit)
        return Tokens(list(encoded["input_ids"]), encoded.get("token_type_ids"))
    ids = _ints(item)
    return Tokens([ids[i] for i in _unpadded(ids, model, tokenizer)[:limit]])


def _of_each(item: Mapping[str, Any], name: str, ids: list[int]) -> list[int] | None:
    """Return what a mapping says of each of its tokens, or None."""
    if item.get(name) is None:
        return None
    values = _ints(item[name])
    if len(values) != len(ids):
        raise ValueError(
            f"calibration: expected {name} for each of {len(ids)} tokens, got {len(values)}"
        )
    return values


def _unpadded(ids: list[int], model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """Return the places of the tokens between the padding at both ends."""
    pad = getattr(tokenizer, "pad_token_id", None)
    pad = getattr(model.config, "pad_token_id", None) if pad is None else pad
    real = [i for i, token in enumerate(ids) if token != pad]
    if not real:
        return []
    first, last = real[0], real[-1]
    # Where one token is padding and an end of the text as well, one of each side may be the text's.
    if first > 0 and pad == getattr(model.config, "bos_token_id", None):
        first -= 1
    if last + 1 < len(ids) and pad == getattr(model.config, "eos_token_id", None):
        last += 1
    return list(range(first, last + 1))


def _ints(item: Any) -> list[int]:
    values = item.tolist() if isinstance(item, Tensor) else item
    if not isinstance(values, Sequence) or not all(isinstance(v, int) for v in values):
        raise TypeError(
            "calibration: expected texts, pairs of texts, or lists of token ids, "
            f"got {type(item).__name__} among them"
        )
    return list(values)


def inner(real: Bool[Tensor, "batch length"]) -> Bool[Tensor, "batch length"]:
    """Return the tokens of each text that have one of it on either side."""
    pad = torch.nn.functional.pad
    return real & pad(real[:, :-1], (1, 0)) & pad(real[:, 1:], (0, 1))


def length_limit(model: PreTrainedModel) -> int:
    """Return how many tokens the model takes."""
    table = families.position_table(model)
    if table is not None:
        return table.embedding.num_embeddings - table.first_row
    return int(getattr(model.config, "max_position_embeddings", 512) or 512)


def _check(sequences: list[Tokens], model: PreTrainedModel, tokenizer: Any) -> None:
    longest = max(len(s.ids) for s in sequences)
    if longest < 3:
        raise ValueError(
            f"calibration: the longest text has {longest} tokens, and no order to learn from; "
            "give texts of the kind that the model will see"
        )
    if min(len(s.ids) for s in sequences) == 0:
        raise ValueError("calibration: an empty text is among them; leave it out")
    words = model.get_input_embeddings().num_embeddings
    lowest, highest = (end(end(s.ids) for s in sequences) for end in (min, max))
    if highest >= words or lowest < 0:
        wrong = highest if highest >= words else lowest
        raise ValueError(
            f"calibration: token {wrong} is not among the model's {words}; "
            "the tokens are of another model's tokenizer"
        )
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is not None:
        total = sum(len(s.ids) for s in sequences)
        share = sum(s.ids.count(unknown) for s in sequences) / total
        if share > 0.25:
            raise ValueError(
                f"calibration: the tokenizer does not know {share:.0%} of the text; is it in "
                "another language, or the tokenizer another model's?"
            )
