"""The kernels as operators of PyTorch: forward, backward, what they return, how they differentiate.

`tisa::triton_forward` and `tisa::triton_backward` are what a compiled graph, a checkpoint's policy
or a fake tensor sees. In plain eager code the same two functions run inside an autograd.Function,
which gets there in half the time.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tisa.ops.call import likeness, needs_gradient, plain
from tisa.ops.dropout import drawn_seed
from tisa.ops.repeats import Repeat
from tisa.ops.schema import refuse_second_derivative, schema_of
from tisa.ops.triton import native, plan, plan_backward
from tisa.ops.triton.launching import Shape, known, launch, layout
from tisa.ops.triton.plan_backward import Gradients, Needs, Upstream
from tisa.ops.triton.problem import (
    TRAINED,
    Inputs,
    Problem,
    loadable,
    loadable_keys,
    statistics_shape,
)

Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Prepared(NamedTuple):
    """The inputs as the kernels can read them, and what is remembered of calls with them."""

    inputs: Inputs
    known: Shape


def prepared(inputs: Inputs) -> Prepared:
    """Return the inputs, copied where a descriptor could not read them as they lie."""
    packed = inputs.cu_seqlens is not None
    inputs = inputs._replace(
        query=loadable(inputs.query),
        key=loadable(inputs.key),
        value=loadable(inputs.value),
        scores=None if inputs.scores is None else inputs.scores.contiguous(),
        key_scores=None if inputs.key_scores is None else loadable_keys(inputs.key_scores, packed),
        band=None if inputs.band is None else inputs.band.contiguous(),
    )
    numbers = (inputs.numbers, inputs.query.device.index, torch.get_float32_matmul_precision())
    return Prepared(inputs, known(inputs.tensors, *numbers))


def run_forward(ready: Prepared, *, inference: bool) -> tuple[Tensor, Tensor]:
    """Return the output and, for each query, the logarithm of its sum of weights to base 2."""
    inputs = ready.inputs
    what, written = _written(ready, inference)
    output, statistics, scratch = written

    def made() -> list[plan.Launch]:
        problem = Problem(inputs)
        if scratch is not None:
            return plan.decode(problem, output, statistics, scratch)
        return plan.forward(problem, output, statistics)

    launch(ready.known, what, inputs.tensors, written, made, output.device)
    return output, statistics


def _written(ready: Prepared, inference: bool) -> tuple[str, tuple[Tensor, Tensor, Tensor | None]]:
    """Return which forward pass it is, and new tensors for what it writes, scratch memory last."""
    inputs = ready.inputs
    outputs = _new_outputs(inputs.query, inputs.value, inputs.cu_seqlens)
    if inference and inputs.query.shape[-2] <= 64:
        size = _size(ready, "decode", lambda: plan.decode_numbers(Problem(inputs)))
        if size:
            return "decode", (*outputs, _scratch(ready, size))
    return "forward", (*outputs, None)


def _scratch(ready: Prepared, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.float32, device=ready.inputs.query.device)


def run_backward(ready: Prepared, upstream: Upstream, needs: Needs, *, whole: bool = True) -> Five:
    """Return the gradients; one that is not needed is an empty tensor.

    Not `whole`: these are not all of the keys that the output is made of.
    """
    inputs = ready.inputs
    computed = computed_with(needs)
    upstream = Upstream(
        loadable(upstream.grad_output), upstream.grad_statistics, loadable(upstream.output),
        upstream.statistics,
    )  # fmt: skip
    gradients, scratch = _written_backward(ready, needs)

    def made() -> list[plan.Launch]:
        wanted = Gradients(*(g if c else None for g, c in zip(gradients, computed, strict=True)))
        return plan_backward.backward(Problem(inputs), upstream, wanted, scratch, whole=whole)

    others = (*upstream, *gradients, scratch)
    what = _backward(upstream, needs)
    what = what if whole else ("part", what)
    launch(ready.known, what, inputs.tensors, others, made, scratch.device)
    return gradients


def _backward(upstream: Upstream, needs: Needs) -> Hashable:
    """Return which backward pass it is."""
    # They may lie in any way; the rest is as the inputs make it.
    return computed_with(needs), layout(upstream.grad_output), layout(upstream.grad_statistics)


def _written_backward(ready: Prepared, needs: Needs) -> tuple[Five, Tensor]:
    """Return new tensors for what a backward pass writes: gradients and scratch memory."""
    computed = computed_with(needs)
    inputs = ready.inputs
    size = _size(ready, computed, lambda: plan_backward.scratch_numbers(Problem(inputs), computed))
    return _new_gradients(inputs, needs), _scratch(ready, size)


def _size(ready: Prepared, what: Hashable, count: Callable[[], int]) -> int:
    """Return how many numbers of scratch memory are needed, counted once."""
    sizes = ready.known.sizes
    found = sizes.get(what)
    if found is None:
        found = sizes[what] = count()
    return found


def _new_outputs(query: Tensor, value: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    output = _like(query, cu_seqlens, value.shape[-1])
    shape = statistics_shape(query, cu_seqlens)
    return output, query.new_empty(shape, dtype=torch.float32)


def _like(tensor: Tensor, cu_seqlens: Tensor | None, width: int) -> Tensor:
    if width == tensor.shape[-1]:
        # As the input lies, so that what follows (a transpose back, mostly) is free.
        new = torch.empty_like(tensor)
    else:
        new = tensor.new_empty(*tensor.shape[:-1], width)
    # Tokens after the last packed sequence belong to no program.
    return new if cu_seqlens is None else new.zero_()


def computed_with(needs: Needs) -> Needs:
    """Return which gradients are computed: those of keys, values and keys' scores come together."""
    query, key, value, scores, key_scores = needs
    keys = key or value or key_scores
    return query, keys, keys, scores, key_scores


