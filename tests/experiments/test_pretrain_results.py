"""The tables of pretraining in docs/results.md are those of the records."""

import json
from pathlib import Path

from tisa.experiments.extrapolation.tables import markdown as far_tables
from tisa.experiments.pretrain.summary import groups_of, markdown, read_records

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs/records/2026-11-15-pretrain"


def shown(name):
    page = (ROOT / "docs/results.md").read_text()
    return page.split(f"<!-- {name} -->\n")[1].split("<!-- end")[0]


def test_perplexities():
    record = json.loads((FOLDER / "causal/extrapolation.json").read_text())
    made = far_tables(record)
    assert made.strip() == (FOLDER / "causal/extrapolation.md").read_text().strip()
    assert shown("far") in made


def test_losses_of_encoders():
    made = markdown(groups_of(read_records(FOLDER / "encoder-20m/records.jsonl"))).strip()
    # Step times are of runs that shared the GPU, and not shown.
    without = [line.rsplit(" | ", 1)[0].rstrip(" |") + " |" for line in made.splitlines()]
    told = shown("encoder").splitlines()
    assert told[2:] == without[2:]


def test_the_rows_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    found = {g.label: g for g in groups_of(read_records(FOLDER / "encoder-20m/records.jsonl"))}
    names = {"t5": "T5", "rotary": "rotary", "alibi": "ALiBi", "kerple-log": "KERPLE",
             "tisa": "TISA", "near-far": "our `NearFar`", "none": "none"}  # fmt: skip
    (row,) = [line for line in readme.splitlines() if "masked-token loss" in line]
    for label, name in names.items():
        assert f"{name} {found[label].mean:.2f}" in row
    (row,) = [line for line in readme.splitlines() if "read at 8,192: perplexity" in line]
    far = {line.split(" | ")[0][2:]: line.split(" | ") for line in shown("far").splitlines()[2:]}
    for label, (_, trained, *_, longest, _) in far.items():
        if label != "tisa-v2":
            assert f"{names[label].removeprefix('our ')} {longest} ({trained})" in row
