"""What could be written before the tree was rebuilt has its new form in CHANGELOG.md, "Moved".

`before/commands.txt` has the commands of the README, the tutorials and `runs/` of then (commit
77fd3f8). Each is translated by that table and parsed; pages of today are run in `test_docs.py`.
"""

import re
import shlex
from pathlib import Path

import pytest

import printed
import tisa
import tisa.fitting
import tisa.transformer

ROOT = Path(__file__).parent.parent
BEFORE = (ROOT / "tests/before/commands.txt").read_text().splitlines()
TABLE = re.search(
    r"^### Moved\n.*?^\|---\|---\|\n(.*?)\n\n",
    (ROOT / "CHANGELOG.md").read_text(), flags=re.DOTALL | re.MULTILINE,
)  # fmt: skip
ROWS = [
    tuple(cell.strip() for cell in line.strip("| ").split(" | ")) for line in TABLE[1].splitlines()
]
COMMANDS = [
    (shlex.split(before.strip("`")), shlex.split(now.strip("`")))
    for before, now in ROWS
    if before.startswith("`tisa ") and now.startswith("`tisa")
]
PYTHON = [
    now.strip("`") for _, now in ROWS if not now.startswith(("`tisa ", "`tisa-lab ", "`pip "))
]
# Public names of the README, the tutorials and the examples of then.
NAMES = [
    "tisa.ALiBi", "tisa.LanguageModel", "tisa.NearFar", "tisa.ScoringFunction",
    "tisa.SelfAttention",
    "tisa.TISA", "tisa.Transformer", "tisa.TransformerConfig", "tisa.analysis.analyze",
    "tisa.attention", "tisa.fitting.explained", "tisa.fitting.fit_kernels", "tisa.hf.convert",
    "tisa.hf.distil", "tisa.hf.parameter_groups", "tisa.transformer.Cache", "tisa.transformer.load",
    "tisa.transformer.save", "tisa.ops.ring.Ring",
]  # fmt: skip


def translated(line):
    """Return a command of before as the table says that it is written now."""
    line = line.replace("-m tisa.cli pretrain", "-m tisa_lab.cli pretrain")
    words = shlex.split(line)
    if words[0] != "tisa":
        return line
    for before, now in COMMANDS:
        if before[1] != words[1]:
            continue
        words[0] = now[0]
        old, new = ([w for w in side if w.startswith("--")] for side in (before, now))
        gone, come = [w for w in old if w not in new], [w for w in new if w not in old]
        renamed = {w: w for w in old if w in new} | dict(zip(gone, come, strict=True))
        for at, word in enumerate(words):
            if word in renamed:
                words[at] = renamed[word]
                # A value that is written in another way: the row shows both.
                value = before[before.index(word) + 1 :][:1]
                if value and words[at + 1 : at + 2] == value:
                    words[at + 1] = now[now.index(renamed[word]) + 1]
    return shlex.join(words)


@pytest.mark.parametrize("line", BEFORE)
def test_a_command_of_before_is_a_command_now(line):
    printed.check(translated(line))


def test_every_row_is_a_command_or_an_import_that_works(tmp_path):
    for _, now in COMMANDS:
        printed.check(shlex.join(now))
    names = {
        "tisa": tisa, "folder": tmp_path / "model", "tokenizer": None,
        "model": tisa.LanguageModel(tisa.TransformerConfig(
            vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)),
    }  # fmt: skip
    for line in PYTHON:
        # What needs a model of transformers is run in the tutorials and in test_before.py.
        compile(line, "CHANGELOG.md", "exec")
        if "hf." not in line:
            exec(line, names)


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_there(name):
    import tisa.ops.ring

    found = tisa
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    assert callable(found)
