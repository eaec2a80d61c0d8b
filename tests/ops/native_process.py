"""Known calls in C++, on tensors of the CPU with a driver that does nothing: what autograd sees.

    python tests/ops/native_process.py

For test_native.py; prints the name of each check that holds. What the driver is given is compared
in call_process.py.
"""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tisa
from stubbed import stubbed
from tisa.ops import repeats
from tisa.ops.triton import native
from tisa.ops.triton.asking import _asked, ask

LENGTH = 256


def tensors(requires_grad=True):
    """Return query, key, value and scores."""
    qkv = [torch.randn(1, 2, LENGTH, 64).bfloat16() for _ in range(3)]
    return [t.requires_grad_(requires_grad) for t in (*qkv, torch.randn(2, 2 * LENGTH - 1))]


def call(given, **options):
    """Return the output of this backend."""
    return tisa.attention(*given, backend="triton", **options)


def told(given):
    """Return what `attention` tells C++ of such a call."""
    return (*given, None, None, 0.0, False, None, False, None, None, None, False, "triton")


def known(given):
    """Whether this very call is made in C++."""
    return repeats.native.attend(*told(given)) is not None


def no_graph_where_none_is_wanted(noted):
    """Without gradients the output is a leaf, with them it is not."""
    for _ in range(2):
        with torch.no_grad():
            assert not call(tensors()).requires_grad
        assert not call(tensors(False)).requires_grad
        assert call(tensors()).requires_grad
    assert known(tensors(False))
    assert known(tensors())


def gradients_lie_as_the_inputs(noted):
    """Gradients are of the inputs' shapes and dtypes, and accumulate in leaves."""
    given = tensors()
    for _ in range(3):
        call(given).sum().backward()
    for tensor in given:
        assert tensor.grad.shape == tensor.shape
        assert tensor.grad.dtype == tensor.dtype


def hooks_see_the_same_tensors(noted):
    """A checkpoint may run in Python first and in C++ afterwards, or the other way round."""
    seen = []
    for _ in range(2):
        shapes = []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t, to=shapes: to.append((t.shape, t.dtype)) or t, lambda t: t
        )
        given = tensors()
        native.switch(bool(seen), noted.library)
        call(tensors())
        with hooks:
            call(given).sum().backward()
        seen.append(shapes)
    assert seen[0] == seen[1]
    assert repeats.native.counts()[0] == 1
    native.switch(True, noted.library)
    for _ in range(3):
        checkpoint(lambda *x: call(x), *tensors(), use_reentrant=False).sum().backward()


def what_was_changed_is_refused(noted):
    """As everywhere in PyTorch: an input changed in place, a graph used twice."""
    given = tensors()
    moved = [t * 1 for t in given]
    out = call(moved)
    with torch.no_grad():
        moved[1].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    out = call(given)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="a second time"):
        out.sum().backward()


