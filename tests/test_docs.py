"""The pages: the site builds strictly, no link in it is broken, the tutorials run as printed."""

import html
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import printed

ROOT = Path(__file__).parent.parent
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
GUIDES = sorted((ROOT / "docs/howto").glob("*.md"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
OTHERS = [ROOT / "README.md", ROOT / "docs/attention.md", ROOT / "docs/start.md"]

# The elements of a page that stand beyond the screen's right edge, in no box that scrolls.
BEYOND = """() => {
  const edge = document.documentElement.clientWidth + 1, found = [];
  const alone = (e) => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
  const scrolls = (e) => e && (alone(e) || scrolls(e.parentElement));
  if (document.documentElement.scrollWidth > edge) found.push("the page");
  for (const e of document.querySelectorAll(".md-content *"))
    if (e.getBoundingClientRect().right > edge && e.checkVisibility() && !scrolls(e.parentElement))
      found.push(e.outerHTML.slice(0, 80));
  return found;
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


class Links(HTMLParser):
    """Collects where a page's links and pictures lead, and what a browser loads with the page."""

    def __init__(self, text):
        super().__init__()
        self.found, self.loaded = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        led = [value for name, value in attrs if name in ("href", "src") and value]
        self.found += led
        if tag in ("script", "img", "iframe") or (tag == "link" and "rel" in dict(attrs)):
            self.loaded += led


def test_no_link_of_the_site_is_broken(site):
    pages = [p for p in site.rglob("*.html") if p.name != "404.html"]
    assert len(pages) >= 12
    checked = 0
    for page in pages:
        links = Links(page.read_text())
        assert not [link for link in links.loaded if urlsplit(link).netloc], "needs a network"
        for link in links.found:
            parts = urlsplit(link)
            # Elsewhere, or a place on this page, which the strict build has checked.
            if parts.scheme or parts.netloc or not parts.path:
                continue
            target = page.parent / unquote(parts.path)
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{page.relative_to(site)}: {link}"
            checked += 1
    assert checked > 300


def test_records_outside_docs_are_in_the_site(site):
    assert (site / "outside/benchmarks/results/2026-11-15-fused-gpu.md.txt").stat().st_size > 1000
    assert (site / "outside/CITATION.cff").is_file()


def test_the_phrase_that_is_moved_on_the_site_is_that_of_its_record(site):
    record = json.loads((ROOT / "docs/records/2026-11-19-demo.json").read_text())
    page = (site / "index.html").read_text()
    (told,) = re.findall(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)
    assert json.loads(told)["attention"] == record["curves"]["phrase"]["attention"]
    for key, numbers in record["gain"].items():
        assert f"{numbers:,} numbers" in page, key


def test_the_reference_has_every_public_name_with_its_signature(site):
    import tisa
    import tisa.analysis
    import tisa.hf
    import tisa.transformer

    shown = (site / "reference.html").read_text()
    for package in (tisa, tisa.hf, tisa.analysis, tisa.transformer):
        for name in package.__all__:
            path = f"tisa.{name}" if name in tisa.__all__ else f"{package.__name__}.{name}"
            _, after = shown.split(f'id="{path}"')
            code = re.search(r'class="doc-signature.*?<code>(.*?)</code>', after, re.DOTALL)[1]
            signature = html.unescape(re.sub(r"<[^>]+>", "", code))
            assert signature.startswith(f"{name}("), path
            for parameter in inspect.signature(getattr(package, name)).parameters:
                assert re.search(rf"\b{parameter}\b", signature), (path, parameter)


def test_formulas_are_drawn_within_their_boxes(site):
    pages = {path.stem: path.read_text() for path in site.glob("*.html")}
    assert pages["idea"].count('<svg class="formula"') == 2
    drawn = re.findall(
        r'<svg class="formula".*?viewBox="(.*?)".*? d="(.*?)"', "".join(pages.values())
    )
    assert len(drawn) >= 7
    for box, outline in drawn:
        x, y, width, height = map(float, box.split())
        points = [*map(float, re.findall(r"-?\d+", outline))]
        assert x <= min(points[::2]) <= max(points[::2]) <= x + width
        assert y <= min(points[1::2]) <= max(points[1::2]) <= y + height
    assert not [name for name, page in pages.items() if "arithmatex" in page]


def in_chromium(test):
    """Mark a test as one that looks at the site in a browser."""
    absent = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt install chromium")
    return pytest.mark.full(absent(test))


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright here")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def watched(browser, **options):
    """Return a new page of the browser, and what it complains of or asks the network for."""
    page, wrong = browser.new_page(**options), []
    page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: wrong.append(str(e)))
    page.on("request", lambda r: wrong.append(r.url) if not r.url.startswith("file:") else None)
    return page, wrong


@in_chromium
def test_search_and_theme_work_from_disk(site, browser):
    page, wrong = watched(browser)
    for name in ("index.html", "howto/faster_t5.html"):
        page.goto((site / name).as_uri())
        page.keyboard.press("/")
        page.keyboard.type("packed batches")
        found = page.locator(".md-search-result__item h1")
        found.first.wait_for()
        titles = found.all_inner_texts()
        assert titles[0] == "Speed up a T5"
        assert not [title for title in titles if title.startswith("Log")]
        page.keyboard.press("Escape")
        themes = []
        for _ in range(3):
            page.locator("[data-md-component=palette] label:visible").click()
            themes.append(page.locator("body").get_attribute("data-md-color-scheme"))
        assert set(themes) == {"default", "slate"}
    assert wrong == []


@in_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_no_page_is_cut(site, browser, width, scheme):
    """Nothing stands beyond the screen's edge but what can be scrolled to."""
    size = {"width": width, "height": 1000}
    page, wrong = watched(browser, viewport=size, color_scheme=scheme)
    pages = [p for p in site.rglob("*.html") if p.name != "404.html" and "outside" not in p.parts]
    for path in pages:
        page.goto(path.as_uri())
        assert page.evaluate(BEYOND) == [], path
    assert len(pages) > 40
    assert wrong == []
    wide = "'<p style=\"width: 3000px\">'"
    page.evaluate(f"document.querySelector('article').insertAdjacentHTML('beforeend', {wide})")
    (found,) = page.evaluate(BEYOND)
    assert found.startswith("<p ")


def test_every_page_is_in_the_navigation_but_the_log_and_records():
    listed = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        path = page.relative_to(ROOT / "docs")
        kept = path.parts[0] == "records" or path.name == "log.md"
        assert kept or f": {path}\n" in listed, path


@pytest.mark.parametrize("page", [*TUTORIALS, *GUIDES, *OTHERS], ids=lambda p: p.stem)
def test_a_page_runs_as_printed(page, tmp_path, monkeypatch):
    """Python and shell, in the order of the page, in one new folder."""
    monkeypatch.chdir(tmp_path)
    assert printed.run_page(page) >= (4 if page in TUTORIALS else 1)


@pytest.mark.full
@pytest.mark.parametrize("page", [*TUTORIALS, *GUIDES], ids=lambda p: p.stem)
def test_a_page_runs_in_a_shell(page, tmp_path, monkeypatch):
    """As above, but every command in a process of its own."""
    monkeypatch.chdir(tmp_path)
    printed.run_page(page, in_shell=True)


def test_the_tutorials_are_those_that_were_promised():
    assert {page.stem for page in TUTORIALS} == {
        "own_method", "own_attention", "hugging_face", "analyse", "glue", "pretrain",
        "long_sequences", "long_t5",
    }  # fmt: skip


def test_commands_on_every_page_exist():
    """With all their options: parsed, not run."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    shell = [line for page in pages for language, text in printed.blocks(page) if language == "sh"
             for line in printed.lines(text)]  # fmt: skip
    for line in shell:
        printed.check(line)
    for starts in printed.NOT_RUN.values():
        for start in starts:
            assert any(line.startswith(start) for line in shell), f"nothing begins with {start!r}"
    for wrong in (
        "tisa-lab glue model --out new --lemon 3",
        "tisa lemon",
        "pip install 'x[lemon]'",
    ):
        with pytest.raises((Exception, AssertionError), match="lemon"):
            printed.check(wrong)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_no_link_in_the_repository_is_broken(name):
    links = re.findall(r"\]\(([^)#\s]+)", (ROOT / name).read_text())
    for link in links:
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_the_numbers_on_the_first_pages_are_so():
    from tisa.positions import METHODS

    pages = ("README.md", "docs/index.md", "docs/idea.md")
    readme, index, idea = (" ".join((ROOT / page).read_text().split()) for page in pages)
    assert f"TISA, {len(METHODS) - 1} further position methods" in index
    assert f"any of {len(METHODS)} position methods" in readme
    # BERT base: three numbers a kernel, 5 kernels, 12 heads, 12 layers; a table of 512 by 768.
    assert (
        f"there are {3 * 5 * 12 * 12:,} numbers. The model's position table has {512 * 768:,}."
        in idea
    )
    found = json.loads((ROOT / "docs/records/2026-11-15-find-the-offset.json").read_text())
    assert round(1 / found["accuracy"]["without positions"]) == 9
    assert "about one question in nine" in idea
    lines = (ROOT / "docs/records/2026-11-20-rates/records.jsonl").read_text().splitlines()
    recalled = {
        run["config"]["position"]: 100 * row["accuracy"]["16"]
        for run in map(json.loads, lines)
        for row in run["evaluated"]["recall"]
        if row["task"] == "recall"
    }
    assert min(recalled[name] for name in ("near-far", "kerple-log", "tisa", "fox")) > 97
    assert f"T5 at {recalled['t5']:.0f}, rotary at {recalled['rotary']:.0f}]" in readme
    asked = [abs(head["peak"]) for head in found["peaks"] if head["asked_for"]]
    assert (len(asked), "seven with a peak at an offset" in idea) == (7, True)
    assert 3 in asked


def test_the_numbers_about_the_phrase_are_those_of_the_record():
    record = json.loads((ROOT / "docs/records/2026-11-15-phrase.json").read_text())
    table, kernels = (
        [round(100 * x) for x in record["moved"][name]["by_layer"]]
        for name in ("position table", "TISA")
    )
    text = " ".join((ROOT / "docs/idea.md").read_text().split())
    assert f"{table[0]} % of the attention inside it goes elsewhere in the first layer" in text
    assert f"with kernels {kernels[0]} %, to rounding" in text
    assert record["moved"]["TISA"]["largest_in_layer_1"] < 1e-6
    later, others = kernels[1:], table[1:]
    assert f"with kernels by {min(later)} to {max(later)} %, with the position table" in text
    assert f"position table by {min(others)} to {max(others)} %." in text
    assert not record["uncommitted_changes"]


def test_what_makes_a_page_hard_to_read():
    """Each rule of docs/readability.py on a page made for it."""
    source = importlib.util.spec_from_file_location("readability", ROOT / "docs/readability.py")
    readability = importlib.util.module_from_spec(source)
    source.loader.exec_module(readability)
    page = (
        "# It is a heading\n\nA kernel is a bump. It has a height,\nwhich is `a = 1`.\n\n"
        "| it | is a table |\n\n```sh\nit is code\n```\n\n"
        "- Take those of [the model](it.md). Take those kernels.\n"
        "- One curve falls, the other does not! The other curve stays.\n\n    it = a formula\n"
    )
    found = readability.sentences(page)
    assert [len(readability.words(sentence)) for sentence in found] == [5, 7, 5, 3, 7, 4]
    assert [readability.lacking(sentence) for sentence in found] == [
        [], ["it"], ["those"], [], ["the other"], [],
    ]  # fmt: skip
    assert readability.lacking("One after the other, kernels such as these bumps move.") == []
    assert readability.figures(found)[:3] == (6, 5, 7)
    assert readability.figures(found)[3:] == (0, 1 / 2)
    assert readability.figures([*found, "word " * 26]).long == 1 / 7
    names = {path.name for path in readability.pages()}
    assert {"README.md", "index.md", "own_method.md"} <= names
    assert "log.md" not in names


def test_the_command_line_page_names_every_command():
    page = (ROOT / "docs/command_line.md").read_text()
    for name, program in printed.PROGRAMS.items():
        shown = re.findall(rf"^\| `{name} (\w+)` \|", page, flags=re.MULTILINE)
        assert set(shown) == set(program.commands)
