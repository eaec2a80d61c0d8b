"""Where each family of models keeps its positions: names of tensors in, one `PositionModel` out.

Every family is a line of `FAMILIES`. A model is recognised by its config's `model_type`, or, where
the config has none (old checkpoints), by the names of its tensors.

How a first layer reads a position: embeddings of word, position and type are added, normalised (and
in ALBERT and ELECTRA mapped to the model's width), then multiplied by W_Q and W_K. Normalisation is
x̂ = (x − mean)/deviation, then γ ⊙ x̂ + β. Everything after x̂ is linear, so it is folded into one map
per head, whose last row is what does not depend on x̂.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tisa.analysis.decoders import is_causal
from tisa.analysis.tensors import Reader
from tisa.shapes import Float, Tensor
from tisa.weights import Checkpoint


@dataclass(frozen=True)
class Family:
    """Names of one family's tensors, without the prefix of the task model; {} is the layer."""

    name: str
    model_types: tuple[str, ...]
    positions: str
    words: str | None
    query: str
    key: str
    types: str | None = None
    norm: str | None = None
    layer_norm: str | None = None
    projection: str | None = None
    fused: bool = False
    leading: str = "none"
    special_first: str | None = None
    # LayerNorm's epsilon: under this name in the config; where that is not there, this.
    eps_name: str | None = "layer_norm_eps"
    eps: float = 1e-12
    # What the config calls their number.
    layers: tuple[str, ...] = ("num_hidden_layers", "n_layers", "n_layer")


_BERT: dict[str, Any] = dict(
    positions="embeddings.position_embeddings.weight",
    words="embeddings.word_embeddings.weight",
    norm="embeddings.LayerNorm",
)
_SELF: dict[str, Any] = dict(
    types="embeddings.token_type_embeddings.weight",
    query="encoder.layer.{}.attention.self.query",
    key="encoder.layer.{}.attention.self.key",
    special_first="the first token ([CLS])",
)
_DECODER: dict[str, Any] = dict(
    positions="decoder.embed_positions.weight",
    words="decoder.embed_tokens.weight",
    query="decoder.layers.{}.self_attn.q_proj",
    key="decoder.layers.{}.self_attn.k_proj",
    layer_norm="decoder.layers.{}.self_attn_layer_norm",
    eps_name=None,
    eps=1e-5,
)
_VIT: dict[str, Any] = dict(
    positions="embeddings.position_embeddings",
    words=None,
    types="embeddings.patch_embeddings.projection.bias",
    special_first="[CLS]",
)

# In the order in which names are tried where the config does not tell.
FAMILIES = (
    Family("ALBERT", ("albert",), **_BERT, **{
        **_SELF,
        "query": "encoder.albert_layer_groups.{}.albert_layers.0.attention.query",
        "key": "encoder.albert_layer_groups.{}.albert_layers.0.attention.key",
    }, projection="encoder.embedding_hidden_mapping_in", layers=("num_hidden_groups",)),
    Family("MPNet", ("mpnet",), **_BERT, query="encoder.layer.{}.attention.attn.q",
           key="encoder.layer.{}.attention.attn.k", leading="padding",
           special_first="the first token (<s>)"),
    Family("DistilBERT", ("distilbert",), **_BERT, query="transformer.layer.{}.attention.q_lin",
           key="transformer.layer.{}.attention.k_lin", special_first="the first token ([CLS])",
           eps_name=None),
    Family("ViT", ("vit", "deit"), **_VIT, query="encoder.layer.{}.attention.attention.query",
           key="encoder.layer.{}.attention.attention.key",
           layer_norm="encoder.layer.{}.layernorm_before"),
    Family("ViT", ("vit", "deit"), **_VIT, query="layers.{}.attention.q_proj",
           key="layers.{}.attention.k_proj", layer_norm="layers.{}.layernorm_before"),
    Family("GPT-2", ("gpt2",), "wpe.weight", "wte.weight", "h.{}.attn.c_attn", "h.{}.attn.c_attn",
           layer_norm="h.{}.ln_1", fused=True, eps_name="layer_norm_epsilon", eps=1e-5),
    Family("Whisper decoder", ("whisper",), **_DECODER, layers=("decoder_layers",)),
    Family("OPT", ("opt",), **_DECODER, leading="two", special_first="the first token (</s>)"),
    Family("ELECTRA", ("electra",), **_BERT, **_SELF, projection="embeddings_project"),
    Family("Longformer", ("longformer",), **_BERT, **_SELF, leading="padding"),
    Family("RoBERTa", ("roberta", "xlm-roberta", "camembert"), **_BERT, **_SELF, leading="padding"),
    Family("BERT", ("bert",), **_BERT, **_SELF),
)  # fmt: skip

