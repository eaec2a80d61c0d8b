"""What a converted model has in place of its own modules: attention with scores, no positions.

An attention module becomes an instance of a subclass of its own class, made here from a mixin, and
keeps its class's name, by which transformers and accelerate look for it. A subclass is not a patch:
no other model of the same class notices.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import Cache

from tisa.hf.attention import additive, own_name
from tisa.offsets import to_matrix, to_vector
from tisa.ops import attention
from tisa.shapes import Float, Int32, Tensor

# So few keys are one or two blocks of the kernels: there is nothing for a band to leave out.
FEW_KEYS = 256


class _View:
    """A model's config as one of its attention modules sees it: with our attention functions."""

    def __init__(self, config: Any) -> None:
        self.__dict__["config"] = config

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["config"], name)
        return own_name(value) if name == "_attn_implementation" else value


class _Mixed(nn.Module):
    """What all mixins share: instances can be pickled, although their class was made here."""

    mixin: Any
    stock: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (self.mixin, self.stock), self.__dict__


class OwnScores(_Mixed):
    """Mixin: an attention module that owns its scores, whatever its model's implementation is."""

    offset_scores: nn.ModuleList
    # Called with (module, query, key, mask, scaling, kwargs) before attending; used by the fit.
    observer: Any = None

    @property
    def config(self) -> Any:
        """Return the model's config, in which the attention implementation is ours."""
        return _View(self.__dict__["_model_config"])

    @config.setter
    def config(self, config: Any) -> None:
        self.__dict__["_model_config"] = config

    def score_vector(
        self, queries: int, keys: int, kwargs: dict[str, Any]
    ) -> Float[Tensor, "heads span"]:
        """Return this pass's scores of the offsets between that many queries and keys."""
        shared = kwargs.get("tisa_vector")
        if shared is not None and shared.shape[-1] == queries + keys - 1:
            return shared
        scoring, start = self._scoring(kwargs), kwargs.get("tisa_query_start")
        together = kwargs.get("tisa_together")
        if together is not None and start is None:
            known = together.vector(scoring, queries, keys)
            if known is not None:
                return known
        return scoring(queries, keys, query_start=start)

    def band(
        self, query: Tensor, keys: int, kwargs: dict[str, Any]
    ) -> Int32[Tensor, "heads 2"] | None:
        """Return the band for `tisa.attention` where it saves work: on a GPU, not for few keys."""
        if not query.is_cuda or query.dtype == torch.float64:
            return None
        # A compiled program is for any length.
        if not torch.compiler.is_compiling() and keys <= FEW_KEYS:
            return None
        scoring, together = self._scoring(kwargs), kwargs.get("tisa_together")
        known = None if together is None else together.band(scoring, query.dtype)
        return scoring.band(query.dtype) if known is None else known

    def _scoring(self, kwargs: dict[str, Any]) -> Any:
        scores = self.offset_scores
        # Or what stands for it: peft wraps the modules that it trains whole.
        return scores[kwargs.get("tisa_pass", 0) if len(scores) > 1 else 0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the stock module does; tell the attention function of a static cache."""
        # By its type: it is `past_key_values` in most models, `layer_past` in others.
        past = next((x for x in (*args, *kwargs.values()) if isinstance(x, Cache)), None)
        if past is not None:
            past = getattr(past, "self_attention_cache", past)
            layers = getattr(past, "layers", [])
            index = getattr(self, "layer_idx", None) or 0
            layer = layers[index] if index < len(layers) else None
            if layer is not None and getattr(layer, "is_compileable", False):
                if getattr(layer, "is_sliding", False):
                    raise ValueError(
                        "past_key_values: a static sliding-window cache moves its keys, and the "
                        'scores need their places; take a cache of type "dynamic" or "static"'
                    )
                seen = past.get_seq_length(index)
                # A static cache counts in place, and goes on counting before the scores are asked.
                kwargs["tisa_query_start"] = seen.clone() if isinstance(seen, Tensor) else seen
        return super().forward(*args, **kwargs)


class MPNetScores(OwnScores):
    """Mixin for MPNet, whose attention does not go through the attention interface.

    Its relative bias comes as `position_bias`; where positions were replaced it is left out, the
    scores having been fitted to both.
    """

    keeps_relative_bias: bool = True

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        """Return the attention output, and the weights if they are asked for."""
        length = hidden_states.shape[1]
        kept = position_bias if self.keeps_relative_bias else None
        implementation = self.__dict__["_model_config"]._attn_implementation
        if own_name(implementation) not in ("tisa", "tisa|eager"):
            raise ValueError(
                f'attn_implementation: MPNet has "tisa" and "eager", got "{implementation}"'
            )
        if self.observer is not None or output_attentions or implementation == "eager":
            bias = to_matrix(self.score_vector(length, length, kwargs), length, length)
            bias = bias.to(hidden_states.dtype).unsqueeze(0)
            mask = additive(attention_mask, hidden_states.dtype)
            if self.observer is not None:
                # The observer wants logits without scores, and the relative bias counts as such.
                q, k, _ = self._projected(hidden_states)
                self.observer(self, q, k, mask if kept is None else (0 if mask is None else mask)
                              + kept, 1 / math.sqrt(self.attention_head_size), kwargs)  # fmt: skip
            return super(OwnScores, self).forward(
                hidden_states, mask, bias if kept is None else kept + bias, output_attentions
            )
        q, k, v = self._projected(hidden_states)
        vector = self.score_vector(length, length, kwargs)
        if kept is not None:
            vector = vector + to_vector(kept[0].to(vector.dtype))
        dropout = self.dropout.p if self.training else 0.0
        output = attention(q, k, v, vector, attn_mask=attention_mask, dropout_p=dropout)
        assert isinstance(output, Tensor)
        return (self.o(output.transpose(1, 2).flatten(-2)),)

    def _projected(self, hidden_states: Tensor) -> list[Tensor]:
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        return [f(hidden_states).view(shape).transpose(1, 2) for f in (self.q, self.k, self.v)]


class Passes(_Mixed):
    """Mixin for ALBERT's stack: tells its one layer in which pass it is, for scores per pass.

    Scores that are shared by all passes are computed here, once, and handed down.
    """

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Return what ALBERT's own loop does."""
        from transformers.modeling_outputs import BaseModelOutput

        hidden_states = self.embedding_hidden_mapping_in(hidden_states)
        (*others, owner) = (m for m in self.modules() if isinstance(m, OwnScores))
        if not others and len(owner.offset_scores) == 1:
            kwargs["tisa_vector"] = owner.offset_scores[0](hidden_states.shape[1])
        layers, groups = self.config.num_hidden_layers, self.config.num_hidden_groups
        for index in range(layers):
            group = int(index / (layers / groups))
            hidden_states = self.albert_layer_groups[group](
                hidden_states, attention_mask, tisa_pass=index, **kwargs
            )
        return BaseModelOutput(last_hidden_state=hidden_states)


class NoPositions(nn.Module):
    """What stands where the position table was: it adds nothing, whatever it is called with."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return 0."""
        given = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        return torch.zeros((), device=given.device)


class Folded(_Mixed):
    """Mixin: word embeddings that add what of the positions had nothing to do with order.

    `fold` has three vectors: for every token but two, for the one that always stands last, and for
    the one that always stands first (which wins where they are the same). They depend on the token
    alone, not on where it stands, and are added on the way in only: output embeddings that share
    the weight do not have them.
    """

    first_token_id: int
    last_token_id: int
    fold: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        """Return the embeddings with the folded vectors."""
        kind = (input == self.last_token_id).long() + 2 * (input == self.first_token_id).long()
        return super().forward(input) + self.fold[kind.clamp(max=2)]


@cache
def with_mixin(mixin: Any, cls: Any) -> Any:
    """Return the subclass of both, under the name of the stock class."""
    return type(cls.__name__, (mixin, cls), {"__module__": __name__, "mixin": mixin, "stock": cls})


def _blank(mixin: Any, cls: Any) -> Any:
    made = with_mixin(mixin, cls)
    return made.__new__(made)


def become(module: Any, mixin: Any) -> None:
    """Turn the module into one of the subclass: it keeps its parameters and its place."""
    config = module.__dict__.pop("config", None)
    module.__class__ = with_mixin(mixin, type(module))
    if config is not None:
        module.config = config
