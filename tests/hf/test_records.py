"""The numbers about conversion in docs are those of the records."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SENTENCES = ("STS-B dev Spearman", "cosine to original", "order-match", "order-match, shuffles")
# What the columns are; the times of runs beside other work are in no table.
RECORDS = {
    "minilm": (*SENTENCES, "processor_seconds"),
    "minilm-gpu": SENTENCES,
    "rxnmapper": ("masked-token accuracy", "seconds"),
    "rxnmapper-seeds": ("masked-token accuracy",),
}


def record_of(name):
    return json.loads((ROOT / f"docs/records/2026-11-15-{name}.json").read_text())


def table(name):
    """Return the cells of each row between the comments of that name."""
    text = (ROOT / "docs/huggingface.md").read_text()
    lines = text.split(f"<!-- {name} -->")[1].split(f"<!-- end of {name} -->")[0].splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[3:]]


@pytest.mark.parametrize("name", RECORDS)
def test_tables_are_those_of_the_record(name):
    record = record_of(f"conversion-{name}")
    expected = []
    for row in record["rows"]:
        cells = [row.get(key, "") for key in RECORDS[name]]
        shown = [
            f"{cell:.4f}" if cell != "" and "seconds" not in key else str(cell)
            for key, cell in zip(RECORDS[name], cells, strict=True)
        ]
        expected.append([row["variant"], *shown])
    assert table(name) == expected
    assert record["versions"]["torch"] in (ROOT / "docs/huggingface.md").read_text()
    assert re.fullmatch("[0-9a-f]{7,}", record["commit"]), "made from a commit, not from changes"


@pytest.mark.parametrize(
    ("name", "shown"),
    [("minilm", "| {} as published | [{}]("),
     ("rxnmapper", "| {} as published | {} without training")],
)  # fmt: skip
def test_the_results_have_the_numbers_of_the_record(name, shown):
    rows = {row["variant"]: row for row in record_of(f"conversion-{name}")["rows"]}
    before, after = (rows[v][RECORDS[name][0]] for v in ("original", "fold + fit, S = 5"))
    assert shown.format(f"{before:.4f}", f"{after:.4f}") in (ROOT / "docs/results.md").read_text()


def test_the_results_have_the_control_beside_the_score():
    """Most of STS-B needs no order: what a model without any has, and what tells them apart."""
    rows = {row["variant"]: row for row in record_of("conversion-minilm")["rows"]}
    fitted, control = rows["fold + fit, S = 5"], rows["fold, no scores"]
    results = (ROOT / "docs/results.md").read_text()
    assert f"{control['STS-B dev Spearman']:.4f} without any order" in results
    cosine, match = (
        [row[name] for row in (fitted, control)] for name in ("cosine to original", "order-match")
    )
    assert f"cosine {cosine[0]:.3f} (without order {cosine[1]:.3f})" in results
    assert f"order-match {match[0]:.3f} ({match[1]:.3f})" in results


def test_the_range_of_distilled_runs_is_that_of_the_records():
    rows = (
        record_of("conversion-rxnmapper")["rows"],
        record_of("conversion-rxnmapper-seeds")["rows"],
    )
    runs = [
        row["masked-token accuracy"] for row in rows[0] + rows[1] if "distilled" in row["variant"]
    ]
    assert len(runs) == 7
    text = " ".join((ROOT / "docs/huggingface.md").read_text().split())
    assert f"{min(runs):.3f} to {max(runs):.3f} over seven runs" in text
    results = (ROOT / "docs/results.md").read_text()
    assert f"{min(runs):.3f} to {max(runs):.3f} distilled (seven runs)" in results


def test_records_are_named_and_name_no_place():
    text = (ROOT / "docs/huggingface.md").read_text()
    for path in (ROOT / "docs/records").glob("*conversion-*.json"):
        assert f"records/{path.name}" in text
        assert not re.search(r"(^|\s)/", json.loads(path.read_text())["command"])


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
    for name in ("minilm-time", "rxnmapper"):
        rows = [row for row in record_of(f"conversion-{name}")["rows"] if "seconds" in row]
        assert len(rows) == 2
        for row in rows:
            assert f"{row['seconds']} s" in text


def test_the_table_of_times_is_that_of_the_benchmark():
    record = json.loads((ROOT / "benchmarks/results/2026-11-20-converted-gpu.json").read_text())
    found: dict[str, list[str]] = {}
    for row in record["rows"]:
        cells = found.setdefault(f"{row['contender']}, {row['mode']}", [])
        cells.append(f"{row['ms']['p50']:.1f} ({row['x stock sdpa']:.2f} ×)")
    assert {name: cells for name, *cells in table("fast")} == found
    # What the page says of them.
    page = " ".join((ROOT / "docs/huggingface.md").read_text().split())
    for mode, said in (
        ("step", "a training step takes {} to {} times"), ("forward", "a forward pass {} to {}")
    ):  # fmt: skip
        times = [
            row["x stock sdpa"] for row in record["rows"]
            if row["contender"] == "converted, tisa" and row["mode"] == mode
        ]  # fmt: skip
        assert said.format(*(f"{x:.2f}" for x in (min(times), max(times)))) in page


def test_the_table_of_other_functions_is_that_of_the_record():
    source = importlib.util.spec_from_file_location("tables", ROOT / "docs/tables.py")
    tables = importlib.util.module_from_spec(source)
    source.loader.exec_module(tables)
    page = (ROOT / "docs/huggingface.md").read_text()
    assert tables.page(page, tables.PAGES["huggingface.md"]) == page, "run: python docs/tables.py"
    rows = {row["scoring"]: row for row in tables.SCORED["rows"]}
    # What the page says of them.
    assert not tables.SCORED["uncommitted_changes"]
    assert tables.SCORED["fitted_on"] == 60
    assert tables.SCORED["measured_on"] == 40
    kernels = rows["tisa"]["divergence"]
    for name in ("near-far", "t5"):
        assert abs(rows[name]["divergence"] / kernels - 1) < 0.02
    for name in ("kerple-log", "kerple-power"):
        assert kernels < rows[name]["divergence"] < rows["tisa:num_kernels=0"]["divergence"]
    assert rows["alibi"]["divergence"] > rows["tisa:num_kernels=0"]["divergence"]


def test_what_is_said_of_a_part_of_the_positions_is_so():
    """At most 48 vectors, untrained: nearer than without at every length, in every word order."""
    folder = ROOT / "docs/records"
    for name, kept, bare in (
        ("minilm", "48 places, S = 5", "0 places, S = 5"),
        ("mpnet", "48 places, own table", "0 places, own table"),
    ):
        record = json.loads((folder / f"2026-11-19-extend-{name}.json").read_text())
        assert re.fullmatch("[0-9a-f]{7,}", record["commit"]), "made from a commit"
        rows = {row["variant"]: row for row in record["rows"]}
        near, far = (rows[variant]["cosine by length"] for variant in (kept, bare))
        assert all(near[length] > far[length] for length in near)
        assert min(near.values()) >= 0.98
        assert min(rows[kept]["order-match by order"]) >= 0.99
        faded, held = (
            rows[variant]["cosine beyond the table"] for variant in (kept, f"{kept}, held")
        )
        assert all(faded[length][0] > held[length][0] for length in faded)
        if name == "minilm":
            assert rows[kept]["processor_seconds"] < 90
            places = rows["48 places, 0 kernels"]["cosine by length"]
            assert all(near[length] > places[length] for length in near)
