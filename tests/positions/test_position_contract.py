"""The contract (`tisa/testing/contract.py`) on every method here; a new one inherits it."""

import pytest
import torch

from tisa.positions import METHODS, build_position
from tisa.testing import contract
from tisa.testing.contract import *  # noqa: F403
from tisa.testing.contract import HIDDEN, LIMIT, config_of, model_of, tokens

# Each shares its code with a method that is tried here: these run in full only.
ALIKE = (
    "cable", "kerple-power", "tisa-v2", "synthesizer-factorised", "synthesizer-factorised-mixed",
    "synthesizer-dense-mixed",
)  # fmt: skip
QUICK = [pytest.param(n, marks=pytest.mark.full) if n in ALIKE else n for n in METHODS]
# It traces the package.
test_compiles = pytest.mark.parametrize("position", QUICK)(
    pytest.mark.unchecked(contract.test_compiles)
)


@pytest.fixture(params=QUICK)
def position(request):
    return request.param


@pytest.mark.unchecked
@pytest.mark.parametrize("is_causal", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("position", QUICK)
def test_exports(position, is_causal):
    contract.test_exports(position, is_causal)


def test_learned_vectors_are_those_of_the_positions(position):
    """What looks at a table of positions (pretraining does) knows no method by its name."""
    method = build_position(position, config_of(position))
    rows = [p for p in method.parameters() if p.shape[0] in (LIMIT, LIMIT + 1) and p.ndim == 2]
    found = method.vectors()
    if position not in ("absolute", "tupe-a", "tupe-r"):
        assert found is None
        return
    assert found.shape == (LIMIT, HIDDEN)
    # The last row is that of the last position, in a table with a row for [CLS] too.
    assert torch.equal(found[-1], rows[0][-1])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.full
@pytest.mark.unchecked
def test_compiles_with_inductor(position):
    torch._dynamo.reset()
    model = model_of(position)
    compiled = torch.compile(model)
    for shape in ((2, 7), (3, 9), (1, 12)):
        x = tokens(*shape)
        model.zero_grad()
        compiled(x).square().mean().backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(x).square().mean().backward()
        for one, other in zip(found, (p.grad for p in model.parameters()), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
