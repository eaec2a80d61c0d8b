"""The tables in docs/results.md are those of the records."""

import json
from pathlib import Path

from tisa_lab.glue.cell import Record
from tisa_lab.glue.numbers import summary
from tisa_lab.glue.report import markdown
from tisa_lab.sweep import Records

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs/records/2026-11-15-table3"


def test_the_report_is_made_of_the_records():
    records = Records(FOLDER, Record).all()
    assert len(records) == 399
    assert all(not r.surroundings["uncommitted_changes"] for r in records)
    assert markdown(summary(records), records) == (FOLDER / "table3.md").read_text()


def test_every_row_in_the_documentation_is_one_of_the_report():
    report = (FOLDER / "table3.md").read_text().splitlines()
    section = (ROOT / "docs/results.md").read_text().split("## Table 3")[1].split("\n## ")[0]
    # Shares, without MNLI-10k's, are written by docs/tables.py (test_pretrain_results.py).
    before, _, rest = section.partition("<!-- shares -->")
    section = before + rest.partition("<!-- end of shares -->")[2]
    rows = [line for line in section.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(rows) > 18
    for row in rows:
        assert row in report, row


def test_the_shares_beside_the_papers_are_those_of_the_report():
    report = (FOLDER / "table3.md").read_text().splitlines()
    (row,) = [x for x in report if x.startswith("| given back: folded, S = 5, fitted |")]
    sst2, _, _, cola, _ = [cell.split(" [")[0] for cell in row.strip("| ").split(" | ")[1:]]
    results = (ROOT / "docs/results.md").read_text()
    assert f"{sst2} on SST-2, {cola} on CoLA (MiniLM" in results
    (row,) = [x for x in report if x.startswith("| Δ (its S) |") and "S = 3" in x]
    gains = [float(cell.split(" [")[0]) for cell in row.strip("| ").split(" | ")[1:]]
    assert f"{min(gains):.1f} to {max(gains):.1f} points, within the spread" in results


def test_shares_in_the_text_are_those_of_the_report_and_none_is_of_mnli():
    page = " ".join((ROOT / "docs/results.md").read_text().split())
    report = (FOLDER / "table3.md").read_text().splitlines()
    found = {}
    for name in ("fitted", "fitted, distilled 200"):
        (row,) = [x for x in report if x.startswith(f"| given back: folded, S = 5, {name} |")]
        cells = [cell.split(" [")[0] for cell in row.strip("| ").split(" | ")[1:]]
        found[name] = dict(zip(("sst-2", "mnli", "sts-b", "cola", "rte"), cells, strict=True))
        assert found[name]["mnli"] not in page
    told = found["fitted, distilled 200"]
    assert f"text {told['cola']} on CoLA and {told['sst-2']} on SST-2" in page
    told = found["fitted"]
    assert f"Without distillation it is {told['cola']} and {told['sst-2']}." in page


def test_the_table_of_speeds_is_that_of_the_benchmarks():
    page = (ROOT / "docs/glue.md").read_text()
    shown = page.split("<!-- fast -->\n")[1].split("<!-- end")[0].splitlines()
    names = ("2026-11-15-glue", "2026-11-15-glue-512-rows")
    first, second = (
        json.loads((ROOT / f"benchmarks/results/{name}.json").read_text()) for name in names
    )
    columns = [first["throughput"]["MODEL, sst-2"]]
    for record in (first, second):
        columns += [record["throughput"][f"BERT of base size, {t}"] for t in ("sst-2", "mnli-10k")]
    for line in shown[2:]:
        name, *told = line.strip("| ").split(" | ")
        for entry, cell in zip(columns, told, strict=True):
            if name in entry["variants"]:
                step = entry["variants"][name]["ms_per_step"]
                stock = entry["variants"]["stock"]["ms_per_step"]
                rate = 1000 * entry["rows a step"] / step
                assert cell == f"{rate:,.0f} ({stock / step:.2f} ×)"
            else:
                ratios = [entry["ratios"][f"S = 5 over S = 0, step{x}"] for x in ("", ", packed")]
                assert cell == ", ".join(f"{r:.2f}" for r in ratios)
    assert len(shown) == 2 + 6
    ratio = first["cells"]["ratio"]
    assert f": {ratio:.1f} times as many" in page
