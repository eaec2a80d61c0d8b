"""Published checkpoints: the tensors of one module, whatever stands before their names.

A checkpoint names its tensors by where they stand in the authors' model, as in
"encoder/block_000/layer_000/SelfAttention/relative_attention_bias" or "layers.3.rpe.bias_p".
"""

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from tisa.shapes import Tensor


def groups(
    owner: str, state_dict: Mapping[str, Tensor], names: Sequence[str]
) -> list[dict[str, Tensor]]:
    """Return, layer by layer, the tensors whose names end in these; each group has all of them."""
    found: dict[str, dict[str, Tensor]] = {}
    for key in sorted(state_dict, key=_in_order):
        for name in names:
            if key == name or key.endswith((f".{name}", f"/{name}")):
                found.setdefault(key.removesuffix(name), {})[name] = state_dict[key].detach()
    whole = [group for group in found.values() if len(group) == len(names)]
    if not whole:
        raise ValueError(
            f"{owner}.from_reference: state_dict must have {', '.join(names)}, with the same "
            f"prefix before them, got {', '.join(sorted(state_dict)[:8]) or 'nothing'}"
        )
    return whole


def only(groups: Sequence[dict[str, Tensor]], owner: str) -> dict[str, Tensor]:
    """Return the one group that there is; several are taken for one if they are the same."""
    first, *others = groups
    if all(torch.equal(group[name], first[name]) for group in others for name in first):
        return first
    raise ValueError(
        f"{owner}.from_reference: state_dict must have the weights of one, got {len(groups)} that "
        "differ; pass the weights of one part of the model alone"
    )


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return the tensor in float32 or better, as scoring functions hold their parameters."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def fill(owner: nn.Module, values: Mapping[str, Tensor], remedy: str) -> None:
    """Copy values into all of a module's parameters; it becomes float64 where they are."""
    if any(value.dtype == torch.float64 for value in values.values()):
        owner.double()
    parameters = dict(owner.named_parameters())
    assert set(values) == set(parameters), (sorted(values), sorted(parameters))
    with torch.no_grad():
        for name, value in values.items():
            if parameters[name].shape != value.shape:
                raise ValueError(
                    f"{type(owner).__name__}.from_reference: {name} must have the shape "
                    f"{tuple(parameters[name].shape)}, the checkpoint has {tuple(value.shape)}; "
                    f"{remedy}"
                )
            parameters[name].copy_(value)


def _in_order(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return what sorts names as a reader does: layer 2 before layer 10."""
    return tuple(_parts(name))


def _parts(name: str) -> Iterator[tuple[int, int | str]]:
    for part in re.split(r"(\d+)", name):
        yield (1, int(part)) if part.isdigit() else (0, part)
