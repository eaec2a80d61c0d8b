"""Whose attention is causal, by what a checkpoint says of itself."""

from collections.abc import Mapping
from typing import Any

# Decoders whose configs may not say so.
DECODERS = ("gpt2", "gpt_bigcode", "gpt_neox", "llama", "mistral", "qwen2", "qwen3")


def is_causal(config: Mapping[str, Any], name: str) -> bool:
    """Return whether the attention that a tensor belongs to sees no later keys."""
    told = str(config.get("model_type")).removeprefix("tisa-")
    causal = any(str(name).endswith("ForCausalLM") for name in config.get("architectures") or ())
    # Models of this package keep their own config inside.
    own = config.get("config")
    said = config.get("is_decoder") or (isinstance(own, Mapping) and own.get("is_causal"))
    return bool(said) or causal or told in DECODERS or "decoder" in name.split(".")
