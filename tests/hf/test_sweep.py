"""The record of every type is true: of a few here, of all in `make test-full`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

import sweep
import tisa.hf
from any_type import build, model_classes, tokens_for

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "docs/records/2026-11-19-every-type.json").read_text())
FEW = {
    "CLIPModel": "clip",  # a part of it alone, table and all
    "PegasusForCausalLM": "pegasus",  # modules for attention to an encoder, unused
    "Gemma2ForCausalLM": "gemma2",
    "GraniteSWAForCausalLM": "granite_swa",  # sinks
    "DeepseekV32ForCausalLM": "deepseek_v32",  # refused everywhere
    "BlipTextLMHeadModel": "blip_text_model",  # would ignore the name
    "T5GemmaForConditionalGeneration": "t5gemma",  # a part with a config of its own type
}


@pytest.mark.parametrize("name", FEW)
def test_a_type_is_as_the_record_says(name):
    cls = next(c for c in model_classes(CONFIG_MAPPING[FEW[name]]) if c.__name__ == name)
    row = sweep.checked(build(cls, cls.config_class))
    assert "wrong" not in json.dumps(row)
    if transformers.__version__ == RECORD["transformers"]:
        assert row in RECORD["types"][FEW[name]]


@pytest.mark.full
def test_every_type_is_as_the_record_says(tmp_path):
    out = tmp_path / "record.json"
    command = [sys.executable, ROOT / "tests/hf/sweep.py", "--out", out]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    found = json.loads(out.read_text())
    assert "wrong: " not in out.read_text()
    if found["transformers"] == RECORD["transformers"]:
        assert found["types"] == RECORD["types"]


def test_the_record_has_every_type_and_nothing_wrong():
    assert "wrong: " not in json.dumps(RECORD)
    if transformers.__version__ == RECORD["transformers"]:
        assert set(RECORD["types"]) == set(CONFIG_MAPPING_NAMES)


def test_the_page_is_the_records():
    done = subprocess.run(
        [sys.executable, "-c", "import families; text = (families.DOCS / 'families.md').read_text()"
         "; assert families.page(text) == text"], cwd=ROOT / "docs", check=False,
    )  # fmt: skip
    assert done.returncode == 0, "run python docs/families.py"


def test_clips_limit_of_77_tokens_is_lifted():
    config = transformers.CLIPTextConfig(
        vocab_size=99, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, eos_token_id=98,
    )  # fmt: skip
    model = transformers.CLIPTextModel(config).eval()
    long = tokens_for(model, length=200)
    with pytest.raises(ValueError, match="must be less than max_position_embeddings"):
        model(**long)
    lists = [ids.tolist() for ids in tokens_for(model, batch=6)["input_ids"]]
    ours = tisa.hf.convert(model, init="zero", calibration=lists)
    assert ours(**long).last_hidden_state.isfinite().all()
    assert ours.config.max_position_embeddings > 10**5
