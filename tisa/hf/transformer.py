"""Our own transformers as Hugging Face models: what `tisa.transformer.save` writes.

    AutoModelForMaskedLM.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)

read such a folder once `tisa.hf` is imported, with any position method; `save_pretrained` writes
one that `tisa.transformer.load` reads.
"""

import os
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput, MaskedLMOutput

from tisa.shapes import Tensor
from tisa.store import seal_folder
from tisa.transformer import LanguageModel, Transformer, TransformerConfig
from tisa.transformer.before import as_meant
from tisa.transformer.saving import CONFIG, FORMAT, HF_MODEL_TYPE, KIND, WEIGHTS


class TisaTransformerConfig(PreTrainedConfig):
    """`transformer` has the values of a `tisa.TransformerConfig`; sizes have their usual names."""

    model_type = HF_MODEL_TYPE

    def __init__(
        self,
        config: dict[str, Any] | None = None,
        model: str = "LanguageModel",
        format: int = FORMAT,
        **kwargs: Any,
    ) -> None:
        values = TransformerConfig.from_dict(as_meant(config or {}, format))
        self.config = values.to_dict()
        self.model, self.format = model, FORMAT
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
                     "max_position_embeddings", "is_causal"):  # fmt: skip
            kwargs.pop(name, None)
            setattr(self, name, getattr(values, name))
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)

    @property
    def transformer(self) -> TransformerConfig:
        """The config as `tisa.transformer` has it."""
        return TransformerConfig.from_dict(self.config)


class _Base(PreTrainedModel):
    config_class = TisaTransformerConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = False

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the model from a folder or the hub; each of its parameters is the file's."""
        wanted = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        missing = sorted(info["missing_keys"])
        if missing:
            raise ValueError(
                f"{args[0] if args else cls.__name__}: the weights lack {', '.join(missing[:3])}"
                f"{' and more' if len(missing) > 3 else ''} of a {cls.__name__}; take AutoModel "
                "for a model without a head, or the whole file"
            )
        return (model, info) if wanted else model

    def _init_weights(self, module: nn.Module) -> None:
        # Every module of the package has drawn its own initial values.
        return

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embeddings."""
        embeddings: nn.Module = self.transformer.embeddings
        return embeddings

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Save like any other model; sealed where it is one file, which `load` reads."""
        super().save_pretrained(save_directory, **kwargs)
        folder = Path(save_directory)
        if kwargs.get("is_main_process", True) and (folder / WEIGHTS).is_file():
            seal_folder(folder, KIND, {"model": self.config.model}, (WEIGHTS, CONFIG))


class TisaTransformerModel(_Base):
    """Hidden states."""

    # A language model's head is not wanted here.
    _keys_to_ignore_on_load_unexpected = ["^narrow", "^norm", "^bias"]  # noqa: RUF012

    def __init__(self, config: TisaTransformerConfig) -> None:
        super().__init__(config)
        self.transformer = Transformer(config.transformer)
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **ignored: Any
    ) -> BaseModelOutput:
        """Return the hidden states of every token."""
        _check_ignored(ignored)
        return BaseModelOutput(
            last_hidden_state=self.transformer(input_ids, attention_mask=attention_mask)
        )


class _WithHead(_Base):
    """The parts of a `tisa.LanguageModel` under their own names, so that one file serves both."""

    def __init__(self, config: TisaTransformerConfig) -> None:
        super().__init__(config)
        if self.wants_causal != config.transformer.is_causal:
            other = (
                "AutoModelForCausalLM" if config.transformer.is_causal else "AutoModelForMaskedLM"
            )
            raise ValueError(
                f"{type(self).__name__}: the model is of the other kind; load it with {other}"
            )
        made = LanguageModel(config.transformer)
        self.transformer, self.narrow, self.norm = made.transformer, made.narrow, made.norm
        self.bias = made.bias
        self.post_init()

    def _logits(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        hidden = self.transformer(input_ids, attention_mask=attention_mask)
        # Its own method: the attributes that it reads are here.
        logits: Tensor = LanguageModel.head(self, hidden)
        return logits


class TisaTransformerForMaskedLM(_WithHead):
    """An encoder with its head."""

    wants_causal = False

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **ignored: Any,
    ) -> MaskedLMOutput:
        """Return logits, and the mean loss of the labels that are not −100."""
        _check_ignored(ignored)
        logits = self._logits(input_ids, attention_mask)
        loss = None if labels is None else cross_entropy(logits.flatten(0, 1), labels.flatten())
        return MaskedLMOutput(loss=loss, logits=logits)


class TisaTransformerForCausalLM(_WithHead):
    """A decoder with its head; `tisa.LanguageModel.generate` has the cache."""

    wants_causal = True

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **ignored: Any,
    ) -> CausalLMOutput:
        """Return logits, and the mean loss of each token after those before it."""
        _check_ignored(ignored)
        logits = self._logits(input_ids, attention_mask)
        loss = None
        if labels is not None:
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


def _check_ignored(given: dict[str, Any]) -> None:
    """Refuse what would be ignored; None, and what changes no numbers, may be given."""
    harmless = ("return_dict", "token_type_ids", "use_cache", "num_items_in_batch")
    other = [name for name, value in given.items() if value is not None and name not in harmless]
    if other:
        raise ValueError(f"expected input_ids, attention_mask and labels, got {', '.join(other)}")


def register() -> None:
    """Make the Auto classes know these models."""
    AutoConfig.register(HF_MODEL_TYPE, TisaTransformerConfig, exist_ok=True)
    AutoModel.register(TisaTransformerConfig, TisaTransformerModel, exist_ok=True)
    AutoModelForMaskedLM.register(TisaTransformerConfig, TisaTransformerForMaskedLM, exist_ok=True)
    AutoModelForCausalLM.register(TisaTransformerConfig, TisaTransformerForCausalLM, exist_ok=True)
