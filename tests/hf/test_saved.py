"""Converted models saved, loaded in a fresh process, torn, uploaded, and what lies beside them."""

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import tiny
import tisa.hf
import tisa.hf.saving
from tiny import inputs, logits, original, shake, token_lists
from tisa.store import alone

ROOT = Path(__file__).parent.parent.parent
TOKENS = token_lists(24)

FRESH = """
import json, pathlib, sys
{start}
import torch, transformers

folder = pathlib.Path(sys.argv[1])
given = torch.load(folder / "inputs.pt")
real = given["attention_mask"].bool()
for name, auto in json.loads((folder / "models.json").read_text()).items():
    load = getattr(transformers, auto).from_pretrained
    model = load(folder / name, trust_remote_code={trust}).eval()
    wanted = torch.load(folder / name / "expected.pt")
    with torch.no_grad():
        found = model(**given).logits[real]
    if {trust}:
        torch.testing.assert_close(found, wanted[real], rtol=2e-4, atol=2e-4, msg=name)
    else:
        assert torch.equal(found, wanted[real]), name
    described = json.loads((folder / name / "config.json").read_text())
    assert [type(model).__name__] == described["architectures"], name
    assert type(model).__name__.startswith("Tisa"), name
if {trust}:
    try:
        load(folder / name, trust_remote_code=False)
    except ValueError as refused:
        assert "trust_remote_code" in str(refused)
    else:
        raise AssertionError("loaded without its code")
"""


@pytest.mark.parametrize(
    "trust",
    [pytest.param(False, id="with our package", marks=pytest.mark.full),
     pytest.param(True, id="remote code")],
)  # fmt: skip
def test_a_fresh_process_loads_the_same_models(trust, tmp_path):
    known = {}
    for name in tiny.FAMILIES:
        positions = "keep" if name in tiny.ROTARY else "replace"
        settings = {} if positions == "keep" else {"calibration": TOKENS}
        converted = tisa.hf.convert(original(name), positions=positions, init="zero", **settings)
        shake(converted).save_pretrained(tmp_path / name)
        torch.save(logits(converted, **inputs()), tmp_path / name / "expected.pt")
        head = "CausalLM" if name in tiny.DECODERS else "MaskedLM"
        known[name] = f"AutoModelFor{head}"
    (tmp_path / "models.json").write_text(json.dumps(known))
    torch.save(inputs(), tmp_path / "inputs.pt")
    start = "import tisa.hf; tisa.hf.register_type('gpt_bigcode')"
    start = "sys.modules['tisa'] = None" if trust else start
    # As many threads as here: sums are then taken in the same order.
    start += f"; import torch; torch.set_num_threads({torch.get_num_threads()})"
    answer = subprocess.run(
        [sys.executable, "-c", FRESH.format(start=start, trust=trust), str(tmp_path)],
        capture_output=True, text=True,
        # What chooses kernels there chooses them here: the numbers are compared to the bit.
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-2000:]


