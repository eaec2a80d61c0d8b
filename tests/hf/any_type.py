"""A tiny random model of any type of the installed transformers, without a network.

Sizes are set by their names in the config and in the configs within it; a type that cannot be
built, or not below `LIMIT` parameters, says why.
"""

import copy
import re
from dataclasses import fields
from importlib import import_module
from inspect import signature

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

LIMIT = 8_000_000
ROPE = {"rope_type": "default", "rope_theta": 1e4}
# What a language model is used for first; else the bare model.
HEADS = ("AutoModelForSeq2SeqLM", "AutoModelForCausalLM", "AutoModelForMaskedLM")
# The first pattern that a name matches has its size.
SIZES = {
    r"\w*vocab_size(_per_layer_input)?": 120,
    r"(text_|image_|attention_|v_|swa_|global_|local_)?head_(dim|size)|d_kv|d_head|dim_head": 16,
    r"qk_rope_head_dim|qk_nope_head_dim|index_head_dim|attention_head_dim|kv_channels": 16,
    r"linear_(key|value)_head_dim|mamba_d_head|mamba_headdim|rotary_dim": 16,
    r"(\w+_)?(kv|q|o)_lora_rank": 16,
    r"(\w+_)?max_(source_|target_|encoder_)?position(s|_embeddings)|n_positions|n_ctx": 64,
    r"max_seq(_len(gth)?|uence_length)|seq_length|context_length|block_size": 64,
    r"sliding_window(_size)?|attention_window_size|attention_chunk_size|local_attention": 4,
    r"pad_token_id": 1,
    r"bos_token_id|decoder_start_token_id|sos_token_id|cls_token_id": 2,
    r"eos_token_id|sep_token_id|forced_eos_token_id": 3,
    r"\w*(num_key_value_heads|num_kv_heads|num_query_groups|n_kv_heads|key_value_heads)": 2,
    r"linear_num_(key|value)_heads|index_n_heads": 2,
    r"mamba_n_heads|mamba_num_heads": 8,
    r"\w*(attention_heads|num_heads|n_heads|n_head|num_head)": 4,
    r"decoder_sparse_step|moe_layer_frequency|interleave_moe_layer_step": 1,
    r"num_(hidden_)?groups|num_hash_layers|first_k_dense_replace|num_kv_shared_layers": 1,
    r"\w*(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers)": 2,
    r"\w*(num_blocks|depth)": 2,
    r"top_k_experts|num_experts_per_tok(en)?|moe_(topk|k)|num_selected_experts|topk_group": 1,
    r"moe_top_k|topk|num_activated_experts": 1,
    r"n_group|n_shared_experts|num_shared_experts|moe_num_shared_experts": 1,
    r"(num|n)_(local_|routed_)?experts|moe_num_experts|num_moe_experts|num_experts_total": 2,
    r"full_attention_interval|layer_group_size|attn_layer_period": 2,
    r"mamba_n_groups|n_groups|attn_layer_offset": 1,
    r"(mamba_)?(d_)?state_size|mamba_d_state|ssm_state_size": 8,
    r"hidden_size|d_model|n_embd|dim|embed_dim|emb_dim|model_dim|width": 64,
    r"projection_dim|projection_size|(word_)?embed_proj_dim|out_hidden_size|output_dim": 64,
    r"(word_)?embedding_(size|dim)|emb_size|\w+_hidden_size|lru_width|codevector_dim": 64,
    r"\w*(intermediate_size|ffn_dim|ffn_size|inner_size|n_inner)": 48,
    r"\w*(d_ff|dim_ff|mlp_dim|hidden_dim)": 48,
    r"image_size|\w*crop_size|input_size|sample_size|pretrain_img_size": 32,
    r"patch_size": 8,
    r"query_pre_attn_scalar": 16,
    r"num_mel_bins": 16,
    r"num_(image_tokens|queries|query_tokens|latents)|image_seq_length|mm_tokens_per_image": 4,
    r"num_buckets": 8,
    r"index_topk": 4,
}
# Types whose sizes have to agree with one another in a way of their own.
OWN = {
    "bamba": {"mamba_d_head": 16, "attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "deepseek_ocr2_text": {
        "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 1},
    "diffusion_gemma_text": {"num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 48},
    "esm": {"vocab_size": 120, "mask_token_id": 4, "pad_token_id": 1},
    "blt_local_encoder": {"hidden_size_global": 64},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 2, "num_experts_per_tok": 1},
    "funnel": {"block_sizes": [1, 1]},
    "glm5_next_text": {"num_key_value_heads": 4, "index_topk": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "granitemoehybrid": {"mamba_d_head": 16, "layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "longcat_flash": {"num_key_value_heads": 4, "moe_topk": 2},
    "luke": {"entity_emb_size": 64},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "qwen4_exp_text": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
}  # fmt: skip
# Tried one after the other until a model takes tokens: what some families want equal or given.
VARIATIONS = (
    {},
    {"num_key_value_heads": 4},
    {"head_dim": 16},
    {"head_dim": 16, "num_key_value_heads": 4},
    {"layer_types": ["full_attention", "full_attention"]},
    {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    {"rope_parameters": ROPE | {"mrope_section": [3, 3, 2]}},
    {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
    {"rope_parameters": ROPE | {"mrope_section": [3, 3, 2]}, "head_dim": 16},
)


class TooLargeError(Exception):
    """A type whose sizes are not all known by name."""


def size_of(name, value):
    """Return the small size of this name, or None."""
    for pattern, size in SIZES.items():
        if re.fullmatch(pattern, name):
            return size
    if name.endswith(("token_id", "token_index", "_id")) and value >= 100:
        # None of these is among the tokens that are given.
        return 60 + sum(map(ord, name)) % 50
    return None


def tiny_config(cls, variation):
    """Return a tiny config of this class."""
    default = cls()
    default.allow_global_per_layer_attribute_access = True
    values, parts = {}, getattr(default, "sub_configs", {})
    for name in (field.name for field in fields(cls)):
        value = getattr(default, name, None)
        if name in parts and isinstance(value, PreTrainedConfig):
            values[name] = tiny_config(type(value), variation)
        elif isinstance(value, int) and not isinstance(value, bool):
            small = size_of(name, value)
            if small is not None and (value >= small or "token" in name):
                values[name] = small
    extra = {k: v for k, v in variation.items() if hasattr(default, k)}
    if "vocab_size" not in values:
        extra.pop("rope_parameters", None)
    return cls(**(values | extra | OWN.get(default.model_type, {})))


def model_classes(config_class):
    """Return the classes of a type's models: those of Auto classes, or one beside the config."""
    for names in (HEADS, ("AutoModel",)):
        every = (getattr(modeling_auto, n)._model_mapping.get(config_class, None) for n in names)
        found = [c[0] if isinstance(c, (tuple, list)) else c for c in every if c]
        # A mapping may name a model of another type, and one of this.
        own = [c for c in dict.fromkeys(found) if c.config_class is config_class]
        if found:
            return own or found[:1]
    beside = config_class.__module__.replace(".configuration_", ".modeling_")
    every = vars(import_module(beside)).values()
    known = [
        c for c in every
        if isinstance(c, type) and issubclass(c, PreTrainedModel)
        and getattr(c, "config_class", None) is config_class and "PreTrained" not in c.__name__
    ]  # fmt: skip
    if not known:
        raise LookupError("transformers has no model of it alone")
    return sorted(known, key=lambda c: not c.__name__.endswith("Model"))[:1]


def takes_tokens(cls):
    """Return whether models of the class read tokens in a row."""
    return getattr(cls, "main_input_name", "input_ids") == "input_ids"


def tokens_for(model, *, batch=2, length=9, padded=False):
    """Return token ids, a mask, and the decoder's tokens where it asks for them."""
    ids = torch.randint(10, 60, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        ids[0, length - 3 :], mask[0, length - 3 :] = 1, 0
    given = {"input_ids": ids, "attention_mask": mask}
    if "decoder_input_ids" in signature(model.forward).parameters:
        given["decoder_input_ids"] = ids[:, : length - 3].flip(1)
    return given


def build(cls, config_class):
    """Return a tiny random model of that class, its weights such that positions matter."""
    first, error = None, None
    for variation in VARIATIONS:
        try:
            model = built(cls, tiny_config(config_class, variation))
        except (TooLargeError, LookupError, ImportError):
            raise
        except Exception as failed:
            error = error or failed
            continue
        try:
            model.set_attn_implementation("eager")
            with torch.no_grad():
                model(**tokens_for(model))
        except Exception:
            first = model if first is None else first
            continue
        return model
    if first is None:
        raise error
    return first


def built(cls, config):
    """Return a model of that config, if it is small."""
    with torch.device("meta"):
        count = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    if count > LIMIT:
        raise TooLargeError(f"{count:,} parameters")
    torch.manual_seed(0)
    if "CausalLM" in cls.__name__ or cls.__name__.endswith("LMHeadModel"):
        config.is_decoder = True
    model = cls._from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.any():
                parameter.mul_(4.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model
