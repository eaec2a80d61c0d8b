"""Attention that transformers has not: whoever knows its scores declares them, and `fuse` takes it.

    for layer in model.encoder.layer:
        tisa.hf.offset_scores(layer.attention.self, tisa.ALiBi(12))
    model = tisa.hf.fuse(model)

Of two kinds: attention that calls transformers' interface, and attention of BERT's form, which is
given hidden states, a mask and perhaps a dense bias, and returns its heads side by side in a tuple.
What is declared is not believed: at its first call a module of BERT's form does a short piece of it
in its own code, too, and must come to the same; the other kind's dense scores, where it makes any,
must be the declared ones.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tisa.hf.core import Mixed, uses_interface
from tisa.hf.fused.attention import NAME, told
from tisa.offsets import to_matrix
from tisa.ops import attention
from tisa.shapes import Tensor

# Under these names a module is handed its dense scores, which the declared ones stand for.
BIASES = ("bias", "alibi", "alibi_bias", "position_bias", "attention_bias", "rel_pos_bias")
# So many tokens are done twice at the first call.
PIECE = 64

Projected = tuple[Tensor, Tensor, Tensor]


def offset_scores(
    module: nn.Module,
    scoring: Callable[..., Tensor],
    *,
    project: Callable[[Any, Tensor], Projected] | None = None,
) -> None:
    """Declare that an attention module adds `scoring` of the offset to its logits; then `fuse`.

    Args:
        module: the attention module, not the model.
        scoring: what returns (heads, queries + keys − 1) scores in the order of `tisa.offsets` when
            it is called as a scoring function is, `scoring(queries, keys, query_start=…)`. A
            function of the module's own parameters trains them; parameters of its own are
            refused, as no saved model would have them.
        project: (module, hidden states) → query, key and value, (batch, heads, length, dim) each,
            where it is not `module.query`, `.key` and `.value` alone.
    """
    name = type(module).__name__
    if not isinstance(module, nn.Module):
        raise TypeError(f"offset_scores: module must be an attention module, got {name}")
    if not callable(scoring):
        raise TypeError(
            "offset_scores: scoring must be a scoring function (tisa.ALiBi(heads), …) or a "
            f"function of (queries, keys, query_start), got {type(scoring).__name__}"
        )
    if isinstance(scoring, nn.Module) and any(True for _ in scoring.parameters()):
        raise ValueError(
            f"offset_scores: scoring ({type(scoring).__name__}) has parameters of its own, which "
            "the saved model would lack; give a function that reads the module's"
        )
    if isinstance(module, Mixed):
        raise ValueError(f"offset_scores: {name} is fused or converted already; unfuse it first")
    if project is None and not uses_interface(type(module)) and not _is_berts(module):
        raise ValueError(
            f"offset_scores: {name} neither calls transformers' attention interface nor has "
            "query, key, value and num_attention_heads; say with `project` how hidden states "
            "become queries, keys and values"
        )
    module.__dict__["declared"] = (scoring, project)


def declared_mixin(module: Any) -> type | None:
    """Return what becomes of a module whose scores have been declared, None of any other."""
    if "declared" not in vars(module):
        return None
    _, project = module.declared
    return DeclaredInterface if project is None and uses_interface(type(module)) else DeclaredBert


def _is_berts(module: Any) -> bool:
    linear = (getattr(module, name, None) for name in ("query", "key", "value"))
    heads = getattr(module, "num_attention_heads", None)
    return isinstance(heads, int) and all(isinstance(x, nn.Module) for x in linear)


class Declared(Mixed):
    """Mixin: a module that somebody has declared the scores of."""

    declared: tuple[Callable[..., Tensor], Callable[[Any, Tensor], Projected] | None]
    band_ends = None

    def score_vector(self, query: Tensor, keys: int, start: Any = None) -> Tensor:
        """Return the declared scores, on the query's device."""
        scoring = self.declared[0]
        if isinstance(scoring, nn.Module):
            scoring = scoring.to(query.device)
        vector: Tensor = scoring(query.shape[-2], keys, query_start=start)
        expected = (query.shape[1], query.shape[-2] + keys - 1)
        if vector.shape != expected:
            raise ValueError(
                f"offset_scores: scoring of {type(self).__name__} must return {expected} (heads, "
                f"queries + keys - 1), got {tuple(vector.shape)}"
            )
        return vector


