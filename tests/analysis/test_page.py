"""The page in a browser: no errors, controls work, numbers are those of the JSON.

Needs Chromium (Debian: `apt install chromium`), driven by Playwright. TISA_SCREENSHOTS=folder
keeps what it looks like.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from little_models import model_of
from tisa.analysis import analyze
from tisa.analysis.page import page_of
from tisa.analysis.report import numbers_of_all

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt install chromium"),
]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright here")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A page with three models: two with tables, one with learned curves; and its numbers."""
    root = tmp_path_factory.mktemp("page")
    found = []
    for family in ("BERT", "ALBERT", "T5"):
        model_of(family).save_pretrained(root / family)
        found.append(analyze(root / family))
    numbers = numbers_of_all(found)
    (root / "index.html").write_text(page_of(found, numbers))
    one = numbers_of_all(found[:1])
    (root / "one.html").write_text(page_of(found[:1], one))
    return root, numbers, found


@pytest.fixture
def page(browser, report):
    opened = browser.new_page(viewport={"width": 1400, "height": 900})
    wrong = []
    opened.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    opened.on("pageerror", lambda e: wrong.append(str(e)))
    opened.on("request", lambda r: wrong.append(r.url) if not r.url.startswith("file:") else None)
    opened.goto((report[0] / "index.html").as_uri())
    yield opened
    assert wrong == []
    opened.close()


def text(page, selector):
    return page.locator(selector).first.inner_text()


def test_numbers_on_the_page_are_those_of_the_json(page, report):
    numbers = report[1]["models"]
    for column, model in enumerate(numbers[:2]):
        panel = page.locator('[data-panel="summary"] .panel').nth(column)
        shown = panel.locator('[data-number="toeplitz.table.r2"]').inner_text()
        assert float(shown) == pytest.approx(model["toeplitz"]["table"]["r2"], abs=5e-4)
        dims = panel.locator('[data-number="pca"]').inner_text()
        assert dims == f"{model['pca']['dimensions_90']} of {model['width']}"
        cells = panel.locator("tbody tr").nth(3).locator("td").all_inner_texts()
        read = model["toeplitz"]["as_read"]
        for cell, name in zip(
            cells[1:], ("r2", "null", "off_diagonal", "off_diagonal_null"), strict=True
        ):
            assert float(cell) == pytest.approx(read[name], abs=5e-4)


def test_every_entry_of_a_map_can_be_read(page, report):
    """With the arrow keys, and with the pointer: the entry of P itself."""
    table = report[2][0].model.positions
    gram = table @ table.T
    panel = page.locator('[data-panel="gram"] .panel').first
    canvas = panel.locator("canvas")
    canvas.focus()
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    said = panel.locator(".readout").inner_text()
    row, column = 16 + 3, 16 - 1
    assert said.startswith(f"P[{row}, {column}] = ")
    value = float(said.split("= ")[1].split(" ")[0].replace("−", "-"))
    assert value == pytest.approx(float(gram[row, column]), rel=2e-3, abs=2e-3)
    box = canvas.bounding_box()
    canvas.hover(position={"x": box["width"] * 5.5 / 32, "y": box["height"] * 30.5 / 32})
    assert panel.locator(".readout").inner_text().startswith("P[30, 5] = ")


def test_views_of_p_can_be_chosen(page):
    for view in ("its Toeplitz fit", "what the fit leaves", "the table E_P"):
        before = page.evaluate("document.querySelector('[data-panel=gram] canvas').toDataURL()")
        page.get_by_role("radio", name=view).click()
        after = page.evaluate("document.querySelector('[data-panel=gram] canvas').toDataURL()")
        assert before != after
        assert page.get_by_role("radio", name=view).get_attribute("aria-checked") == "true"
    page.get_by_role("radio", name="the table E_P").press("ArrowRight")
    assert page.get_by_role("radio", name="P", exact=True).get_attribute("aria-checked") == "true"


def test_layer_and_head_update_curve_map_and_numbers(page, report):
    numbers = report[1]["models"][0]
    page.select_option("#layer", label="layer 2")
    page.select_option("#head", label="3")
    panel = page.locator('[data-panel="heads"] .panel').first
    about = panel.locator("[data-head-about]").inner_text()
    found = numbers["layers_as_read"][1]
    assert f"R² {found['r2'][2]:.3f}" in about
    assert ("position-sensitive" in about) == found["sensitive"][2]
    curve = panel.locator(".curve").get_attribute("d")
    areas = panel.locator(".kernel-area").count()
    assert areas == 5
    page.locator("#kernels").fill("2")
    assert panel.locator(".kernel-area").count() == 2
    assert text(page, "#kernels-out") == "2"
    explained = 100 * numbers["kernels_near"][1]["r2"][2][2]
    said = panel.inner_text().split("2 kernels explain ")[1].split(" ")[0]
    assert float(said) == pytest.approx(explained, abs=0.06)
    chosen = panel.locator('.grid-heads [aria-checked="true"]')
    chosen.press("ArrowLeft")
    assert page.locator("#head").input_value() == "1"
    assert panel.locator(".curve").get_attribute("d") != curve
    page.select_option("#source", label="weights, raw product")
    assert "layer 1" in panel.inner_text()