# Why a model of this kind has no table to look at.
WITHOUT_TABLE = {
    "rotary positions": "llama mistral mixtral qwen2 qwen3 gemma gemma2 gemma3 phi phi3 gpt_neox "
    "gptj falcon modernbert olmo olmo2 stablelm cohere esm nomic_bert",
    "ALiBi's fixed slopes": "bloom mpt",
    "relative-position vectors inside attention, which this analysis does not read":
    "deberta deberta-v2 xlnet transfo-xl",
}  # fmt: skip


@dataclass(frozen=True)
class PositionModel:
    """A model's positions and how its heads read them.

    positions: E_P without the leading rows that no token ever gets (`leading_rows` of them).
    constant: what every token gets besides word and position (type 0; in ViT the patches' bias).
    query, key: (layers, heads, width + 1, dim), from x̂ (or x, where nothing normalises) and a 1.
    raw_query, raw_key: W_Q and W_K of the first layer (behind the projection, where there is one).
    through: from x̂ and a 1 to the first layer's input: scale, shift and map behind normalisation.
    grid: rows and columns, where positions lie in two dimensions; the special first row is extra.
    causal: whether queries see earlier keys and themselves only.
    """

    name: str
    family: str
    positions: Float[Tensor, "positions width"]
    leading_rows: int
    special_first: str | None
    grid: tuple[int, int] | None
    words: Float[Tensor, "words width"] | None
    constant: Float[Tensor, " width"]
    eps: float | None
    query: Float[Tensor, "layers heads width1 dim"]
    key: Float[Tensor, "layers heads width1 dim"]
    raw_query: Float[Tensor, "heads width dim"]
    raw_key: Float[Tensor, "heads width dim"]
    through: Float[Tensor, "width1 hidden"]
    projected: bool
    causal: bool


def has_table(checkpoint: Checkpoint) -> bool:
    """Return whether the model has a table of position embeddings that a family here knows."""
    return _recognise(checkpoint) is not None


