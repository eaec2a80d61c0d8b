"""Calls as they are remembered beside the same calls launched by Triton's own means.

    python tests/ops/call_process.py [name of a call …] Python,C++

For test_launch.py. Prints one line for each call that gives the driver the same, whatever its
gradients, wherever its tensors lie; stops at the first that does not.
"""

import contextlib
import sys

import torch

import tisa
from stubbed import Launched, stubbed
from tisa.ops import repeats
from tisa.ops.triton import launching, native

LENGTH, HEADS, WIDTH = 256, 2, 64
CALLS = {
    "band": {},
    "short": {"length": 100},
    "no scores": {"scores": False, "band": False, "options": {"is_causal": True}},
    "mask": {"mask": True, "band": False},
    "module": {"module": lambda: tisa.TISA(HEADS), "length": 300},
    "module without a band": {"module": lambda: tisa.NearFar(HEADS, 2), "length": 600},
    "module with a band that never changes": {
        "module": lambda: tisa.T5Buckets(HEADS),
        "length": 300,
    },
    "decoding": {"queries": 1, "length": 1024},
    "dropout": {"options": {"dropout_p": 0.1}},
    "dropout, short": {"length": 100, "mask": True, "options": {"dropout_p": 0.5}},
}
# Which of query, key, value and scores have a gradient.
NEEDS = [(True,) * 4, (True, False, False, True), (False, True, False, False), (False,) * 4]


def drawn(call):
    """Return query, key, value, scores and what else a call is given, in memory of their own."""
    length = call.get("length", LENGTH)
    queries = call.get("queries", length)

    def projected(rows):
        # As a projection leaves it: (batch, length, heads, dim).
        return torch.randn(2, rows, HEADS, WIDTH).bfloat16().transpose(1, 2)

    options = dict(call.get("options", {}))
    if "module" in call:
        return [projected(queries), projected(length), projected(length)], options
    if call.get("band", True):
        options["band"] = torch.tensor([[-20, 5]] * HEADS, dtype=torch.int32)
    if call.get("mask"):
        options["attn_mask"] = torch.rand(2, 1, 1, length) > 0.3
    scores = torch.randn(HEADS, queries + length - 1) if call.get("scores", True) else None
    return [projected(queries), projected(length), projected(length), scores], options


def moved():
    """Keep what is saved for the backward pass elsewhere, and in another order."""

    # All alive until the end of the step, lest something else comes to lie there.
    alive = []

    def pack(tensor):
        alive.append((tensor, tensor.detach().clone(memory_format=torch.contiguous_format)))
        return len(alive) - 1

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda number: alive[number][1])


def step(noted, call, needs, hooks):
    """Return what the driver was given, every address by what lies there."""
    tensors, options = drawn(call)
    leaves = [
        t if t is None else t.requires_grad_(need) for t, need in zip(tensors, needs, strict=False)
    ]
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    given = leaves
    if "module" in call:
        module = call["module"]().requires_grad_(needs[3])
        # What is kept of a module is found the second time.
        given = [*leaves, module]
        wanted += [p for p in module.parameters() if p.requires_grad]
        tisa.attention(*(t.detach() for t in leaves), module, backend="triton")
    upstream = torch.randn_like(tensors[0])
    noted.launches.clear()
    with hooks():
        out = tisa.attention(*given, **options, backend="triton")
    # What was saved stays, too.
    found = torch.autograd.grad(out, wanted, upstream, retain_graph=True) if wanted else ()
    # Kept, lest something else comes to lie there.
    kept = [*leaves, *options.values(), out, upstream, *found]
    if "module" in call:
        count = len(list(module.parameters()))
        gradient = found[len(wanted) - count] if needs[3] else None
        wired(noted.launches, gradient)
        kept = kept[:-count] if needs[3] else kept
    places = {t.data_ptr(): f"tensor {i}" for i, t in enumerate(kept) if torch.is_tensor(t)}
    return [named(launch, places, "module" in call) for launch in noted.launches]


def wired(launches, gradient):
    """Check of a module's launches that each reads what another has written."""
    scores, *others = launches
    forward = next(launch for launch in others if len(launch.parameters) > 20)
    assert pointers(scores)[-1] in forward.parameters
    if forward is not others[0]:
        numbers, band = pointers(others[0])
        assert band in forward.parameters
        # In Python they are put in a row a second time.
        assert repeats.native is None or numbers == pointers(scores)[0]
    if gradient is not None:
        *_, entries, last = others
        came, sums = pointers(last)[-2:]
        # In Python autograd copies the gradient on its way.
        assert repeats.native is None or came in entries.parameters
        # What is left by several blocks is added up elsewhere.
        assert last.sizes[1] > 1 or int.from_bytes(sums, "little") == gradient.data_ptr()


def pointers(launch):
    """Return the addresses among a launch's parameters."""
    return [x for x in launch.parameters if len(x) == 8 and int.from_bytes(x, "little") >= 1 << 32]


def named(launch: Launched, places, wired):
    """Return a launch whose addresses are names; those not known are numbered as they appear.

    Not those of a module's launches (`wired`), where memory is used again in one way or another.
    """

    def name(value: bytes):
        number = int.from_bytes(value[:8], "little")
        if len(value) < 8 or number < 1 << 32:
            return value
        if wired:
            return places.get(number, "memory"), value[8:]
        return places.setdefault(number, f"memory {len(places)}"), value[8:]

    return launch._replace(parameters=[name(value) for value in launch.parameters])


def compare(noted, name, ways):
    """Make a call by Triton's own means, then again and again as it is remembered."""
    for needs in NEEDS:
        if name == "decoding" and any(needs):
            continue
        for hooks in (contextlib.nullcontext, moved) if any(needs) else (contextlib.nullcontext,):
            launching.compiles = lambda device: False
            expected = step(noted, CALLS[name], needs, hooks)
            assert expected
            launching.compiles = lambda device: True
            for way in ways:
                native.switch(way == "C++", noted.library)
                for turn in range(4):
                    found = step(noted, CALLS[name], needs, hooks)
                    for launch, other in zip(found, expected, strict=True):
                        assert launch == other, (name, needs, hooks, way, turn, launch, other)
                if way == "C++":
                    assert native.state == "on", native.state
                    # The first call is not known, nor the first backward pass of one that is; what
                    # hooks have put elsewhere is not looked for.
                    known = [3, 1, *((2, 1) if any(needs) and hooks is not moved else (0, 0))]
                    found = repeats.native.counts()
                    assert found == known or "module" in name, (name, needs, hooks, found)
                    assert found[0] >= 3
    assert not launching.long_way, launching.long_way
    print(name, flush=True)


if __name__ == "__main__":
    *names, ways = sys.argv[1:]
    with stubbed() as noted:
        for name in names or CALLS:
            compare(noted, name, ways.split(","))
