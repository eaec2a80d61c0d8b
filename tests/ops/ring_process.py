"""What each process of a ring does in test_ring.py; started by torchrun."""

import itertools
import os

import pytest
import torch
import torch.distributed as dist

import tisa
from tisa.ops.ring import Ring, ring_attention
from tisa.transformer import LanguageModel, TransformerConfig

LENGTH = 24


def close(found, wanted, what):
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4, msg=lambda m: f"{what}: {m}")


def summed(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def operator(is_causal, balanced, key_heads, banded, dtype, keyed=False):
    torch.manual_seed(0)
    scoring = tisa.TISA(4)
    for p in scoring.parameters():
        torch.nn.init.normal_(p, 1.0, 1.0)
    whole = [torch.randn(2, heads, LENGTH, 8, dtype=dtype) for heads in (4, key_heads, key_heads)]
    weight = torch.randn(2, 4, LENGTH, 8, dtype=dtype)
    ring = Ring(LENGTH, balanced=balanced)
    band = scoring.support(1e-6) if banded else None
    how = dict(is_causal=is_causal, enable_gqa=key_heads != 4, band=band)
    if keyed:
        whole.append(-torch.randn(2, 4, LENGTH, dtype=dtype).sigmoid().log().cumsum(-1))
    mine = [ring.shard(x, 2).requires_grad_() for x in whole]
    whole = [x.requires_grad_() for x in whole]
    of_keys = {"key_scores": whole[3]} if keyed else {}
    expected = tisa.attention(*whole[:3], scoring(LENGTH), **how, **of_keys)
    (expected * weight).sum().backward()
    wanted = {name: p.grad.clone() for name, p in scoring.named_parameters()}
    scoring.zero_grad()
    of_keys = {"key_scores": mine[3]} if keyed else {}
    found = ring_attention(*mine[:3], scoring(LENGTH), ring, **how, **of_keys)
    close(found, ring.shard(expected, 2), "output")
    (found * ring.shard(weight, 2)).sum().backward()
    for name, a, b in zip((*"qkv", "key scores")[: len(mine)], mine, whole, strict=True):
        close(a.grad, ring.shard(b.grad, 2), name)
    for name, p in scoring.named_parameters():
        close(summed(p.grad), wanted[name], name)


def model(position, is_causal, balanced):
    torch.manual_seed(0)
    made = LanguageModel(
        TransformerConfig(vocab_size=11, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                          max_position_embeddings=LENGTH, position=position, is_causal=is_causal)
    )  # fmt: skip
    for p in made.parameters():
        torch.nn.init.normal_(p, 0.1, 0.3)
    ids, weight = torch.randint(11, (2, LENGTH)), torch.randn(2, LENGTH, 11)
    ring = Ring(LENGTH, balanced=balanced)
    expected = made(ids)
    (expected * weight).sum().backward()
    wanted = {name: p.grad.clone() for name, p in made.named_parameters()}
    made.zero_grad()
    found = made(ring.shard(ids, 1), ring=ring)
    close(found, ring.shard(expected, 1), position)
    (found * ring.shard(weight, 1)).sum().backward()
    for name, p in made.named_parameters():
        torch.testing.assert_close(summed(p.grad), wanted[name], atol=2e-4, rtol=1e-3)


def autocasting():
    torch.manual_seed(0)
    whole, vector = torch.randn(3, 1, 2, LENGTH, 8), torch.randn(2, 2 * LENGTH - 1)
    ring = Ring(LENGTH)
    mine = [ring.shard(x, 2).requires_grad_() for x in whole]
    with torch.autocast("cpu", torch.bfloat16):
        found = ring_attention(*mine, vector, ring)
        expected = tisa.attention(*whole, vector)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, ring.shard(expected, 2), atol=0.02, rtol=0.02)
    found.sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in mine)


def second_derivative():
    ring = Ring(LENGTH)
    query, *others = torch.randn(3, 1, 2, LENGTH // ring.processes, 8).unbind()
    query.requires_grad_()
    loss = ring_attention(query, *others, None, ring).square().sum()
    (gradient,) = torch.autograd.grad(loss, query, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()


def refusals():
    ring = Ring(LENGTH)
    part = torch.randn(1, 2, LENGTH // ring.processes, 8)
    shaw = LanguageModel(TransformerConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1,
                                           num_attention_heads=2, position="shaw"))  # fmt: skip
    ids = torch.zeros(1, LENGTH // ring.processes, dtype=torch.long)
    for wrong, message in (
        (lambda: Ring(LENGTH + 1), f"multiple of {dist.get_world_size()}"),
        (lambda: Ring(LENGTH + 1, balanced=True), f"multiple of {2 * dist.get_world_size()}"),
        (lambda: ring.shard(part, 2), "24 tokens along dim 2"),
        (lambda: ring_attention(part[..., 1:, :], part, part, None, ring), "query must be"),
        (lambda: ring_attention(part, part, part, torch.zeros(2, 23), ring), "whole sequence, 47"),
        (
            lambda: ring_attention(
                part, part, part, None, ring, key_scores=torch.zeros(1, 2, LENGTH)
            ),
            "key_scores must be",
        ),
        (lambda: shaw(ids, ring=ring), "cannot be used with a ring"),
        (lambda: shaw(ids, ring=ring, attention_mask=ids), "attention_mask must be None"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for is_causal, balanced in itertools.product((False, True), repeat=2):
        operator(is_causal, balanced, 4, False, torch.float32)
    operator(True, True, 2, True, torch.float32)
    operator(False, False, 4, False, torch.float64, keyed=True)
    operator(True, True, 2, False, torch.float32, keyed=True)
    for position, is_causal in (("tisa", False), ("rotary", True), ("near-far", True),
                                ("absolute", False), ("t5", True)):  # fmt: skip
        model(position, is_causal, balanced=is_causal)
    autocasting()
    second_derivative()
    refusals()
    print(f"rank {dist.get_rank()}: all as it should be", flush=True)
    dist.destroy_process_group()
    os._exit(0)  # As in test_triton_traced.py: Gloo's threads outlive their group.


if __name__ == "__main__":
    main()