def test_the_map_of_a_head_is_the_models_own(page, report):
    """F̂_P is computed in the page from the packed tables: entry by entry what Python has."""
    found = report[2][0]
    page.select_option("#layer", label="layer 1")
    page.select_option("#head", label="1")
    entry = page.evaluate(
        "(() => { const m = DATA.models[0], s = m.sources[0]; "
        "return headMap(m, s, 0, 0).entry(3, 20); })()"
    )
    a = found.reading.table[3] @ found.model.query[0, 0]
    b = found.reading.table[20] @ found.model.key[0, 0]
    assert entry == pytest.approx(float(a @ b) * 8**-0.5, rel=5e-3, abs=5e-3)


def test_two_models_stand_side_by_side(page):
    assert page.locator('[data-panel="gram"] .panel').count() == 2
    boxes = [page.locator('[data-panel="gram"] .panel').nth(i).bounding_box() for i in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"]
    page.select_option("#model-b", label="nothing")
    assert page.locator('[data-panel="gram"] .panel').count() == 1
    page.select_option("#model-b", label="T5")
    assert (
        "has no table of positions"
        in page.locator('[data-panel="gram"] .panel').nth(1).inner_text()
    )
    assert page.locator('[data-panel="heads"] .panel').nth(1).locator(".curve").count() == 1


def test_a_decoders_curve_ends_at_0(page):
    page.select_option("#model-a", label="T5")
    page.select_option("#model-b", label="nothing")
    panel = page.locator('[data-panel="heads"] .panel').first
    for layer, last in (("decoder layer 1", "0"), ("encoder layer 1", "64")):
        page.select_option("#layer", label=layer)
        figure = panel.locator("svg", has=page.locator(".curve"))
        assert f"over offsets from −64 to {last}." in figure.get_attribute("aria-label")
        assert "NaN" not in panel.locator(".curve").get_attribute("d")
        entry = page.evaluate(
            "(() => { const m = DATA.models[2]; "
            "return headMap(m, m.sources[0], state.layer, 0).entry(3, 9); })()"
        )
        assert (entry is None) == (last == "0")


def test_the_playground_follows_the_pointer_and_the_keyboard(page):
    page.get_by_role("button", name="the word before").click()
    words = page.locator("#words button")
    words.nth(6).click()
    assert "%" in words.nth(5).inner_text()
    before = [t.split("\n")[-1] for t in words.all_inner_texts()]
    assert max(before, key=lambda t: float(t.split(" ")[0])) == before[5]
    page.locator("#play-curve").scroll_into_view_if_needed()
    handle = page.locator('#play-curve [data-kernel="0"]').bounding_box()
    x, y = handle["x"] + handle["width"] / 2, handle["y"] + handle["height"] / 2
    width = page.locator("#play-curve svg").bounding_box()["width"]
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 3 * (900 - 58) / 24 * width / 900, y, steps=5)  # three offsets to the right
    page.mouse.up()
    after = [t.split("\n")[-1] for t in words.all_inner_texts()]
    assert max(after, key=lambda t: float(t.split(" ")[0])) == after[8]
    slider = page.locator('[data-slider="0-a"]')
    slider.focus()
    line = page.locator("#play-line").get_attribute("d")
    slider.press("ArrowRight")
    assert page.locator("#play-line").get_attribute("d") != line
    page.get_by_role("button", name="+ kernel").click()
    assert page.locator("#play-sliders .kernel").count() == 2
    page.locator("#sentence").fill("one two three")
    assert words.count() == 3
    page.locator("#causal").check()
    words.nth(0).click()
    assert words.nth(2).inner_text().endswith("0")
    page.get_by_role("button", name="take the head chosen above").click()
    assert page.locator("#play-sliders .kernel").count() == 5


def test_everything_has_a_name_and_the_theme_changes(page):
    assert page.locator("canvas:not([aria-label]), svg:not([aria-label])").count() == 0
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, select')].filter("
        "e => !e.labels.length && !e.getAttribute('aria-label')).length"
    )
    assert unnamed == 0
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["index", "one"])
def test_it_looks_right(browser, report, width, scheme, name):
    """Nothing is wider than the screen, nothing is empty, and maps have their colours."""
    opened = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    opened.goto((report[0] / f"{name}.html").as_uri())
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    empty = opened.evaluate(
        "[...document.querySelectorAll('[data-panel]')].filter(e => !e.innerText).length"
    )
    assert empty == 0
    colours = opened.evaluate(
        "(() => { const c = document.querySelector('[data-panel=gram] canvas');"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "return new Set(new Uint32Array(d.buffer)).size; })()"
    )
    assert colours > 30
    dark = opened.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 19, 24)"
    assert dark == (scheme == "dark")
    if "TISA_SCREENSHOTS" in os.environ:
        folder = Path(os.environ["TISA_SCREENSHOTS"])
        folder.mkdir(parents=True, exist_ok=True)
        opened.screenshot(path=folder / f"{name}-{width}-{scheme}.png", full_page=True)
    opened.close()


def test_a_twelve_layer_model_stays_under_five_megabytes(tmp_path):
    """A model of BERT base's shape: 12 layers, 12 heads, 512 positions, 768 wide."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.BertConfig(intermediate_size=16, vocab_size=100)
    hf.AutoModel.from_config(config).save_pretrained(tmp_path)
    found = analyze(tmp_path)
    numbers = numbers_of_all([found])
    page = page_of([found], numbers)
    assert len(page.encode()) < 5e6
    assert len(json.dumps(numbers)) < 2e6
