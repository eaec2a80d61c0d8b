"""Models saved and loaded: whole, in their precision, or with what is wrong told."""

import json
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import load_file

from small_transformer import SMALL, config_of, tokens
from tisa import store
from tisa.hf.transformer import TisaTransformerForMaskedLM
from tisa.transformer import LanguageModel, Transformer, load, save

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("cls", [Transformer, LanguageModel])
@pytest.mark.parametrize("name", ["tisa", "synthesizer-factorised-mixed", "floater"])
def test_saved_and_loaded(tmp_path, cls, name):
    model = cls(config_of(position=name, norm="post", position_options={"layers": "shared"}))
    save(model, tmp_path / "new" / "model")
    again = load(tmp_path / "new" / "model")
    assert type(again) is cls
    assert again.config == model.config
    assert not again.training
    x = tokens(2, 7)
    with torch.no_grad():
        assert torch.equal(again(x), model.eval()(x))
    assert sorted(p.name for p in (tmp_path / "new" / "model").iterdir()) == [
        "config.json", "manifest.json", "model.safetensors",
    ]  # fmt: skip


@pytest.mark.parametrize("part", [None, "transformer"])
def test_a_compiled_model_is_saved_as_what_was_compiled(tmp_path, part):
    model = LanguageModel(config_of())
    if part is None:
        save(torch.compile(model, backend="eager"), tmp_path)
    else:
        setattr(model, part, torch.compile(getattr(model, part), backend="eager"))
        save(model, tmp_path)
    again = load(tmp_path)
    assert type(again) is LanguageModel
    assert torch.equal(again.transformer.embeddings.weight, model.transformer.embeddings.weight)


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    class Own(LanguageModel):
        pass

    for model in (Own(config_of()), torch.nn.DataParallel(LanguageModel(config_of()))):
        with pytest.raises(TypeError, match=f"LanguageModel itself.* got {type(model).__name__}"):
            save(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_options_that_are_changed_for_the_next_model(tmp_path):
    options = {"num_kernels": 3}
    model = Transformer(config_of(position_options=options))
    options["num_kernels"] = 5
    save(model, tmp_path)
    assert load(tmp_path).config.position_options == {"num_kernels": 3}
    frozen = MappingProxyType(options)
    save(Transformer(config_of(position_options=frozen)), tmp_path)
    assert load(tmp_path).config.position_options == {"num_kernels": 5}


def test_loaded_in_a_fresh_process(tmp_path):
    model = LanguageModel(config_of())
    save(model, tmp_path)
    code = (
        "import torch, tisa.transformer\n"
        f"model = tisa.transformer.load({str(tmp_path)!r})\n"
        f"with torch.no_grad(): torch.save(model(torch.arange(7)[None]), {str(tmp_path / 'out')!r})"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    with torch.no_grad():
        expected = model.eval()(torch.arange(7)[None])
    torch.testing.assert_close(torch.load(tmp_path / "out"), expected)


def test_half_precision_is_kept_and_scores_stay_float32(tmp_path):
    save(Transformer(config_of()).bfloat16(), tmp_path)
    dtypes = {
        name: value.dtype for name, value in load_file(tmp_path / "model.safetensors").items()
    }
    assert dtypes["position.scoring.0.kernel_offsets"] == torch.float32
    assert dtypes["embeddings.weight"] == torch.bfloat16
    assert load(tmp_path).embeddings.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["tisa", "kerple-log", "tisa-v2", "near-far"])
def test_double_precision_is_kept_in_the_scores_too(tmp_path, name):
    model, x = Transformer(config_of(position=name)).double(), tokens(2, 9)
    save(model, tmp_path)
    with torch.no_grad():
        assert torch.equal(load(tmp_path)(x), model.eval()(x))


@pytest.mark.parametrize(
    ("name", "meant"),
    [("tupe-r", {"variant": "before"}), ("kerple-log", {"layers": "each"}),
     ("kerple-power", {"layers": "each"}), ("floater", {"biases": True}), ("tisa", {})],
)  # fmt: skip
def test_a_model_from_before_a_default_changed_computes_what_it_did(tmp_path, name, meant):
    old = LanguageModel(config_of(position=name, position_options=meant))
    save(old, tmp_path)
    rewrite(tmp_path, format=2, config={**old.config.to_dict(), "position_options": {}})
    loaded, x = load(tmp_path), tokens(2, 7)
    assert loaded.config.position_options == meant
    with torch.no_grad():
        assert torch.equal(loaded(x), old.eval()(x))
        by_hugging_face = TisaTransformerForMaskedLM.from_pretrained(tmp_path).eval()
        assert torch.equal(by_hugging_face(x).logits, old(x))
    # Written again it says so itself.
    save(loaded, tmp_path / "again")
    by_hugging_face.save_pretrained(tmp_path / "third")
    for folder in ("again", "third"):
        written = json.loads((tmp_path / folder / "config.json").read_text())
        assert (written["format"], written["config"]["position_options"]) == (3, meant)


def test_interrupted_saving_leaves_the_old_model(tmp_path, monkeypatch):
    old = Transformer(config_of())
    save(old, tmp_path)

    def broken(source, target):
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", broken)
    with pytest.raises(OSError, match="no space"):
        save(Transformer(config_of(position="none")), tmp_path)
    monkeypatch.undo()
    x = tokens(1, 5)
    with torch.no_grad():
        assert torch.equal(load(tmp_path)(x), old.eval()(x))


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors in it"),
        (lambda f: (f / "config.json").unlink(), "no config.json in it"),
        (lambda f: (f / "config.json").write_text("{"), "is not a config"),
        (lambda f: (f / "config.json").write_text('{"format": 1}'), "is not a config"),
        (lambda f: rewrite(f, format=7), "newer version of tisa"),
        (lambda f: rewrite(f, config={"hidden_siz": 3}), "unknown hidden_siz"),
        (lambda f: rewrite(f, config={**SMALL, "position": "shaw"}), "missing: .*key_table"),
        (lambda f: rewrite(f, config={**SMALL, "vocab_size": 14}), "must be numbers of shape"),
        (lambda f: cut(f / "model.safetensors"), "model.safetensors has .* bytes and not"),
        (lambda f: (cut(f / "model.safetensors"), rewrite(f)), "truncated or corrupted"),
        (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
    ],
)
def test_broken_folders_are_refused(tmp_path, spoil, error):
    save(Transformer(config_of()), tmp_path)
    spoil(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=error):
        load(tmp_path)


def rewrite(folder, **values):
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, **values}))
    store.seal_folder(folder, "transformer", {}, ("config.json", "model.safetensors"))


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def test_weights_and_config_of_two_models_are_no_model(tmp_path):
    """What a process leaves that is killed between both files."""
    save(Transformer(config_of()), tmp_path / "old")
    save(Transformer(config_of()), tmp_path / "new")
    (tmp_path / "new" / "model.safetensors").replace(tmp_path / "old" / "model.safetensors")
    with pytest.raises(store.Damaged, match=r"model.safetensors is damaged"):
        load(tmp_path / "old")


def test_a_folder_of_before_is_read(tmp_path):
    save(model := Transformer(config_of()), tmp_path)
    rewrite(tmp_path, format=1)
    (tmp_path / "manifest.json").unlink()
    x = tokens(1, 5)
    with torch.no_grad():
        assert torch.equal(load(tmp_path)(x), model.eval()(x))


def test_without_safetensors_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"pip install 'tisa\[hf\]'"):
        save(Transformer(config_of()), tmp_path)
    assert not list(tmp_path.iterdir())