class DeclaredInterface(Declared):
    """Mixin: attention that calls transformers' interface, which is told of the scores."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's own code does with them."""
        if self.config._attn_implementation == NAME:
            causal = bool(getattr(self, "is_causal", False))
            kwargs["tisa_told"] = told(self, causal, False, args, kwargs)
        return super().forward(*args, **kwargs)

    @torch.no_grad()
    def prove(self, vector: Tensor, bias: Any, mask: Any, queries: int, keys: int) -> None:
        """Refuse dense scores that are others, and a mask in which they may be."""
        _check_mask(self, mask)
        if bias is None or torch.compiler.is_compiling() or "proved" in self.__dict__:
            return
        matrix = to_matrix(vector, queries, keys)
        # A constant in a row changes nothing; the corners have every offset.
        off = (bias[0].to(vector.dtype) - matrix)[:, [0, -1]]
        if self.is_causal and queries > 1:
            off = off[:, -1:]
        off = (off - off.mean(-1, keepdim=True)).abs().amax()
        if not off <= 8 * torch.finfo(bias.dtype).eps * matrix.abs().amax().clamp_min(1.0):
            raise ValueError(
                f"offset_scores: {type(self).__name__} makes other scores of its own, up to "
                f"{float(off):.2g} away from the declared ones"
            )
        self.__dict__["proved"] = True


class DeclaredBert(Declared):
    """Mixin: attention of BERT's form, with code of its own."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the heads side by side in a tuple; weights and decoders are left to own code."""
        names = list(inspect.signature(self.stock.forward).parameters)[2:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        asked = {k: v for k, v in given.items() if v is not None and v is not False}
        mask = asked.pop("attention_mask", None)
        biases = {name: asked.pop(name) for name in BIASES if name in asked}
        if asked:
            return super().forward(hidden_states, *args, **kwargs)
        _check_mask(self, mask)
        if not torch.compiler.is_compiling() and "proved" not in self.__dict__:
            self._prove(hidden_states, mask, biases)
            self.__dict__["proved"] = True
        return (self._attended(hidden_states, mask, self.training),)

    def _attended(self, hidden_states: Tensor, mask: Any, training: bool) -> Tensor:
        query, key, value = (self.declared[1] or _projected)(self, hidden_states)
        dropout = getattr(self, "dropout", None)
        p = dropout.p if training and isinstance(dropout, nn.Dropout) else 0.0
        output = attention(
            query, key, value, self.score_vector(query, key.shape[-2]), attn_mask=mask,
            dropout_p=p, scale=1 / math.sqrt(query.shape[-1]),
        )  # fmt: skip
        assert isinstance(output, Tensor)
        return output.transpose(1, 2).flatten(-2)

    @torch.no_grad()
    def _prove(self, hidden_states: Tensor, mask: Any, biases: dict[str, Tensor]) -> None:
        """Compare a short piece with what the module's own code makes of it."""
        piece = hidden_states[:1, :PIECE]
        mask = mask if mask is None else mask[:1, :, : piece.shape[1], : piece.shape[1]]
        biases = {k: v[..., : piece.shape[1], : piece.shape[1]] for k, v in biases.items()}
        was, self.training = self.training, False
        switches = [m for m in self.modules() if m.training]
        try:
            for module in switches:
                module.training = False
            made = super().forward(piece, attention_mask=mask, **biases)
            found = self._attended(piece, mask, training=False)
        finally:
            self.training = was
            for module in switches:
                module.training = True
        expected = made[0] if isinstance(made, tuple) else made
        # Dense biases are rounded to the dtype, ours are not; on a GPU so may products be.
        allowed = {torch.float64: 1e-8, torch.float32: 1e-3}.get(expected.dtype, 0.05)
        off = float((found - expected).norm() / expected.norm().clamp_min(1e-9))
        if not off <= allowed:
            raise ValueError(
                f"offset_scores: {type(self).__name__} with the declared scores is off by "
                f"{off:.1%} of what its own code gives; are they these scores, with this sign and "
                "scale, and is there nothing else between the projections and the softmax "
                "(`project` can do it)?"
            )


def _check_mask(module: Any, mask: Any) -> None:
    if isinstance(mask, Tensor) and mask.is_floating_point() and mask.shape[-2] != 1:
        raise ValueError(
            f"attention_mask: {type(module).__name__} got {tuple(mask.shape)}, in which its scores "
            "may be already; expected (batch, 1, 1, keys)"
        )


def _projected(module: Any, hidden_states: Tensor) -> Projected:
    """Return BERT's queries, keys and values."""
    shape = (*hidden_states.shape[:2], module.num_attention_heads, -1)
    query, key, value = (
        linear(hidden_states).view(shape).transpose(1, 2)
        for linear in (module.query, module.key, module.value)
    )
    return query, key, value
