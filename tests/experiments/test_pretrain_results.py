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
