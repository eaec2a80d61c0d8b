"""What was saved before the tree was rebuilt (commit 77fd3f8) loads, and gives the numbers of then.

`before/` was written by that commit: tiny converted models of four families, one with the code for
people without the package beside it, a transformer of our own, and `outputs.json`, what they gave.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import tiny
import tisa
import tisa.transformer

BEFORE = Path(__file__).parent / "before"
OUTPUTS = json.loads((BEFORE / "outputs.json").read_text())
FAMILIES = {
    "bert": transformers.AutoModelForMaskedLM, "albert": transformers.AutoModelForMaskedLM,
    "mpnet": transformers.AutoModelForMaskedLM, "gpt2": transformers.AutoModelForCausalLM,
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", ["load", "Auto class"])
def test_a_converted_model(family, way):
    if way == "load":
        model = tisa.hf.load(str(BEFORE / family))
    else:
        tisa.hf.register()
        model = FAMILIES[family].from_pretrained(BEFORE / family)
    found = tiny.logits(model.eval(), **tiny.inputs())[:, 1, :8]
    torch.testing.assert_close(found, torch.tensor(OUTPUTS[family]), rtol=1e-4, atol=1e-4)


def test_a_converted_model_without_the_package(tmp_path):
    """With the code that was written beside it then."""
    program = (
        "import sys, json; sys.modules['tisa'] = None\n"
        "import torch, transformers, tiny_inputs\n"
        f"model = transformers.AutoModelForMaskedLM.from_pretrained({str(BEFORE / 'bert')!r},\n"
        "    trust_remote_code=True).eval()\n"
        "with torch.no_grad():\n"
        "    found = model(**{k: torch.tensor(v) for k, v in tiny_inputs.INPUTS.items()}).logits\n"
        "print(json.dumps(found[:, 1, :8].tolist()))\n"
    )
    inputs = {name: value.tolist() for name, value in tiny.inputs().items()}
    (tmp_path / "tiny_inputs.py").write_text(f"INPUTS = {inputs!r}\n")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": "."},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = torch.tensor(json.loads(done.stdout.splitlines()[-1]))
    torch.testing.assert_close(found, torch.tensor(OUTPUTS["bert"]), rtol=1e-4, atol=1e-4)


def test_a_transformer_of_our_own():
    model = tisa.transformer.load(BEFORE / "transformer").eval()
    with torch.no_grad():
        found = model(torch.arange(24).reshape(2, 12))
    found = getattr(found, "logits", found)[:, 1, :8]
    torch.testing.assert_close(found, torch.tensor(OUTPUTS["transformer"]), rtol=1e-4, atol=1e-4)