def _new_gradients(inputs: Inputs, needs: Needs) -> Five:
    query, key, value, scores, key_scores = computed_with(needs)
    # An operator cannot return "no tensor"; an empty one stands for it.
    none = inputs.query.new_empty
    ends = inputs.cu_seqlens
    return (
        _like(inputs.query, ends, inputs.query.shape[-1]) if query else none(0),
        _like(inputs.key, ends, inputs.key.shape[-1]) if key else none(0),
        _like(inputs.value, ends, inputs.value.shape[-1]) if value else none(0),
        inputs.scores.new_empty(inputs.scores.shape)
        if scores and inputs.scores is not None
        else none(0),
        _new_of_keys(inputs.key_scores, ends)
        if key_scores and inputs.key_scores is not None
        else none(0),
    )


def _new_of_keys(key_scores: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is None:
        return key_scores.new_empty(key_scores.shape)
    # As the kernels write it, and 0 for tokens after the last sequence.
    total, heads = key_scores.shape
    return key_scores.new_zeros(heads, total).t()


@torch.library.custom_op(
    "tisa::triton_forward", mutates_args=(), schema=schema_of(2, Inputs, inference=bool)
)
def forward_operator(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the output and the statistics of each query."""
    *inputs, inference = arguments
    return run_forward(prepared(Inputs(*inputs)), inference=inference)


@torch.library.custom_op(
    "tisa::triton_backward",
    mutates_args=(),
    schema=schema_of(5, Upstream, Inputs, needs=list[bool]),
)
def backward_operator(*arguments: Any) -> Five:
    """Return the gradients of query, key, value, scores and key scores."""
    *inputs, needs = arguments[4:]
    upstream = Upstream(*arguments[:4])
    return run_backward(prepared(Inputs(*inputs)), upstream, tuple(needs))


@forward_operator.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs = Inputs(*arguments[:-1])
    return _new_outputs(inputs.query, inputs.value, inputs.cu_seqlens)


@backward_operator.register_fake
def _(*arguments: Any) -> Five:
    *inputs, needs = arguments[4:]
    return _new_gradients(Inputs(*inputs), needs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    given = Inputs(*inputs[:-1])
    ctx.save_for_backward(*output, *given.tensors)
    ctx.rest = given.numbers
    # Of a log-sum-exp that nobody asked for there is no gradient, not one of zeros.
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad_output: Tensor | None, grad_statistics: Tensor | None
) -> tuple[Tensor | None, ...]:
    output, statistics, *tensors = ctx.saved_tensors
    if grad_output is None:
        if grad_statistics is None:
            return (None,) * (len(Inputs._fields) + 1)
        grad_output = torch.zeros_like(output)
    needs = [bool(need) for need in ctx.needs_input_grad[:TRAINED]]
    gradients = backward_operator(
        grad_output, grad_statistics, output, statistics, *tensors, *ctx.rest, needs
    )
    others = len(Inputs._fields) + 1 - TRAINED
    found = (g if need else None for g, need in zip(gradients, needs, strict=True))
    return (*found, *[None] * others)


forward_operator.register_autograd(_differentiate, setup_context=_save)


refuse_second_derivative(backward_operator, "triton")


class Eager(torch.autograd.Function):
    """The same two functions without the operators in between.

    What has no gradient comes in tuples: PyTorch looks at every argument by itself.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scores: Tensor | None,
        key_scores: Tensor | None,
        rest: tuple[Any, ...],
        before: Shape | None,
    ) -> tuple[Tensor, Tensor]:
        """Return what `forward_operator` returns; `before`: the inputs were looked at before."""
        inputs = Inputs(query, key, value, scores, key_scores, *rest)
        ready = prepared(inputs) if before is None else Prepared(inputs, before)
        output, statistics = run_forward(ready, inference=False)
        ctx.save_for_backward(output, statistics, *ready.inputs.tensors)
        ctx.numbers = inputs.numbers
        ctx.set_materialize_grads(False)
        return output, statistics

    @staticmethod
    def backward(
        ctx: Any, grad_output: Tensor | None, grad_statistics: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs."""
        output, statistics, *tensors = ctx.saved_tensors
        if grad_output is None:
            if grad_statistics is None:
                return (None,) * (TRAINED + 2)
            grad_output = torch.zeros_like(output)
        inputs = Inputs(*tensors, *ctx.numbers)
        upstream = Upstream(grad_output, grad_statistics, output, statistics)
        return (*_differentiated(inputs, upstream, ctx.needs_input_grad[:TRAINED]), None, None)


def _differentiated(inputs: Inputs, upstream: Upstream, needs: Needs) -> list[Tensor | None]:
    """Return the gradients, None for one that is not needed."""
    if torch.is_grad_enabled():
        # Somebody will differentiate this again: the operator says that it cannot be.
        gradients = backward_operator(*upstream, *inputs, list(needs))
    else:
        # Looked at again: hooks may have put them elsewhere, and in another order.
        gradients = run_backward(prepared(inputs), upstream, needs)
    return [g if need else None for g, need in zip(gradients, needs, strict=True)]


def attend(inputs: Inputs, *, inference: bool) -> tuple[Tensor, Tensor]:
    """Return what `forward_operator` returns, the shortest way that is right here."""
    if not plain(inputs.query):
        return forward_operator(*inputs, inference)
    if inference:
        return run_forward(prepared(inputs), inference=True)
    return Eager.apply(*inputs.trained, inputs[TRAINED:], None)


def repeat(inputs: Inputs) -> Repeat | None:
    """Return what does the same call again, with tensors that lie as these do.

    None where they would have to be copied first. The call has no key scores.
    """
    ready = prepared(inputs)
    if any(a is not b for a, b in zip(ready.inputs, inputs, strict=True)):
        return None
    before, after, drops = ready.known, inputs[8:], inputs.seed is not None

    def again(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scores: Tensor | None,
        band: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor:
        if query.is_cuda:
            native.count()
        seed = drawn_seed(query) if drops else None
        if needs_gradient(query, key, value, scores):
            rest = (band, mask, seed, *after)
            return Eager.apply(query, key, value, scores, None, rest, before)[0]
        inputs = Inputs(query, key, value, scores, None, band, mask, seed, *after)
        return run_forward(Prepared(inputs, before), inference=True)[0]

    return again


def record(inputs: Inputs, told: tuple[object, ...]) -> None:
    """Make a call that was just made known to C++ (native.py), where it can be.

    `told`: the arguments of `native.attend`: query, key, value, scores, band, mask, and flags.
    """
    ready = prepared(inputs)
    # Not where something was cast, copied or given another axis.
    if any(not _same(a, b) for a, b in zip(told[:6], _six(ready.inputs), strict=True)):
        return
    inference = not needs_gradient(*inputs.trained)
    what, (output, statistics, scratch) = _written(ready, inference)
    forward = _pass(ready, what, (output, statistics, *([] if scratch is None else [scratch])))
    if forward is None:
        return
    rest, seed = inputs[8:], inputs.seed

    def slow(saved: list[Any], upstream: Tensor, four: tuple[bool, ...], ordinary: bool) -> Any:
        # Output, statistics, the six tensors that C++ is told of, and the seed.
        inputs = Inputs._make((*saved[2:6], None, *saved[6:], *rest))
        needs: Any = (*four, False)
        backward = Upstream(upstream, None, *saved[:2])
        gradients = _differentiated(inputs, backward, needs)
        if not ordinary:
            return gradients, None
        ready = prepared(inputs)
        written, scratch = _written_backward(ready, needs)
        return gradients, _pass(ready, _backward(backward, needs), (*written, scratch))

    native.keep(told, forward, (output, statistics), seed, slow)


def _six(inputs: Inputs) -> tuple[Tensor | None, ...]:
    """Return the tensors that a call has that C++ knows."""
    return (*inputs[:4], *inputs[5:7])


def _same(told: Any, used: Any) -> bool:
    if told is None or used is None:
        return told is used
    return told.data_ptr() == used.data_ptr() and likeness(told) == likeness(used)


def _pass(ready: Prepared, what: Hashable, written: tuple[Tensor, ...]) -> Any | None:
    """Return for C++ what was launched for tensors of which each lay apart; None if nothing."""
    templates = ready.known.templates.get((what, ()))
    return None if templates is None else native.pass_of(templates, written)
