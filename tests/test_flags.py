"""A flag is True or False wherever there is one: "no" would be taken as true."""

import pytest
import torch

import tisa
import tisa.hf
from tisa.hf.folder import convert_folder
from tisa.ops import repeats
from tisa.ops.ring import Ring, ring_attention
from tisa.positions import PositionConfig

pytestmark = pytest.mark.unchecked
TAKE_FLAGS = {
    "Ring": (lambda **flag: Ring(8, **flag), ["balanced"]),
    "ring_attention": (
        lambda **flag: ring_attention(*[torch.ones(1, 1, 4, 8)] * 3, None, None, **flag),
        ["is_causal", "enable_gqa"],
    ),
    "SelfAttention": (lambda **flag: tisa.SelfAttention(8, 2, **flag), ["is_causal"]),
    "T5Buckets": (tisa.T5Buckets, ["bidirectional"]),
    "PositionConfig": (PositionConfig, ["is_causal"]),
    "TransformerConfig": (tisa.TransformerConfig, ["is_causal", "share_layers"]),
    "convert": (lambda **flag: tisa.hf.convert(None, **flag), ["fold", "shared"]),
    "convert_folder": (
        lambda **flag: convert_folder("from", "to", **flag),
        ["fold", "shared", "measured"],
    ),
    "distil": (lambda **flag: tisa.hf.distil(None, None, [], **flag), ["by_length", "check"]),
}


@pytest.mark.parametrize("wrong", ["no", 1, None, torch.tensor(False)], ids=str)
@pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for owner, (_, names) in TAKE_FLAGS.items() for name in names]
)
def test_what_is_no_boolean_is_refused(owner, name, wrong):
    with pytest.raises(TypeError, match=f"^{owner}: {name} must be True or False, got .*; pass"):
        TAKE_FLAGS[owner][0](**{name: wrong})


def test_a_call_with_1_is_no_repeat_of_one_with_true():
    tensors = [torch.ones(1, 1, 4, 8)] * 3 + [None] * 3
    first, second, again = (repeats.signature(*tensors, flag) for flag in (True, 1, True))
    assert first == again
    assert first != second