def a_second_derivative_is_refused(noted):
    """With the sentence that the operator has for it."""
    given = tensors()
    (first,) = torch.autograd.grad(call(given).sum(), given[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        first.sum().backward()


def nothing_is_kept_alive(noted):
    """Neither inputs nor outputs outlive their graph."""
    for _ in range(3):
        given = tensors()
        out = call(given)
        out.sum().backward()
        left = [weakref.ref(t) for t in (*given, out)]
        del given, out
        gc.collect()
        assert not any(one() is not None for one in left)


def other_calls_are_not_known(noted):
    """What Python must look at is not taken for what it has looked at."""
    given = tensors()
    assert known(given)

    class Other(torch.Tensor):
        pass

    assert not known([given[0].as_subclass(Other), *given[1:]])
    assert not known([given[0].detach().half(), *given[1:]])
    assert not known([given[0].transpose(0, 1).contiguous().transpose(0, 1)[:, :, 1:], *given[1:]])
    shifted = torch.randn(given[0].numel() + 1).bfloat16()[1:].view_as(given[0])
    assert not known([shifted, *given[1:]])
    assert repeats.native.attend(*told(given)[:-1], "auto") is None
    # Another type, though equal.
    assert repeats.native.attend(*told(given)[:7], 0, *told(given)[8:]) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert not known(given)
        call(given)
        assert known(given)
    with torch.autocast("cpu", torch.float16):
        assert not known(given)
    frozen = [t.detach() for t in given]
    call(frozen)
    assert known(frozen)
    seen = []
    torch.func.vmap(lambda q: seen.append(known([q, *frozen[1:]])) or q)(frozen[0][None])
    torch.func.grad(lambda q: seen.append(known([q, *frozen[1:]])) or q.sum())(frozen[0])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(frozen[0], frozen[1])
        seen.append(known([dual, *frozen[1:]]))
    assert seen == [False] * 3


def a_profiler_is_told_of_launches(noted):
    """Triton's hooks see every launch, so Triton makes it."""
    import triton

    def hook(*_):
        hooked.append(True)

    hooked = []
    triton.knobs.runtime.launch_enter_hook.add(hook)
    assert not known(tensors())
    triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert known(tensors())


def a_launch_that_fails_is_an_error(noted):
    """What the driver answers is not passed over."""
    noted.answer = 700
    with pytest.raises(RuntimeError, match="tisa: a launch failed, the driver says 700"):
        call(tensors())
    noted.answer = 0
    call(tensors())


def a_compiled_graph_takes_the_operator(noted):
    """While a graph is traced C++ is not asked."""
    before = repeats.native.counts()
    compiled = torch.compile(lambda *x: call(x), fullgraph=True, backend="eager")
    compiled(*tensors()).sum().backward()
    assert repeats.native.counts() == before


def asked(module, dtype=None):
    """Whether C++ knows what this module gives."""
    return ask(module, LENGTH, LENGTH, None, dtype) is not None


def a_module_that_has_changed_is_looked_at(noted):
    """What is kept of a module is forgotten when it is another one."""
    module = tisa.TISA(2)
    assert asked(module)
    before = _asked[module]
    assert asked(module)
    assert _asked[module] is before
    module.kernel_amplitudes = torch.nn.Parameter(torch.ones(2, 5, dtype=torch.float64))
    assert asked(module) is False
    other = tisa.NearFar(2, 2)
    assert asked(other)
    other.near.kernel_amplitudes = torch.nn.Parameter(torch.ones(2, 2))
    before = _asked[other]
    assert asked(other)
    assert _asked[other] is not before
    assert any(p is other.near.kernel_amplitudes for p in _asked[other].parameters)
    handle = other.register_forward_hook(lambda *_: None)
    assert not asked(other)
    handle.remove()
    assert asked(other)
    other.near.forward = lambda *_: None
    assert not asked(other)
    left = weakref.ref(other)
    del other
    gc.collect()
    assert left() is None
    # Of settings and attributes.
    table = tisa.T5Buckets(2)
    assert asked(table)
    before = _asked[table]
    table.eval()
    assert asked(table)
    assert _asked[table] is not before


def a_module_s_gradients_are_those_of_its_parameters(noted):
    """They accumulate, have no second derivative, and no graph where none is wanted."""
    module, given = tisa.TISA(2), tensors()[:3]
    for _ in range(3):
        call((*given, module)).sum().backward()
    for parameter in module.parameters():
        assert parameter.grad.shape == parameter.shape
    scores, band = ask(module, LENGTH, LENGTH, None, torch.bfloat16)
    assert scores.requires_grad
    assert scores.shape == (2, 2 * LENGTH - 1)
    assert (band.shape, band.dtype, band.requires_grad) == ((2, 2), torch.int32, False)
    with torch.no_grad():
        assert not ask(module, LENGTH, LENGTH, None, None)[0].requires_grad
    parameters = list(module.parameters())
    first = torch.autograd.grad(scores.sum(), parameters, create_graph=True)
    with pytest.raises(RuntimeError, match="scores made in C\\+\\+ have no second derivative"):
        first[0].sum().backward()
    seen = []
    torch.func.vmap(lambda x: seen.append(asked(module)) or x)(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(parameters[0].detach(), torch.ones(2, 5))
        seen.append(repeats.native.score(_scorer(module), [dual, *parameters[1:]]) is not None)
    assert seen == [False] * 2


def _scorer(module):
    return next(iter(_asked[module].scorers.values()))[0]


def what_lies_badly_is_repeated_in_python(noted):
    """An address that C++ does not take (scores of many layers, odd heads) is no slower for it."""
    given = tensors()
    given[3] = torch.randn(given[3].numel() + 1)[1:].view_as(given[3]).requires_grad_()
    checked = repeats.keep
    kept = []
    repeats.keep = lambda *x: kept.append(True) or checked(*x)
    try:
        for _ in range(4):
            call(given).sum().backward()
    finally:
        repeats.keep = checked
    assert not known(given)
    assert len(kept) == 2


def each_call_draws_a_seed(noted):
    """As calls in Python do, from the same generator; a backward pass has its call's."""

    def drawn():
        torch.manual_seed(0)
        for _ in range(2):
            call(tensors(), dropout_p=0.1).square().sum().backward()
        return torch.get_rng_state()

    for _ in range(3):
        after = drawn()
    before = repeats.native.counts()
    assert drawn().equal(after)
    known, _, passes, _ = (a - b for a, b in zip(repeats.native.counts(), before, strict=True))
    assert (known, passes) == (2, 2)
    native.switch(False)
    assert drawn().equal(after)
    native.switch(True, noted.library)


CHECKS = (
    each_call_draws_a_seed,
    what_lies_badly_is_repeated_in_python,
    no_graph_where_none_is_wanted,
    gradients_lie_as_the_inputs,
    hooks_see_the_same_tensors,
    what_was_changed_is_refused,
    a_second_derivative_is_refused,
    nothing_is_kept_alive,
    other_calls_are_not_known,
    a_profiler_is_told_of_launches,
    a_launch_that_fails_is_an_error,
    a_compiled_graph_takes_the_operator,
    a_module_that_has_changed_is_looked_at,
    a_module_s_gradients_are_those_of_its_parameters,
)

if __name__ == "__main__":
    with stubbed() as noted:
        assert native.switch(True, noted.library), native.state
        for check in CHECKS:
            check(noted)
            print(check.__name__, flush=True)
