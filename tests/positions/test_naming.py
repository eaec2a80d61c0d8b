"""All forms in which a person names a method, and what is said of those that are none."""

import pickle
import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest
import torch

import own_methods
import tisa
from tisa.positions import METHODS, PositionConfig, build_position, canonical, naming, resolve
from tisa.positions.from_scoring import FromScoring

SMALL = PositionConfig(16, 2, 3, 12)


@pytest.fixture
def files(tmp_path):
    """Two files of somebody's."""
    (tmp_path / "root.py").write_text(own_methods.FUNCTION)
    (tmp_path / "twist.py").write_text(own_methods.METHOD)
    yield tmp_path
    own_methods.forget()


def rates_of(model):
    return [scoring.rates.detach() for scoring in model.position.scoring]


def test_a_function_in_a_file_is_a_position_of_the_offset(files):
    config = tisa.TransformerConfig(
        20, 16, 3, 2, position=f"{files}/root.py:Root:start=0.25", position_options={"start": 1.0}
    )
    assert config.position_options == {"start": 0.25}
    model = tisa.Transformer(config)
    assert isinstance(model.position, FromScoring)
    # A function of its own in each layer, as that of any other method.
    assert [rates.tolist() for rates in rates_of(model)] == [[0.25, 0.5]] * 3
    x = torch.randn(1, 5, 16)
    layer = tisa.SelfAttention(16, 2, position=f"{files}/root.py:Root")
    bare = tisa.SelfAttention(16, 2, position="none")
    bare.attention.load_state_dict(layer.attention.state_dict())
    k = torch.arange(5)[None, :] - torch.arange(5)[:, None]
    expected = -torch.tensor([0.5, 1.0]).view(2, 1, 1) * k.abs().float().sqrt()
    torch.testing.assert_close(
        layer.logits(x) - bare.logits(x), expected[None], rtol=1e-5, atol=1e-5
    )
    assert torch.isfinite(model(torch.randint(20, (2, 7)))).all()
    assert torch.equal(pickle.loads(pickle.dumps(model))(torch.arange(7)[None]),
                       model(torch.arange(7)[None]))  # fmt: skip


def test_every_form_is_the_same_class(files, monkeypatch):
    cls = resolve(f"{files}/twist.py:Twist").method.cls
    tisa.register("twist", cls)
    point = EntryPoint("declared", f"{cls.__module__}:Twist", "tisa.positions")
    monkeypatch.setattr(naming, "entry_points", lambda **of: EntryPoints([point]).select(**of))
    monkeypatch.chdir(files)
    for given in (cls, "twist.py:Twist", "./twist.py:Twist", "twist", "declared"):
        assert type(build_position(given, SMALL)) is cls
        config = tisa.TransformerConfig(20, 16, 3, 2, position=given)
        assert type(tisa.Transformer(config).position) is cls
        assert type(tisa.SelfAttention(16, 2, position=given).position) is cls
    assert build_position("twist:periods=[3,5]", SMALL).waves.shape == (2, 16)
    with pytest.raises(ValueError, match=r"options of position 'twist' must be among layers, per"):
        build_position("twist:lemon=3", SMALL)


def test_classes_of_this_package_are_known_by_their_names():
    from tisa.positions.rotary import Rotary

    assert resolve(Rotary).name == "rotary"
    assert resolve(tisa.T5Buckets).name == "t5"
    # As by its name: one table for all layers.
    assert build_position(tisa.T5Buckets, SMALL).layers == "shared"
    for name in METHODS:
        assert resolve(name).source is None


def test_a_synonym_is_told_by_our_name(files):
    for given in ("nope", "none"):
        chosen = resolve(given)
        assert (chosen.name, chosen.given, chosen.label, chosen.source) == 3 * ("none",) + (None,)
        config = tisa.TransformerConfig(20, 16, 3, 2, position=given)
        assert config.position == "none"
        assert config.to_dict()["position"] == "none"
        assert tisa.TransformerConfig.from_dict(config.to_dict(), position=given) == config
        assert type(tisa.SelfAttention(16, 2, position=given).position).__name__ == "NoPosition"
    assert "nope" not in METHODS
    assert [canonical(name) for name in ("nope", "nope:a=1", "nope.py:A", "rotary")] == [
        "none", "none:a=1", "nope.py:A", "rotary",
    ]  # fmt: skip
    assert resolve("nearfar").name == "near-far"
    assert resolve("nearfar-fox").name == "near-far-fox"
    cls = resolve(f"{files}/twist.py:Twist").method.cls
    with pytest.raises(ValueError, match="name 'nope' is that of"):
        tisa.register("nope", cls)


def test_a_changed_file_is_run_again_and_an_equal_one_is_not(files):
    first = resolve(f"{files}/root.py:Root")
    assert resolve(f"{files}/root.py:Root").position is first.position
    (files / "root.py").write_text(own_methods.FUNCTION.replace("sqrt()", "sqrt() * 2"))
    second = resolve(f"{files}/root.py:Root")
    assert second.position is not first.position
    assert second.source.sha256 != first.source.sha256
    assert first.source.file == "root.py"


def test_a_file_may_import_what_lies_beside_it(files):
    (files / "beside_it.py").write_text("START = 3.0\n")
    text = own_methods.FUNCTION.replace("start=0.5", "start=beside_it.START")
    (files / "more.py").write_text(f"import beside_it\n{text}")
    before = list(sys.path)
    scoring = resolve(f"{files}/more.py:Root").scoring
    assert scoring(2).rates.tolist() == [3.0, 6.0]
    assert sys.path == before


@pytest.mark.unchecked
def test_what_is_none_of_them_is_told_with_what_was_looked_for(files, monkeypatch):
    monkeypatch.chdir(files)
    cls = resolve("twist.py:Twist").method.cls
    tisa.register("somebodys", cls)
    for given, said in (
        ("sinusoidl", r"tisa\.register \(somebodys\) and the entry points tisa\.positions \(none\)"
         r".* got 'sinusoidl'; did you mean sinusoidal\?"),
        ("lemon.py:Mine", r"the class Mine in the file lemon\.py, which is not there \(from /"),
        ("twist.py", "expected a class of twist.py, as twist.py:Class"),
        ("twist.py:Neither", "looked in twist.py for a class Neither.*classes in it: Twist"),
        ("twist.py:Other", "found none; such classes in it: Twist"),
        ("tisa:first", "expected a method as name:option=value"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"position.*{said}"):
            tisa.TransformerConfig(position=given)
    for given in (dict, tisa.Position, tisa.ScoringFunction, 3, torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError, match=r"position must be .*a class that is a tisa\.Pos"):
            tisa.TransformerConfig(position=given)
    (files / "broken.py").write_text("class Mine(\n")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"broken.py could not be run \(SyntaxError: .*line 1"):
            resolve("broken.py:Mine")


@pytest.mark.unchecked
def test_names_that_cannot_be_registered(files):
    cls = resolve(f"{files}/twist.py:Twist").method.cls
    for name in ("", "a b", "a:b", "a,b", "mine.py", "a/b"):
        with pytest.raises(ValueError, match="name must be a word"):
            tisa.register(name, cls)
    with pytest.raises(ValueError, match="name 'rotary' is that of"):
        tisa.register("rotary", cls)
    with pytest.raises(TypeError, match="cls must be a class"):
        tisa.register("mine", dict)
    tisa.register("mine", cls)
    tisa.register("mine", cls)
    other = resolve(f"{files}/root.py:Root").scoring
    with pytest.raises(ValueError, match="name 'mine' is that of"):
        tisa.register("mine", other)
