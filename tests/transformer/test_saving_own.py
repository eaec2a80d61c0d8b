"""Models with a method that is none of the package: what they say of it, and what is never run."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import own_methods
import tisa
from own_methods import forget
from small_transformer import config_of, tokens
from tisa import store
from tisa.transformer import LanguageModel, load, save
from tisa.transformer.saving import CONFIG, KIND, WEIGHTS


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "root.py"
    path.write_text(own_methods.FUNCTION)
    yield path
    forget()


def saved(folder, position):
    model = LanguageModel(config_of(position=position)).eval()
    save(model, folder)
    return model, json.loads((folder / CONFIG).read_text())["config"]


def test_it_says_where_its_method_came_from(file, tmp_path):
    model, written = saved(tmp_path / "model", f"{file}:Root:start=2")
    assert written["position"] == "root.py:Root"
    assert written["position_options"] == {"start": 2}
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    told = {"cls": "Root", "module": "root", "file": "root.py", "sha256": digest}
    assert written["position_source"] == told
    # Nothing of the machine on which it was made.
    assert str(tmp_path) not in (tmp_path / "model" / CONFIG).read_text()
    x = tokens(2, 7)
    for position in (None, f"{file}:Root", model.config.position):
        again = load(tmp_path / "model", position=position)
        assert again.config == model.config
        assert torch.equal(again(x), model(x))
    # Of a method of the package it says nothing, as before.
    assert "position_source" not in saved(tmp_path / "ours", "tisa")[1]


def test_without_its_class_it_is_refused_and_its_file_not_run(file, tmp_path, monkeypatch):
    model, _ = saved(tmp_path / "model", f"{file}:Root")
    x = tokens(2, 7)
    expected = model(x)
    forget()
    monkeypatch.chdir(tmp_path)
    # There, in the folder in which one is, and it would say so.
    file.write_text(own_methods.FUNCTION + "\nopen('it ran', 'w').close()\n")
    with pytest.raises(ValueError, match=r"made with Root of root.py \(SHA-256 .*position=Root, or "
                       r'position="path/to/root.py:Root"'):  # fmt: skip
        load(tmp_path / "model")
    config = json.loads((tmp_path / "model" / CONFIG).read_text())
    for named, more in (
        ("root.py:Root", {}), ("root", {}),
        ("root.py:Root", {"position_source": {"file": "root.py"}}),
        ("root.py:Root", {"position_source": config["config"]["position_source"]}),
    ):  # fmt: skip
        values = {k: v for k, v in config["config"].items() if k != "position_source"}
        other = config | {"config": {**values, "position": named, **more}}
        (tmp_path / "model" / CONFIG).write_text(json.dumps(other))
        store.seal_folder(tmp_path / "model", KIND, {}, (WEIGHTS, CONFIG))
        with pytest.raises(ValueError, match="position: the "):
            load(tmp_path / "model")
    assert not (tmp_path / "it ran").exists()
    # Given by the person, it is run, and the change is told.
    with pytest.warns(UserWarning, match="root.py has changed since the model was made with Root"):
        again = load(tmp_path / "model", position="root.py:Root")
    assert (tmp_path / "it ran").exists()
    assert torch.equal(again(x), expected)


def test_in_another_process_by_import_by_register_and_by_hugging_face(file, tmp_path):
    model, _ = saved(tmp_path / "model", f"{file}:Root")
    x = tokens(2, 7)
    expected = model(x)
    code = """
import sys, torch, tisa, tisa.hf
from tisa.transformer import load
from transformers import AutoModelForMaskedLM
x, expected = torch.load("asked")
try:
    AutoModelForMaskedLM.from_pretrained("model")
except ValueError as refused:
    assert "made with Root of root.py" in str(refused), refused
else:
    raise AssertionError
assert "root" not in sys.modules
from root import Root
with torch.no_grad():
    assert torch.equal(load("model")(x), expected)
    found = AutoModelForMaskedLM.from_pretrained("model")
    assert torch.equal(found(x).logits, expected)
    found.save_pretrained("again")
    assert torch.equal(load("again", position=Root)(x), expected)
    tisa.register("mine", Root)
    config = load("model").config.to_dict()
    tisa.transformer.save(tisa.LanguageModel(tisa.TransformerConfig(
        vocab_size=config["vocab_size"], hidden_size=config["hidden_size"], position="mine",
        num_attention_heads=config["num_attention_heads"], num_hidden_layers=1,
    )), "named")
    assert load("named").config.position == "mine"
    assert load("named", position=Root).config.position is Root
"""
    torch.save((x, expected), tmp_path / "asked")
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:tisa", "-c", code],
        capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(tisa.__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_another_class_than_its_own_is_told(file, tmp_path):
    saved(tmp_path / "model", f"{file}:Root")
    with (
        pytest.warns(UserWarning, match=r"made with Root of root.py .*, and is loaded with alibi"),
        pytest.raises(ValueError, match="must have the weights that its config asks for"),
    ):
        load(tmp_path / "model", position="alibi")
    saved(tmp_path / "ours", "tisa")
    with pytest.raises(ValueError, match=re.escape("position must be None, or 'tisa', which")):
        load(tmp_path / "ours", position="alibi")
    assert load(tmp_path / "ours", position=tisa.TISA).config.position == "tisa"
