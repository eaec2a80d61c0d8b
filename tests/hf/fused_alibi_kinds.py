"""Tiny random models with ALiBi in attention code of their own, and stock code that rounds less."""

import copy
from functools import cache

import torch
import transformers
from torch.overrides import TorchFunctionMode

import tisa.hf

SIZES = dict(vocab_size=60, pad_token_id=0, eos_token_id=1, bos_token_id=2)
FALCON = dict(
    **SIZES, hidden_size=32, num_hidden_layers=2, alibi=True, parallel_attn=False, bias=True,
    multi_query=False, new_decoder_architecture=False,
)  # fmt: skip


def bloom(heads=4, **changes):
    """Return a small BLOOM."""
    values = {**SIZES, "hidden_size": 8 * heads, "n_layer": 2, "n_head": heads, **changes}
    return transformers.BloomForCausalLM(transformers.BloomConfig(**values))


def mpt(heads=4, **changes):
    """Return a small MPT."""
    values = {"d_model": 8 * heads, "n_layers": 2, "n_heads": heads, "max_seq_len": 128, **changes}
    return transformers.MptForCausalLM(transformers.MptConfig(**SIZES, **values))


def falcon(heads=4, **changes):
    """Return a small Falcon with ALiBi."""
    values = {**FALCON, "hidden_size": 8 * heads, "num_attention_heads": heads, **changes}
    return transformers.FalconForCausalLM(transformers.FalconConfig(**values))


KINDS = {
    "bloom": bloom,
    "mpt": mpt,
    "falcon": falcon,
    # Of head counts that are no power of two, and heads that share keys.
    "bloom of 6": lambda: bloom(6),
    "mpt of 6": lambda: mpt(6),
    "falcon of 6": lambda: falcon(6),
    "falcon, one key head": lambda: falcon(multi_query=True, parallel_attn=True),
    "falcon, two key heads": lambda: falcon(
        new_decoder_architecture=True, num_kv_heads=2, parallel_attn=True
    ),
}
FEW = ("bloom", "mpt", "falcon")


class Unrounded(TorchFunctionMode):
    """Stock code in float64 without what it rounds to float32 and bfloat16 in between."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        wide = any(isinstance(a, torch.Tensor) and a.dtype == torch.float64 for a in args)
        if function is torch.Tensor.bfloat16 or (function is torch.Tensor.float and wide):
            return args[0]
        if function is torch.nn.functional.softmax and wide:
            kwargs.pop("dtype", None)
        return function(*args, **kwargs)


def stock(kind, dtype=torch.float64):
    """Return a tiny model in which positions and attention matter."""
    return copy.deepcopy(_made(kind)).to(dtype)


@cache
def _made(kind):
    torch.manual_seed(0)
    model = KINDS[kind]().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8.0) if p.ndim == 2 else p.add_(0.1 * torch.randn_like(p))
    return model


def both(kind, dtype=torch.float64):
    """Return a stock model and a fused one of the same weights."""
    return stock(kind, dtype), tisa.hf.fuse(stock(kind, dtype))


def inputs(padding="none", batch=3, length=37):
    """Return tokens of which some are padding, and labels of those that are none."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    if padding in ("right", "left"):
        mask[-2, slice(length - 7, None) if padding == "right" else slice(0, 7)] = 0
        mask[-1, slice(length - 2, None) if padding == "right" else slice(0, 2)] = 0
    if padding == "holes":
        mask[0, 3:6] = mask[0, 11] = 0
        mask[1, :4] = mask[1, 9:20] = mask[1, -2:] = 0
    real = mask.bool()
    # A token after padding tells its first token, which sees nothing, no loss.
    seen = real & torch.cat((real[:, :1], real[:, :-1]), -1)
    return {
        "input_ids": ids.masked_fill(~real, 0),
        "attention_mask": mask,
        "labels": ids.masked_fill(~seen, -100),
    }


def answer(model, given, **options):
    """Return the logits of what is no padding, and the loss."""
    with Unrounded():
        made = model(**given, **options)
    return made.logits[given["attention_mask"].bool()], made.loss


def gradients(model, given):
    """Return the gradients of every parameter of a training step."""
    model.zero_grad(set_to_none=True)
    answer(model, given)[1].backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(got, expected, name="", allowed=1e-9):
    """Compare numbers that were summed up in another order."""
    assert got.shape == expected.shape, name
    assert got.dtype == expected.dtype, name
    scale = expected.abs().max().clamp_min(1e-3)
    worst = ((got - expected).abs().max() / scale).item()
    allowed = allowed if got.dtype == torch.float64 else 1e-4
    assert worst < allowed, f"{name}: {worst:.1e} of the largest number"
