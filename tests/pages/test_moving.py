"""A phrase that is dragged through a sentence: shares are the data's, with scripts and without."""

import re
import shutil
from html import unescape

import pytest

from page_numbers import other, told, untraced
from tisa.pages import moving_phrase

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
PHRASE, WORDS = ["who", "saw", "whom"], ["once", "upon", "a", "time"]
# Rows for each place and word of the phrase; the second word moves most, at the second place.
TABLE = [
    [[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.25, 0.25, 0.5]],
    [[0.4, 0.4, 0.2], [0.6, 0.3, 0.1], [0.25, 0.35, 0.4]],
    [[0.5, 0.2, 0.3], [0.3, 0.1, 0.6], [0.35, 0.25, 0.4]],
]
STILL = [[[0.2, 0.3, 0.5], [0.4, 0.35, 0.25], [0.1, 0.8, 0.1]]] * 3
FOUND = {
    "words": WORDS, "phrase": PHRASE, "layer": 1, "head": 7,
    "attention": {"table": TABLE, "tisa": STILL}, "mean": {"table": 0.062, "tisa": 0.0},
}  # fmt: skip


def made(found=FOUND, before=4096, after=120, model="a model"):
    return str(moving_phrase(found, model=model, before=before, after=after))


def share(x):
    return f"{100 * x:.0f} %"


def away(name, at, word):
    rows = FOUND["attention"][name]
    return sum(abs(x - y) for x, y in zip(rows[at][word], rows[0][word], strict=True)) / 2


def test_without_scripts_two_places_are_shown():
    _, first, second = made().partition('<p class="about">')[0].split('<div class="state">')
    for state, at in ((first, 0), (second, 1)):
        text = told(state)
        assert " ".join(text[: 2 + len(PHRASE)]) == " ".join(
            [*WORDS[: at + 1], *PHRASE, *WORDS[at + 1 :]]
        )
        table, tisa = state.split('class="model ')[1:]
        parts = ((table, TABLE, [0, 0.6][at], "4,096"), (tisa, STILL, 0, "120"))
        for part, rows, moved, numbers in parts:
            assert re.findall(r"<b>(\d+ %)</b>(\w+)", part) == [
                (share(x), word) for x, word in zip(rows[at][1], PHRASE, strict=True)
            ]
            assert f"{numbers} numbers" in part
            assert f'<b class="moved">{share(moved)}</b> has moved' in part
            # As high as the largest share of both, 0.8.
            heights = [float(h) for h in re.findall(r"height:([\d.]+)%", part)]
            assert heights == pytest.approx([100 * x / 0.8 for x in rows[at][1]], abs=0.006)


def test_every_number_that_is_told_follows_the_data():
    before = told(made())
    after = told(made(other(FOUND), *other([4096, 120])))
    # What has not moved has moved by 0 in both.
    assert set(untraced(before, after, [])) == {("0", "0 %")}
    about = unescape(" ".join(before))
    assert "in a model, layer 1, head 7" in about
    assert "With the table up to 60 % of this attention moves, with TISA up to 0 %" in about
    assert "all heads and places is 6.2 % and 0.0 %" in about


def test_a_name_cannot_run_script():
    assert "<script>alert" not in made(model="</script><script>alert(1)</script>")
    page = made(FOUND | {"phrase": ["</script><script>alert(1)", "saw", "whom"]})
    assert page.count("<script") == page.count("</script>") == 2


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt install chromium")
def test_it_is_moved_with_pointer_finger_and_keys(tmp_path):
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright here")
    (tmp_path / "page.html").write_text("<!doctype html><title>t</title>" + made())
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width in (1400, 260):
            context = browser.new_context(viewport={"width": width, "height": 900}, has_touch=True)
            page, wrong = context.new_page(), []
            page.on("console", lambda m, w=wrong: w.append(m.text))
            page.on("pageerror", lambda e, w=wrong: w.append(str(e)))
            page.goto((tmp_path / "page.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width

            def check(at, word, page=page):
                read = page.locator(".text").inner_text().split()
                assert read == [*WORDS[: at + 1], *PHRASE, *WORDS[at + 1 :]]
                for name, rows in FOUND["attention"].items():
                    model = page.locator(f".model.{name}")
                    assert model.locator(".moved").inner_text() == share(away(name, at, word))
                    shown = model.locator('[role="listitem"] b').all_inner_texts()
                    assert shown == [share(x) for x in rows[at][word]]
                said = page.locator("input").get_attribute("aria-valuetext")
                assert f"attention of {PHRASE[word]} {share(away('table', at, word))} has" in said
                assert f"the table, {share(away('tisa', at, word))} with TISA" in said

            assert page.locator(".state").count() == 1
            check(1, 1)
            page.locator("input").focus()
            for key, at in (("ArrowRight", 2), ("Home", 0), ("ArrowRight", 1)):
                page.keyboard.press(key)
                check(at, 1)
            page.locator('[role="radio"]').nth(1).press("ArrowRight")
            check(1, 2)
            page.locator('[role="radio"]').first.click()
            check(1, 0)
            assert "who" in page.locator(".ask").inner_text()
            most = max(away("table", at, 0) for at in range(3))
            assert page.locator(".most").first.inner_text() == share(most)
            # Held by its second word, to where that word stands at another place.
            word = page.locator("mark span").nth(1)
            middle = "e => { const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; }"  # noqa: E501
            places = {}
            for at in range(3):
                page.evaluate(
                    "at => { const s = document.querySelector('input'); s.value = at;"
                    "s.dispatchEvent(new Event('input')); }", at,
                )  # fmt: skip
                places[at] = word.evaluate(middle)
            for at in (0, 2, 1):
                page.mouse.move(*word.evaluate(middle))
                page.mouse.down()
                page.mouse.move(*places[at], steps=4)
                page.mouse.up()
                check(at, 0)
            finger = context.new_cdp_session(page)
            for at in (2, 0):
                ways = (("touchStart", word.evaluate(middle)), ("touchMove", places[at]))
                for kind, (x, y) in ways:
                    points = [{"x": x, "y": y}]
                    finger.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
                finger.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
                check(at, 0)
            assert wrong == []
            context.close()
        browser.close()
