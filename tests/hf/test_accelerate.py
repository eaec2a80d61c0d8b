"""Distillation through `accelerate`, which takes it to several processes and devices."""

import os
import socket
from types import SimpleNamespace

import pytest
import torch

import tisa.hf
from tiny import original, token_lists
from tisa.hf.calibration import tokens_of
from tisa.hf.distillation_loss import batches_by, loss_of
from tisa.hf.distillation_state import State
from tisa.parameters import is_score


def test_distilling_through_accelerate_is_the_same():
    accelerate = pytest.importorskip("accelerate", reason="comes with tisa[hf]")
    model, tokens = original("bert"), token_lists(12)

    def run(**more):
        torch.manual_seed(3)
        made = tisa.hf.convert(model, positions="replace", init="reference", calibration=tokens)
        losses = tisa.hf.distil(made, model, tokens, steps=3, progress=lambda told: None, **more)
        return losses, made

    alone, first = run()
    accelerator, clipped = accelerate.Accelerator(cpu=True), []
    clip = accelerator.clip_grad_norm_
    # Through accelerate, which knows the scale that float16 gives to gradients.
    accelerator.clip_grad_norm_ = lambda *args: clipped.append(args) or clip(*args)
    together, second = run(accelerator=accelerator)
    assert alone == together
    # One step with each of three rates first.
    assert len(clipped) == 3 + 3
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def beginning():
    model, tokens = original("bert"), token_lists(12)
    torch.manual_seed(3)
    made = tisa.hf.convert(model, positions="replace", init="reference", calibration=tokens)
    return made, model, tokens


def in_one_of_two(rank, port, folder):
    """Distil together with another process, and write what came out here."""
    import accelerate

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )  # fmt: skip
    accelerator = accelerate.Accelerator(cpu=True)
    assert (accelerator.num_processes, accelerator.process_index) == (2, rank)
    given = beginning()
    file = folder / f"checkpoint-{rank}.pt"
    settings = dict(
        batch_tokens=60, mask_token_id=5, accelerator=accelerator, progress=lambda told: None
    )
    losses = tisa.hf.distil(*given, steps=3, checkpoint=file, check=False, **settings)
    assert file.exists() == (rank == 0)
    assert all(p.requires_grad for p in given[0].parameters())
    torch.save((losses, given[0].state_dict()), folder / f"trained-{rank}.pt")
    with pytest.raises(ValueError, match="not every process finds the same checkpoint"):
        tisa.hf.distil(*given, steps=4, checkpoint=file, check=False, **settings)
    # Each has a clock of its own, and one of them goes fast.
    ticks = iter(range(10**6))
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) * (40.0 if rank else 0.1))
    tisa.hf.distil.__globals__["time"] = clock
    given = beginning()
    losses = tisa.hf.distil(*given, steps=30, minutes=0.02, **settings)
    torch.save((losses, given[0].state_dict()), folder / f"timed-{rank}.pt")
    torch.distributed.destroy_process_group()
    # As in test_triton_traced.py: Gloo's threads outlive their group.
    os._exit(0)


# lab/tests/test_pretrain_processes.py has two processes in the small form.
@pytest.mark.full
def test_two_processes_train_one_model(tmp_path):
    pytest.importorskip("accelerate", reason="comes with tisa[hf]")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(in_one_of_two, (port, tmp_path), nprocs=2)
    found = {}
    for what in ("trained", "timed"):
        (losses, first), (others, second) = (
            torch.load(tmp_path / f"{what}-{rank}.pt") for rank in (0, 1)
        )
        assert losses == others
        assert all(torch.equal(first[name], second[name]) for name in first)
        found[what] = losses, first
    assert 2 <= len(found["timed"][0]) < 30
    # A step is the mean over two batches that follow each other.
    made, model, tokens = beginning()
    batches = batches_by(tokens_of(tokens, model), model, 0, 60, False)
    trained = {n: p for n, p in made.named_parameters() if is_score(n)}
    state = State(trained, 0.05, 0.002, None, {})
    for step in range(3):
        state.rate(1 - step / 3)
        parts = [
            loss_of(made, model, batches[turn % len(batches)], 5,
                  torch.Generator().manual_seed(turn), 1.0)
            for turn in (2 * step, 2 * step + 1)
        ]  # fmt: skip
        loss = sum(parts) / 2
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        state.advance(float(loss.detach()), 0.0)
    losses, weights = found["trained"]
    assert losses == pytest.approx(state.losses, rel=1e-4)
    for name, parameter in trained.items():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-3, atol=1e-4)
