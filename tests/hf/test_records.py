"""The numbers about conversion in docs and README are those of the records."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
RECORDS = {
    "minilm": ("STS-B dev Spearman", "cosine to original", "order-match", "order-match, shuffles"),
    "rxnmapper": ("masked-token accuracy",),
}


@pytest.mark.parametrize("name", RECORDS)
def test_tables_are_those_of_the_record(name):
    record = json.loads((ROOT / f"docs/records/2026-11-15-conversion-{name}.json").read_text())
    text = (ROOT / "docs/huggingface.md").read_text()
    readme = (ROOT / "README.md").read_text()
    for row in record["rows"]:
        cells = " | ".join(f"{row[key]:.4f}" for key in RECORDS[name])
        assert f"| {row['variant']} | {cells} |" in text, row
    fitted = next(row for row in record["rows"] if row["variant"] == "fold + fit, S = 5")
    assert f"{fitted[RECORDS[name][0]]:.4f}" in readme
    assert record["versions"]["torch"] in text
    assert re.fullmatch("[0-9a-f]{7,}", record["commit"]), "made from a commit, not from changes"


def test_the_table_by_length_is_that_of_the_record():
    record = json.loads((ROOT / "docs/records/2026-11-15-conversion-length.json").read_text())
    text = (ROOT / "docs/huggingface.md").read_text()
    for row in record["rows"]:
        values = [*row["cosine by length"].values(), row["STS-B dev Spearman"]]
        cells = " | ".join(f"{value:.4f}" for value in values)
        assert f"| {row['variant']} | {cells} |" in text, row
    assert re.fullmatch("[0-9a-f]{7,}", record["commit"])
