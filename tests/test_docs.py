"""The pages: the site builds strictly, no link in it is broken, the tutorials run as printed."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))


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
    """Collects where a page's links and pictures lead."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in ("href", "src") and value]


def test_no_link_of_the_site_is_broken(site):
    pages = [p for p in site.rglob("*.html") if p.name != "404.html"]
    assert len(pages) >= 12
    checked = 0
    for page in pages:
        for link in Links(page.read_text()).found:
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


def test_the_reference_has_every_public_name(site):
    import tisa
    import tisa.analysis
    import tisa.encoder
    import tisa.hf

    shown = (site / "reference/index.html").read_text()
    for package in (tisa, tisa.hf, tisa.analysis, tisa.encoder):
        for name in package.__all__:
            assert re.search(rf'id="tisa[\w.]*\.{name}"', shown), f"{package.__name__}.{name}"


def test_every_page_is_in_the_navigation_or_a_record():
    listed = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        path = page.relative_to(ROOT / "docs")
        assert path.parts[0] == "records" or f": {path}\n" in listed, path


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda p: p.stem)
def test_a_tutorial_runs_as_printed(page):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 4
    names = {"__name__": f"tutorial_{page.stem}"}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


def test_the_command_line_page_names_every_command():
    from tisa import cli

    page = (ROOT / "docs/command_line.md").read_text()
    assert set(re.findall(r"^\| `tisa (\w+)` \|", page, flags=re.MULTILINE)) == set(cli.COMMANDS)