def read_positions(checkpoint: Checkpoint, *, biases: bool = False) -> PositionModel:
    """Return the model's positions and heads; `biases` adds those of queries and keys."""
    found = _recognise(checkpoint)
    if found is None:
        raise ValueError(f"{checkpoint.name}: {why_not(checkpoint)}")
    family, prefix = found
    reader = Reader(checkpoint, prefix)
    table = reader(family.positions)
    table = table[0] if table.ndim == 3 else table
    leading = _leading_rows(family, checkpoint.config, table.shape[0])
    positions = table[leading:]
    if positions.shape[0] < 4:
        raise ValueError(
            f"{checkpoint.name}: expected a table of at least 4 positions, got "
            f"{family.positions} with shape {tuple(table.shape)}; is the file what it should be?"
        )
    heads = _head_count(checkpoint, family)
    projection, shift = _projection(reader, family)
    # OPT-350m normalises after, and some OPT without numbers of its own.
    switches = ("do_layer_norm_before", "layer_norm_elementwise_affine")
    normalised = all(checkpoint.config.get(name) is not False for name in switches)
    query: list[Tensor] = []
    key: list[Tensor] = []
    raw_query: list[Tensor] = []
    raw_key: list[Tensor] = []
    layers = reader.layers(family.query, family.layers)
    reader.layers(family.key, family.layers)
    words = _words(reader, family)
    reader.check_tables(table.shape[0] - 2 * (family.leading == "two"), table, words)
    for layer in layers:
        weights = _query_key(reader, family, layer)
        inner = table.shape[1] if projection is None else projection.shape[0]
        reader.check_maps(family.query.format(layer), inner, [weight for weight, _ in weights])
        gamma, beta = torch.ones(table.shape[1]), torch.zeros(table.shape[1])
        if normalised:
            norm = family.norm or family.layer_norm
            assert norm is not None
            gamma, beta = (
                reader(norm.format(layer) + end, table.shape[1:]) for end in (".weight", ".bias")
            )
        for (weight, bias), maps, raws in zip(
            weights, (query, key), (raw_query, raw_key), strict=True
        ):
            linear = projection.T @ weight if projection is not None else weight
            rest = beta @ linear
            rest = rest + shift @ weight if shift is not None else rest
            rest = rest + bias if biases and bias is not None else rest
            folded = torch.cat((gamma[:, None] * linear, rest[None]))
            if not raw_query:
                through = _through(gamma, beta, projection, shift)
            maps.append(_by_head(folded, heads))
            if layer == layers[0]:
                raws.append(_by_head(linear, heads))
    return PositionModel(
        name=checkpoint.name,
        family=family.name,
        positions=positions,
        leading_rows=leading,
        special_first=family.special_first,
        grid=_grid(family, checkpoint.config, positions.shape[0]),
        words=words,
        constant=_constant(reader, family, table.shape[1]),
        eps=_eps(family, checkpoint.config) if normalised else None,
        query=torch.stack(query),
        key=torch.stack(key),
        raw_query=raw_query[0],
        raw_key=raw_key[0],
        through=through,
        projected=projection is not None,
        # By its name too: a weight file alone has no config.
        causal=family.name == "GPT-2" or is_causal(checkpoint.config, family.positions),
    )


def why_not(checkpoint: Checkpoint) -> str:
    """Return in a sentence why there is no position table to analyse."""
    model_type = str(checkpoint.config.get("model_type", "unknown"))
    for reason, types in WITHOUT_TABLE.items():
        if model_type in types.split():
            return f"this model ({model_type}) has no learned position table: it has {reason}"
    rotary = {"rope_theta", "rope_scaling", "rope_parameters", "rotary_dim", "rotary_pct"}
    if rotary & set(checkpoint.config):
        return f"this model ({model_type}) has no learned position table: it has rotary positions"
    if relative := _relative(checkpoint):
        return f"this model ({model_type}) does not use its position table: it has {relative}"
    known = ", ".join(dict.fromkeys(f.name for f in FAMILIES))
    return (
        f"no position table found in this model (model_type {model_type}); expected {known}, "
        "a T5-style table or TISA's kernels"
    )


def _relative(checkpoint: Checkpoint) -> str | None:
    """Return what older BERT-like models have in place of their table, which is in the file."""
    kind = checkpoint.config.get("position_embedding_type")
    return None if kind in (None, "absolute") else str(kind)


def _recognise(checkpoint: Checkpoint) -> tuple[Family, str] | None:
    """Return the family and the prefix of its tensors, told by the config or by names alone."""
    if _relative(checkpoint):
        return None
    told = checkpoint.config.get("model_type")
    if told is not None:
        # A converted model that keeps its table beside its scores (tisa.hf).
        told = str(told).removeprefix("tisa-")
    for family in FAMILIES:
        if told is not None and told not in family.model_types:
            continue
        for name in checkpoint.tensors:
            prefix = name.removesuffix(family.positions)
            if prefix == name or (prefix and not prefix.endswith(".")):
                continue
            if prefix + family.query.format(0) + ".weight" not in checkpoint.tensors:
                continue
            if told is not None or _looks_like(family, prefix, checkpoint):
                return family, prefix
    return None


def _looks_like(family: Family, prefix: str, checkpoint: Checkpoint) -> bool:
    """Return whether a model whose config does not tell may be of this family."""
    named_after = {f.name for f in FAMILIES if prefix.rstrip(".") in f.model_types}
    if named_after:
        return family.name in named_after
    projections = {f.projection for f in FAMILIES if f.projection}
    there = {p for p in projections if f"{prefix}{p}.weight" in checkpoint.tensors}
    if (family.projection not in there) if there else family.projection:
        return False
    if family.name == "Whisper decoder":
        return "decoder_attention_heads" in checkpoint.config
    # RoBERTa's and Longformer's names are BERT's, and nothing says otherwise.
    return family.leading != "padding" or family.query != _SELF["query"]


