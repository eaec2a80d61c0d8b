"""Converted models with any scoring function: fitted, saved, refused without it, exported."""

import pytest
import torch
from transformers import AutoModelForMaskedLM

import tisa.hf
from own_methods import FUNCTION, forget
from test_convert import HEADS, TOKENS, aim_of, attended
from tiny import inputs, logits, original
from tisa.hf.calibration import Tokens, batches_of
from tisa.hf.descent import _are_rows_of_heads, fit_by_descent
from tisa.hf.export import export_program
from tisa.hf.fit import fit_kernels_to, fit_scores


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "root.py"
    path.write_text(FUNCTION)
    yield f"{path}:Root"
    forget()


# What may be left of a head by each function that can have its curve, and the heads that it can.
SHAPES = {
    tisa.NearFar: (1e-3, (0, 1, 2, 3)),
    tisa.T5Buckets: (2e-3, (1, 3)),
    tisa.KerplePower: (3e-3, (2,)),
    tisa.KerpleLog: (3e-3, (2,)),
}


@pytest.mark.parametrize("cls", SHAPES, ids=lambda cls: cls.__name__)
def test_a_function_comes_as_near_as_its_shape_lets_it(cls):
    aim = aim_of(HEADS.values(), 32)
    torch.manual_seed(7)
    scoring = cls(len(HEADS))
    state = torch.get_rng_state()
    with torch.no_grad():
        before = aim.divergence(0 * aim.mass)[0]
        left = fit_by_descent(scoring, aim)
        assert torch.equal(left, aim.divergence(scoring.scores(aim.offsets))[0])
        # Drawn from seeds of its own, whatever the function's values were.
        assert torch.equal(torch.get_rng_state(), state)
        again = cls(len(HEADS))
        fit_by_descent(again, aim)
    for one, other in zip(scoring.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    limit, heads = SHAPES[cls]
    assert (left <= before + 0.02).all(), left
    assert left[list(heads)].max() < limit, left
    # Kernels are not better than kernels with a decay beside them.
    if cls is tisa.NearFar:
        kernels = tisa.TISA(len(HEADS), 5)
        with torch.no_grad():
            assert left.mean() < 1.1 * fit_kernels_to(kernels, aim).mean()


class Between(tisa.ScoringFunction):
    """A slope that heads share, and a factor of each head's neighbour."""

    def __init__(self, num_attention_heads=12):
        super().__init__(num_attention_heads)
        self.slope = torch.nn.Parameter(torch.zeros(()))
        self.factors = torch.nn.Parameter(torch.ones(num_attention_heads))

    def scores(self, offsets):
        k = self._distances(offsets).abs()
        return self.slope * self.factors.roll(1).view(-1, *[1] * k.ndim) * k

    def support(self, eps):
        return None


class Neighbour(tisa.ScoringFunction):
    """Rows that are not the head's own."""

    def __init__(self, num_attention_heads=12):
        super().__init__(num_attention_heads)
        self.slopes = torch.nn.Parameter(torch.ones(num_attention_heads))

    def scores(self, offsets):
        k = self._distances(offsets).abs()
        return -self.slopes.roll(1).view(-1, *[1] * k.ndim) * k

    def support(self, eps):
        return None


@pytest.mark.parametrize("cls", [Between, Neighbour])
def test_heads_that_share_numbers_are_fitted_together(cls):
    """The best of each head would be a mixture that no head has."""
    aim = aim_of([lambda k: -0.1 * k.abs(), lambda k: -0.3 * k.abs()], 32)
    scoring = cls(2)
    assert not _are_rows_of_heads(scoring, list(scoring.parameters()), aim.offsets)
    own = tisa.KerpleLog(2)
    assert _are_rows_of_heads(own, list(own.parameters()), aim.offsets)
    with torch.no_grad():
        before = aim.divergence(0 * aim.mass)[0].sum()
        left = fit_by_descent(scoring, aim)
    assert left.sum() < 0.05 * before
    torch.testing.assert_close(
        scoring.scores(torch.tensor([10]))[:, 0], torch.tensor([-1.0, -3.0]), rtol=0.05, atol=0.05
    )


def test_a_tiny_model_beside_kernels():
    """On a model's own attention: no function that is free near the query is far from kernels."""
    model = attended()
    batches = batches_of([Tokens(x) for x in TOKENS], model)
    left = {}
    for name in ("tisa:num_kernels=0", "tisa:num_kernels=2", "near-far:num_kernels=2", "t5"):
        blank = tisa.hf.convert(model, scoring=name, init="reference", calibration=TOKENS)
        fit = fit_kernels_to if name.startswith("tisa") else fit_by_descent
        left[name] = float(torch.stack(fit_scores(blank, model, batches, fit=fit)).mean())
    nothing, kernels, near_far, t5 = left.values()
    assert near_far < 1.02 * kernels, left
    assert t5 < 1.02 * kernels, left
    assert kernels < 0.95 * nothing, left


@pytest.mark.parametrize("name", ["near-far", "t5", "tisa-v2", "alibi", "mine"])
def test_saved_and_loaded_as_kernels_are(name, mine, tmp_path):
    scoring = mine if name == "mine" else name
    model = original("bert")
    converted = tisa.hf.convert(model, scoring=scoring, init="reference", calibration=TOKENS)
    assert tisa.hf.core.OwnScores in type(converted.bert.encoder.layer[0].attention.self).__mro__
    asked = inputs()
    expected = logits(converted, **asked)
    for implementation in ("eager", "sdpa"):
        converted.set_attn_implementation(implementation)
        torch.testing.assert_close(logits(converted, **asked), expected, rtol=1e-3, atol=1e-4)
    tisa.hf.save(converted, tmp_path / "new")
    for again in (
        tisa.hf.load(str(tmp_path / "new")), AutoModelForMaskedLM.from_pretrained(tmp_path / "new")
    ):  # fmt: skip
        again.set_attn_implementation("sdpa")
        torch.testing.assert_close(logits(again, **asked), logits(converted, **asked))
    card = (tmp_path / "new" / "README.md").read_text()
    assert ("root.py:Root" if name == "mine" else name) in card
    assert "trust_remote_code" not in card


@pytest.mark.unchecked
def test_exported_as_kernels_are(mine):
    converted = tisa.hf.convert(original("bert"), scoring=mine, calibration=TOKENS).eval()
    program = export_program(converted).module()
    asked = inputs(2, 9)
    found = program(asked["input_ids"], asked["attention_mask"])
    torch.testing.assert_close(found, logits(converted, **asked), rtol=1e-4, atol=1e-4)


def test_a_class_of_ones_own_is_needed_to_load(mine, tmp_path):
    converted = tisa.hf.convert(original("bert"), scoring=f"{mine}:start=2", calibration=TOKENS)
    told = converted.config.tisa["scoring"]
    assert told["name"] == "root.py:Root"
    assert told["options"] == {"start": 2}
    tisa.hf.save(converted, tmp_path / "new")
    assert str(tmp_path) not in (tmp_path / "new" / "config.json").read_text()
    expected = logits(converted, **inputs())
    forget()
    for load in (tisa.hf.load, AutoModelForMaskedLM.from_pretrained):
        with pytest.raises(ValueError, match=r"scoring: the model was made with Root of root\.py"):
            load(str(tmp_path / "new"))
    again = tisa.hf.load(str(tmp_path / "new"), scoring=mine)
    torch.testing.assert_close(logits(again, **inputs()), expected)
    (tmp_path / "root.py").write_text(FUNCTION + "# changed\n")
    forget()
    with pytest.warns(UserWarning, match="root.py has changed since"):
        again = tisa.hf.load(str(tmp_path / "new"), scoring=mine)
    torch.testing.assert_close(logits(again, **inputs()), expected)


def test_the_copied_code_says_that_it_has_kernels_alone():
    converted = tisa.hf.convert(original("bert"), scoring="alibi", calibration=TOKENS)
    # Of the file that lies beside a model; what a package hands in stands for it otherwise.
    with pytest.raises(ValueError, match="scoring: alibi needs tisa, and no trust_remote_code"):
        tisa.hf.core.Scores(4, converted.config.tisa)
    assert tisa.hf.core.Parts().scoring is tisa.hf.core.Scores
    assert converted.config.tisa["format"] == 2 < tisa.hf.core.FORMAT
    kernels = tisa.hf.convert(original("bert"), init="zero", calibration=TOKENS).config.tisa
    # As before: what was written yesterday reads it.
    assert kernels["format"] == 1
    assert "scoring" not in kernels


@pytest.mark.unchecked
def test_what_is_refused(mine):
    model = original("bert")
    for settings, words in (
        ({"scoring": "rotary"}, "scoring must be a function of the offset"),
        ({"scoring": "lemon"}, "scoring must be among none, "),
        ({"scoring": "tisa:init=zero"}, "kernels have the option num_kernels"),
        ({"scoring": "kerple-log", "num_kernels": 3}, "num_kernels must be left out with scoring"),
        ({"scoring": "kerple-log", "init": "zero"}, 'init must be "fit" or "reference" with'),
        ({"scoring": "t5:lemon=3"}, "scoring: options of 't5' must be among .* got lemon"),
        ({"scoring": f"{mine}:layers=shared"}, "options of 'root.py:Root' must be among start, "),
    ):
        with pytest.raises(ValueError, match=words):
            tisa.hf.convert(model, calibration=TOKENS, **settings)
