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


@pytest.mark.parametrize("name", ["length", "length-first"])
def test_the_table_by_length_is_that_of_the_record(name):
    record = json.loads((ROOT / f"docs/records/2026-11-15-conversion-{name}.json").read_text())
    text = (ROOT / "docs/huggingface.md").read_text()
    for row in record["rows"]:
        values = [*row["cosine by length"].values(), row["STS-B dev Spearman"]]
        cells = " | ".join(f"{value:.4f}" for value in values)
        assert f"| {row['variant']} | {cells} |" in text, row
    assert re.fullmatch("[0-9a-f]{7,}", record["commit"])


def test_the_table_of_documents_is_that_of_the_record():
    record = json.loads((ROOT / "docs/records/2026-11-15-conversion-length.json").read_text())
    text = (ROOT / "docs/huggingface.md").read_text()
    table = text.split("<!-- documents -->")[1].split("<!-- end of documents -->")[0]
    rows = [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
    assert len(rows) == 4
    for name, first, rank, *_ in rows:
        owner = "S5" if name.startswith("original") else name.split(",")[0]
        documents = record[f"{owner}: documents"]
        assert documents["documents"] == 200
        assert f"{documents[name]['found first']:.3f}" == first
        assert f"{documents[name]['mean reciprocal rank']:.4f}" == rank


def test_the_table_of_the_residual_is_that_of_the_record():
    record = json.loads((ROOT / "docs/records/2026-11-15-length-residual.json").read_text())
    text = (ROOT / "docs/huggingface.md").read_text()
    table = text.split("<!-- residual -->")[1].split("<!-- end of residual -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[3:]]
    assert len(rows) == 5
    for name, *cells in rows:
        found = [by.get(name) for by in record["rows"].values()]
        assert cells == ["" if value is None else f"{value:.4f}" for value in found]


def test_times_are_those_of_the_records():
    text = (ROOT / "docs/huggingface.md").read_text()
    for name in ("minilm", "rxnmapper"):
        path = ROOT / f"docs/records/2026-11-15-conversion-{name}-time.json"
        rows = [row for row in json.loads(path.read_text())["rows"] if "seconds" in row]
        assert len(rows) == 2
        for row in rows:
            assert f"{row['seconds']} s" in text
