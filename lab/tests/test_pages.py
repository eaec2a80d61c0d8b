"""Pages of records: their numbers are the record's, and they look right in a browser."""

import copy
import json
import re
import shutil
from html import unescape
from pathlib import Path

import pytest

from tisa_lab.criteria import report as criteria
from tisa_lab.extrapolation import page as extrapolation
from tisa_lab.extrapolation.report import table

RECORDS = Path(__file__).parents[2] / "docs/records"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
PAGES = {
    "criteria": (criteria.page_of, "2026-11-19-table1/criteria.json"),
    "extrapolation": (extrapolation.page_of, "2026-11-16-pretrain/causal/extrapolation.json"),
}


def made(kind):
    make, path = PAGES[kind]
    record = json.loads((RECORDS / path).read_text())
    return record, make(record)


def rows_of(page, place):
    """Return the words of every cell of the table in a section."""
    (section,) = re.findall(rf'<section id="{place}">(.*?)</section>', page, re.DOTALL)
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", section, re.DOTALL)
    cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL) for row in rows]
    return [[unescape(re.sub(r"<[^>]+>", " ", cell)).split() for cell in row] for row in cells]


def test_the_page_of_criteria_has_every_mark_and_number():
    record, page = made("criteria")
    rows = rows_of(page, "table")
    assert len(rows) == 1 + len(record["rows"])
    for cells, row in zip(rows[1:], record["rows"], strict=True):
        assert cells[0] == row["row"].split()
        for shown, (criterion, cell) in zip(cells[1:], row["cells"].items(), strict=True):
            assert shown[0] == criteria.mark(cell["mark"])
            differs = cell["paper"] is not None and cell["paper"] != cell["mark"]
            assert (f"({criteria.mark(cell['paper'])})" in shown) == differs
            assert " ".join(shown).endswith(criteria.shown(criterion, cell))
    assert f"{record['agreement']['agree']} of {record['agreement']['of']} marks agree" in page
    assert len(rows_of(page, "sensitivity")) == 1 + len(record["sensitivity"])
    for row in record["rows"]:
        for cell in row["cells"].values():
            assert cell["evidence"] in unescape(page)


def test_the_page_of_extrapolation_has_the_numbers_of_the_tables():
    record, page = made("extrapolation")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    for mode in ("whole", "sliding"):
        expected = [[cell.split() for cell in row] for row in table(record, mode)]
        assert rows_of(page, mode) == expected
        lengths = {len(line["xs"]) for line in data["charts"][mode]["lines"]}
        assert lengths == {1, 5}
    assert [line["name"] for line in data["charts"]["whole"]["lines"]] == data["names"]
    # Nothing could be read: no charts, and no error.
    empty = copy.deepcopy(record)
    for run in empty["runs"]:
        run["rows"] = [{"length": 512, "mode": "whole", "refused": "<b>why</b>"}]
    page = extrapolation.page_of(empty)
    assert "data-chart=" not in page
    assert "&lt;b&gt;why&lt;/b&gt;" in page


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt install chromium")
@pytest.mark.parametrize("kind", PAGES)
def test_it_looks_right_in_a_browser(kind, tmp_path):
    """No errors, nothing asked of the network, nothing wider than the screen, all drawn."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright here")
    record, text = made(kind)
    (tmp_path / "index.html").write_text(text)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width, scheme in ((1400, "light"), (400, "dark")):
            wrong = []
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.on("console", lambda m, w=wrong: w.append(m.text))
            page.on("pageerror", lambda e, w=wrong: w.append(str(e)))
            page.on(
                "request",
                lambda r, w=wrong: w.append(r.url) if not r.url.startswith("file:") else None,
            )
            page.goto((tmp_path / "index.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            ground = "getComputedStyle(document.body).backgroundColor"
            assert (page.evaluate(ground) == "rgb(16, 19, 24)") == (scheme == "dark")
            page.locator("#theme").click()
            assert (page.evaluate(ground) == "rgb(16, 19, 24)") == (scheme != "dark")
            if kind == "criteria":
                # Of Table 1 no column is cut: on a phone every method is a card.
                inside = "e => e.scrollWidth <= e.clientWidth"
                assert page.locator(".scroll:has(#marks)").evaluate(inside)
                ends = "all => Math.max(...all.map(e => e.getBoundingClientRect().right))"
                assert page.locator("#marks td").evaluate_all(ends) <= width
                named = "e => getComputedStyle(e, '::after').content"
                criterion = page.locator("#marks td").nth(1).evaluate(named)
                assert criterion == ('"inductive"' if width == 400 else "none")
            if kind == "extrapolation":
                assert page.locator("[data-chart] svg[aria-label]").count() == 3
                methods = len({run["label"] for run in record["runs"]})
                assert page.locator('[data-chart="sliding"] g path').count() == methods
                assert page.locator(".legend span").count() == methods
                page.locator('[data-chart="whole"] svg').hover()
                said = page.locator('[data-chart="whole"] .readout').inner_text()
                assert re.fullmatch(r"[\w-]+, tokens \d+: \d+\.\d+", said), said
            assert wrong == []
            page.close()
        browser.close()
