"""An operator of PyTorch whose inputs are a NamedTuple here: its schema names each by itself."""

from typing import Any, NoReturn, get_type_hints

from torch import Tensor

_NAMES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "SymInt",
    int | None: "SymInt?",
    float: "float",
    bool: "bool",
    list[bool]: "bool[]",
}


def schema_of(returned: int, *groups: type, **more: Any) -> str:
    """Return the schema of what takes the fields of these groups, and more, one by one."""
    fields = {name: kind for group in groups for name, kind in get_type_hints(group).items()}
    inputs = ", ".join(f"{_NAMES[kind]} {name}" for name, kind in (fields | more).items())
    return f"({inputs}) -> ({', '.join(['Tensor'] * returned)})"


def refuse_second_derivative(operator: Any, backend: str) -> None:
    """Make the derivative of a backward pass an error; without it, PyTorch would say less."""

    def refuse(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise RuntimeError(
            f'tisa.attention: backend "{backend}" has no second derivative; '
            'take backend="reference"'
        )

    operator.register_autograd(refuse)
