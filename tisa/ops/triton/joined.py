"""A windowed call with keys that its window does not hide, in plain eager code.

The same forward and backward passes as without such keys; then a launch or three that add them
(join.py). In a graph, and with dropout, `tisa.ops.always` joins them instead.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tisa.ops.call import plain
from tisa.ops.triton import operators, plan_join
from tisa.ops.triton.join import Kind
from tisa.ops.triton.launching import known, launch, layout
from tisa.ops.triton.plan import Launch
from tisa.ops.triton.plan_backward import Gradients, Upstream
from tisa.ops.triton.plan_join import Always
from tisa.ops.triton.problem import TRAINED, Inputs, Problem, loadable

# As many places are compiled one by one.
MOST = 16


def can_join(inputs: Inputs, places: Tensor) -> bool:
    """Whether this module does the call."""
    return plain(inputs.query, places) and inputs.seed is None and places.shape[1] <= MOST


def attend(
    inputs: Inputs, places: Tensor, *, causal: bool, inference: bool
) -> tuple[Tensor, Tensor]:
    """Return the output and the statistics of each query."""
    always = Always(places.contiguous(), Kind(places.shape[1], causal))
    if inference:
        return _forward(inputs, always, inference=True)
    rest = (always, *inputs[TRAINED:])
    output, statistics = _Joined.apply(*inputs.trained, rest)
    return output, statistics


def _forward(inputs: Inputs, always: Always, *, inference: bool) -> tuple[Tensor, Tensor]:
    ready = operators.prepared(inputs)
    output, statistics = operators.run_forward(ready, inference=inference)

    def made() -> list[Launch]:
        return plan_join.forward(Problem(ready.inputs), always, output, statistics)

    _launch(ready.inputs, always, "join", (output, statistics), made)
    return output, statistics


def _launch(
    inputs: Inputs, always: Always, what: Any, others: tuple[Tensor | None, ...], made: Any
) -> None:
    tensors = (*inputs.tensors, always.places)
    numbers = (inputs.numbers, always.kind, inputs.query.device.index)
    found = known(tensors, "join", *numbers, torch.get_float32_matmul_precision())
    launch(found, what, tensors, others, made, inputs.query.device)


class _Joined(torch.autograd.Function):
    """Forward and backward of such a call; what has no gradient comes in a tuple."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scores: Tensor | None,
        key_scores: Tensor | None,
        rest: tuple[Any, ...],
    ) -> tuple[Tensor, Tensor]:
        always, *others = rest
        inputs = Inputs(query, key, value, scores, key_scores, *others)
        output, statistics = _forward(inputs, always, inference=False)
        ctx.save_for_backward(output, statistics, always.places, *inputs.tensors)
        ctx.rest = (always.kind, inputs.numbers)
        ctx.set_materialize_grads(False)
        return output, statistics

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_output: Tensor | None, grad_statistics: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        output, statistics, places, *tensors = ctx.saved_tensors
        kind, numbers = ctx.rest
        if grad_output is None:
            if grad_statistics is None:
                return (None,) * (TRAINED + 1)
            grad_output = torch.zeros_like(output)
        if grad_statistics is None:
            # The windowed part of a row of dS does not add up to 0: with this, both sides of the
            # band are summed.
            grad_statistics = torch.zeros_like(statistics)
        needs = ctx.needs_input_grad[:TRAINED]
        ready = operators.prepared(Inputs(*tensors, *numbers))
        inputs, always = ready.inputs, Always(places, kind)
        upstream = Upstream(loadable(grad_output), grad_statistics, loadable(output), statistics)
        gradients = operators.run_backward(ready, upstream, needs, whole=False)
        problem = Problem(inputs)
        scratch = output.new_empty(
            sum(plan_join.scratch_numbers(problem, kind.COUNT)), dtype=torch.float32
        )

        def made() -> list[Launch]:
            wanted = (g if n else None for g, n in zip(gradients, computed, strict=True))
            return plan_join.backward(problem, always, upstream, Gradients(*wanted), scratch)

        computed = operators.computed_with(needs)
        what = (computed, layout(upstream.grad_output), layout(grad_statistics))
        _launch(inputs, always, what, (*upstream, *gradients, scratch), made)
        found = (g if need else None for g, need in zip(gradients, needs, strict=True))
        return (*found, None)