def test_broken_checkpoints_are_refused(tmp_path):
    converted = tisa.hf.convert(original("bert"), positions="keep")
    converted.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    load = transformers.AutoModelForMaskedLM.from_pretrained
    whole = shards[0].read_bytes()
    shards[0].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Exception, match=r"(?i)incomplete|header|truncat|size|buffer"):
        load(tmp_path)
    shards[0].unlink()
    with pytest.raises(OSError, match=r"safetensors|not"):
        load(tmp_path)
    shards[0].write_bytes(whole)
    config = tmp_path / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"format": 1', '"format": 99'))
    with pytest.raises(ValueError, match="upgrade"):
        load(tmp_path)
    config.write_text(text)
    index = tmp_path / "model.safetensors.index.json"
    known = json.loads(index.read_text())
    known["weight_map"] = {k: v for k, v in known["weight_map"].items() if "offset_sc" not in k}
    index.write_text(json.dumps(known))
    from safetensors.torch import load_file, save_file

    for shard in shards:
        kept = {k: v for k, v in load_file(shard).items() if "offset_scores" not in k}
        save_file(kept, shard, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks .*offset_scores"):
        load(tmp_path)


def test_any_other_type_is_reloaded_too(tmp_path):
    """A type that is not registered from the start: what the Auto classes do not know by name."""
    config = transformers.RobertaPreLayerNormConfig(**tiny.SIZES)
    model = transformers.RobertaPreLayerNormModel(config).eval()
    converted = shake(tisa.hf.convert(model, positions="replace", init="zero", calibration=TOKENS))
    tisa.hf.save(converted, tmp_path)
    loaded = tisa.hf.load(str(tmp_path))
    assert type(loaded) is type(converted)
    with torch.no_grad():
        assert torch.equal(loaded(**inputs())[0], converted(**inputs())[0])
    model.save_pretrained(tmp_path / "stock")
    with pytest.raises(ValueError, match="no converted model"):
        tisa.hf.load(str(tmp_path / "stock"))


def test_a_table_of_sines_that_was_replaced_is_not_set_on_loading(tmp_path):
    config = transformers.DistilBertConfig(
        vocab_size=60, dim=32, n_layers=1, n_heads=4, hidden_dim=40, max_position_embeddings=64,
        sinusoidal_pos_embds=True,
    )  # fmt: skip
    model = transformers.DistilBertModel(config).eval()
    converted = shake(tisa.hf.convert(model, positions="replace", init="zero", calibration=TOKENS))
    converted.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is type(converted)
    assert loaded.config.sinusoidal_pos_embds
    with torch.no_grad():
        assert torch.equal(loaded(**inputs())[0], converted(**inputs())[0])


class Tagger(transformers.BertPreTrainedModel):
    """A user's own class."""

    def __init__(self, config):
        super().__init__(config)
        self.bert = transformers.BertModel(config, add_pooling_layer=False)
        self.tags = torch.nn.Linear(config.hidden_size, 5)
        self.post_init()

    def forward(self, **given):
        return self.tags(self.bert(**given)[0])


def test_a_class_of_ones_own_is_asked_for(tmp_path):
    model = Tagger(transformers.BertConfig(**tiny.SIZES)).eval()
    converted = shake(tisa.hf.convert(model, positions="keep", init="zero"))
    tisa.hf.save(converted, tmp_path)
    with pytest.raises(ValueError, match=r"converted Tagger.*model_class=Tagger"):
        tisa.hf.load(str(tmp_path))
    loaded = tisa.hf.load(str(tmp_path), model_class=Tagger)
    assert type(loaded) is type(converted)
    assert isinstance(loaded, Tagger)
    with torch.no_grad():
        assert torch.equal(loaded(**inputs()), converted(**inputs()))
    base = tisa.hf.load(str(tmp_path), model_class=transformers.AutoModel, add_pooling_layer=False)
    assert type(base).__name__ == "TisaBertModel"
    with torch.no_grad():
        assert torch.equal(base(**inputs())[0], converted.bert(**inputs())[0])
    model.save_pretrained(tmp_path / "stock")
    with pytest.warns(UserWarning, match="Tagger, no class of transformers for such a model"):
        tisa.hf.saving.load_stock(str(tmp_path / "stock"))


def _saved_in_another_process(model, folder):
    raise SystemExit(0 if _refused(model, folder) else 1)


def _refused(model, folder):
    with pytest.raises(BlockingIOError, match=r"writes there; wait for its end"):
        tisa.hf.save(model, folder)
    with pytest.raises(BlockingIOError, match=r"writes there; wait for its end"):
        model.save_pretrained(folder)
    return True


def test_two_processes_do_not_mix_their_models(tmp_path):
    model = tisa.hf.convert(original("bert"), positions="keep", init="zero")
    with alone(tmp_path / "saved"):
        other = multiprocessing.get_context("fork").Process(
            target=_saved_in_another_process, args=(model, tmp_path / "saved")
        )
        other.start()
        other.join(60)
        assert other.exitcode == 0
        tisa.hf.save(model, tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_what_lies_beside_a_saved_model(tmp_path):
    converted = tisa.hf.convert(
        original("bert"), positions="replace", init="zero", calibration=TOKENS
    )
    converted.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "2,048 numbers" in card
    assert "library_name: transformers" in card
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "tisa-bert"
    assert "AutoModelForMaskedLM" in config["auto_map"]
    (tmp_path / "README.md").write_text("mine")
    converted.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


@pytest.mark.parametrize("before", [None, "# A card that somebody wrote"])
def test_push_to_hub_uploads_weights_code_and_card(before, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    uploaded = {}

    def create_repo(api, repo_id, **_):
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def create_commit(api, repo_id, operations, **_):
        assert repo_id == "somebody/little"
        for one in operations:
            uploaded[one.path_in_repo] = Path(one.path_or_fileobj).read_bytes()

    def load(*_, **__):
        if before is None:
            raise EntryNotFoundError("no card yet")
        return huggingface_hub.ModelCard(before)

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", create_commit)
    monkeypatch.setattr(huggingface_hub.ModelCard, "load", load)
    model = original("bert")
    model.config.name_or_path = "somebody/stock"
    converted = tisa.hf.convert(model, positions="replace", init="zero", calibration=TOKENS)
    converted.push_to_hub("somebody/little", tags=["mine"])
    assert {"config.json", "model.safetensors", "modeling_tisa.py", "README.md"} <= set(uploaded)
    config = json.loads(uploaded["config.json"])
    assert config["model_type"] == "tisa-bert"
    assert config["auto_map"]["AutoModelForMaskedLM"] == "modeling_tisa.TisaModelForMaskedLM"
    card = uploaded["README.md"].decode()
    assert "- mine" in card
    if before is None:
        assert "translation-invariant" in card
        assert "base_model: somebody/stock" in card
        assert "More Information Needed" not in card
    else:
        assert before in card
