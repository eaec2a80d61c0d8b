"""Tiny random models with scores of the offset from birth, and what is asked of all.

In float64, where another order of sums changes no token, no expert and no side of a ReLU.
"""

import copy
from functools import cache

import torch
import transformers

import tisa

T5 = dict(
    vocab_size=60, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4, dropout_rate=0.0,
    decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, bos_token_id=2,
)  # fmt: skip
PIX2STRUCT = dict(
    vocab_size=60, hidden_size=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4, dropout_rate=0.0,
    decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, is_encoder_decoder=False,
    initializer_range=0.02,
)  # fmt: skip
SWITCH = dict(
    num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_experts=2, expert_capacity=64,
    router_jitter_noise=0.0, num_decoder_layers=2,
)  # fmt: skip

# Encoder and decoder.
PAIRS = {
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
    "flan": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    ),
    "mt5": lambda: transformers.MT5ForConditionalGeneration(transformers.MT5Config(**T5)),
    "umt5": lambda: transformers.UMT5ForConditionalGeneration(transformers.UMT5Config(**T5)),
    "switch": lambda: transformers.SwitchTransformersForConditionalGeneration(
        transformers.SwitchTransformersConfig(**T5, **SWITCH)
    ),
}
ENCODERS = {
    "t5 encoder": lambda: transformers.T5EncoderModel(transformers.T5Config(**T5)),
    "mt5 encoder": lambda: transformers.MT5EncoderModel(transformers.MT5Config(**T5)),
    "umt5 encoder": lambda: transformers.UMT5EncoderModel(transformers.UMT5Config(**T5)),
    "t5 tokens": lambda: transformers.T5ForTokenClassification(
        transformers.T5Config(**T5, num_labels=3)
    ),
}
# Attend to what is not text: music, and pictures.
OTHERS = {
    "pop2piano": lambda: transformers.Pop2PianoForConditionalGeneration(
        transformers.Pop2PianoConfig(**T5)
    ),
    "pix2struct": lambda: transformers.Pix2StructTextModel(
        transformers.Pix2StructTextConfig(**PIX2STRUCT)
    ),
}
KINDS = PAIRS | ENCODERS | OTHERS


def stock(kind, dtype=torch.float64):
    """Return a tiny model in which positions and attention matter."""
    return copy.deepcopy(_made(kind)).to(dtype)


@cache
def _made(kind):
    torch.manual_seed(0)
    model = KINDS[kind]().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "relative_attention_bias" in name:
                p.normal_(0.0, 2.0)
            elif p.ndim == 2 and "router" not in name:
                p.mul_(2.0 if any(part in name for part in (".q.", ".k.", "query", "key")) else 1.5)
    return model


def both(kind, dtype=torch.float64):
    """Return a stock model and a fused one of the same weights."""
    return stock(kind, dtype), tisa.hf.fuse(stock(kind, dtype))


def inputs(kind, padding="none", batch=3, length=37, targets=9):
    """Return inputs of which some tokens are padding, to the right or to the left."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (batch, length), generator=generator)
    labels = torch.randint(3, 60, (batch, targets), generator=generator)
    mask = torch.ones_like(ids)
    if padding != "none":
        hidden = slice(length - 7, None) if padding == "right" else slice(0, 7)
        mask[1, hidden] = 0
        ids[1, hidden] = 0
        labels[-1, -3:] = -100
    if padding == "holes":
        mask[0, 3:6] = 0
    if kind == "pop2piano":
        features = torch.randn(batch, length, 32, generator=generator)
        return {"input_features": features, "attention_mask": mask, "labels": labels}
    if kind == "pix2struct":
        seen = torch.randn(batch, 5, 32, generator=generator)
        return {"input_ids": ids, "attention_mask": mask, "encoder_hidden_states": seen}
    if kind in ENCODERS:
        return {"input_ids": ids, "attention_mask": mask}
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def answer(model, given):
    """Return the output that a loss is made of, and that loss."""
    given = {k: v.to(model.dtype) if v.is_floating_point() else v for k, v in given.items()}
    made = model(**given)
    out = made.logits if "logits" in made else made.last_hidden_state
    if made.get("loss") is not None:
        return out, made.loss
    # Of the tokens that are none, stock code makes something, too; nobody reads it. Squares would
    # have no gradient: a norm is the last thing that stands before them.
    out = out * given["attention_mask"].unsqueeze(-1)
    drawn = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    return out, (out * drawn).mean()


def gradients(model, given):
    """Return the gradients of every parameter of a training step."""
    model.zero_grad(set_to_none=True)
    answer(model, given)[1].backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(got, expected, name=""):
    """Compare numbers of one dtype that were summed up in another order."""
    scale = expected.abs().max().clamp_min(1e-3)
    assert got.shape == expected.shape, name
    assert got.dtype == expected.dtype, name
    worst = ((got - expected).abs().max() / scale).item()
    # T5's norm rounds to float32 in between.
    allowed = 1e-8 if got.dtype == torch.float64 else 1e-4
    assert worst < allowed, f"{name}: {worst:.1e} of the largest number"
