"""Distillation through `accelerate`, which takes it to several processes and devices."""

import pytest
import torch

import tisa.hf
from tiny import original, token_lists


def test_distilling_through_accelerate_is_the_same():
    accelerate = pytest.importorskip("accelerate", reason="comes with tisa[hf]")
    model, tokens = original("bert"), token_lists(12)

    def run(**more):
        torch.manual_seed(3)
        made = tisa.hf.convert(model, positions="replace", init="reference", calibration=tokens)
        losses = tisa.hf.distil(made, model, tokens, steps=3, progress=lambda told: None, **more)
        return losses, made

    alone, first = run()
    together, second = run(accelerator=accelerate.Accelerator(cpu=True))
    assert alone == together
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