def _leading_rows(family: Family, config: Mapping[str, Any], rows: int) -> int:
    """Return how many rows no token gets: RoBERTa and its kin count from the padding index + 1."""
    if family.leading == "two":
        return 2
    if family.leading == "padding":
        padding = config.get("pad_token_id")
        return min((1 if padding is None else int(padding)) + 1, rows - 1)
    return 0


def _eps(family: Family, config: Mapping[str, Any]) -> float:
    told = config.get(family.eps_name) if family.eps_name else None
    return family.eps if told is None else float(told)


def _head_count(checkpoint: Checkpoint, family: Family) -> int:
    decoder = family.name == "Whisper decoder"
    names = ["decoder_attention_heads"] if decoder else ["num_attention_heads", "n_heads", "n_head"]
    for name in names:
        if name in checkpoint.config:
            return int(checkpoint.config[name])
    raise ValueError(
        f"{checkpoint.name}: expected a config.json beside the weights that says how many "
        f"attention heads there are ({', '.join(names)}), got none; put it there"
    )


def _projection(reader: Reader, family: Family) -> tuple[Tensor | None, Tensor | None]:
    if not reader.has(family.projection, ".weight"):
        return None, None
    return reader(f"{family.projection}.weight"), reader(f"{family.projection}.bias")


def _through(
    gamma: Tensor, beta: Tensor, projection: Tensor | None, shift: Tensor | None
) -> Tensor:
    if projection is None or shift is None:
        return torch.cat((torch.diag(gamma), beta[None]))
    return torch.cat((gamma[:, None] * projection.T, (projection @ beta + shift)[None]))


def _query_key(
    reader: Reader, family: Family, layer: int
) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    """Return W (input, output) and bias of the layer's queries and of its keys."""
    if family.fused:  # GPT-2's Conv1D: (input, query | key | value)
        weight = reader(family.query.format(layer) + ".weight")
        bias = reader(family.query.format(layer) + ".bias")
        width = weight.shape[1] // 3
        return (weight[:, :width], bias[:width]), (
            weight[:, width : 2 * width],
            bias[width : 2 * width],
        )
    both = []
    for name in (family.query.format(layer), family.key.format(layer)):
        shift = reader(name + ".bias") if reader.has(name, ".bias") else None
        both.append((reader(name + ".weight").T, shift))
    return both[0], both[1]


def _by_head(weight: Tensor, heads: int) -> Tensor:
    if heads < 1 or weight.shape[1] % heads:
        raise ValueError(
            f"config.json: expected num_attention_heads to divide {weight.shape[1]}, got {heads}"
        )
    return weight.reshape(weight.shape[0], heads, -1).transpose(0, 1).contiguous()


def _words(reader: Reader, family: Family) -> Tensor | None:
    if family.words is None:
        return None
    words = reader(family.words)
    if reader.has("decoder.project_in.weight"):  # OPT-350m: only words are mapped
        words = words @ reader("decoder.project_in.weight").T
    return words


def _constant(reader: Reader, family: Family, width: int) -> Tensor:
    wanted = reader.checkpoint.config.get("type_vocab_size", 0)
    if family.types is None or not (wanted or reader.has(family.types)):
        return torch.zeros(width)
    constant = reader(family.types)
    return constant[0] if constant.ndim == 2 else constant


def _grid(family: Family, config: Mapping[str, Any], rows: int) -> tuple[int, int] | None:
    if family.name != "ViT":
        return None
    sizes = []
    for name in ("image_size", "patch_size"):
        size = config.get(name, 0)
        sizes.append(tuple(size) if isinstance(size, (list, tuple)) else (size, size))
    if all(all(size) for size in sizes):
        grid = (sizes[0][0] // sizes[1][0], sizes[0][1] // sizes[1][1])
        if grid[0] * grid[1] <= rows:
            return grid
    side = int((rows - 1) ** 0.5)
    return (side, side) if side * side == rows - 1 else None
