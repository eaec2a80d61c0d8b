"""Pages as a reader sees them: in Chromium, wide and narrow, light and dark; what is wrong is told.

    python runs/look_at_pages.py demo/index.html site --out pictures

A file is a page, a folder is a site with all its pages. Each page is opened 1,400 and 400 pixels
wide, with everything unfolded, and a picture of the page is kept. Wrong is: a message on the
console, an error, anything asked of the network, a page wider than the screen, a part that stands
beyond the edge or is cut off. A table that scrolls inside its frame is told apart. The exit code is
1 where anything is wrong.
"""

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

CHROMIUM = ("chromium", "chromium-browser", "chrome")
WIDTHS, SCHEMES = (1400, 400), ("light", "dark")
# Of a site: files that are shown as they are, and a page that only a server shows.
NO_PAGES = {"records", "outside", "assets", "404.html"}
# Words for each element that leaves the screen, is cut off, or scrolls inside its frame.
FOUND = """() => {
  const framed = (e) => { for (let p = e.parentElement; p; p = p.parentElement)
    if (getComputedStyle(p).overflowX !== 'visible') return true; return false; };
  const found = [];
  for (const e of document.querySelectorAll('body *')) {
    const box = e.getBoundingClientRect(), style = getComputedStyle(e);
    const name = `${e.tagName.toLowerCase()}.${e.getAttribute('class') || e.id}`;
    const hidden = style.clipPath !== 'none' || style.visibility !== 'visible';
    if (hidden || !box.width || !box.height || style.position === 'fixed') continue;
    if (e.closest('.skip, .md-sidebar, .md-header, svg *')) continue;
    if ((box.right > innerWidth + 1 || box.left < -1) && !framed(e)) found.push(['out', name]);
    const wide = e.scrollWidth > e.clientWidth + 1 && e.tagName !== 'INPUT';
    if (wide && ['hidden', 'clip'].includes(style.overflowX)) found.push(['cut', name]);
    if (wide && ['auto', 'scroll'].includes(style.overflowX)) found.push(['scrolls', name]);
  }
  return found;
}"""


def looked_at(
    browser: Browser, page: Path, width: int, scheme: str, out: Path
) -> tuple[list[str], list[str]]:
    """Return what is wrong with a page, and which parts scroll inside their frames."""
    wrong: list[str] = []
    opened = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    opened.on("console", lambda message: wrong.append(f"console: {message.text}"))
    opened.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    opened.on(
        "request",
        lambda asked: (
            None if asked.url.startswith(("file:", "data:")) else wrong.append(f"asks {asked.url}")
        ),
    )
    opened.goto(page.as_uri())
    opened.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    if opened.evaluate("document.documentElement.scrollWidth") > width:
        wrong.append("wider than the screen")
    found = opened.evaluate(FOUND)
    wrong += [f"{kind}: {name}" for kind, name in found if kind != "scrolls"]
    opened.screenshot(
        path=out / f"{page.parent.name}-{page.stem}-{width}-{scheme}.png", full_page=True
    )
    opened.close()
    return wrong, sorted({name for kind, name in found if kind == "scrolls"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    program = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    if program is None:
        raise SystemExit("no Chromium here: apt install chromium")
    given.out.mkdir(parents=True, exist_ok=True)
    count = failed = 0
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        print(f"Chromium {browser.version}")
        for given_path in given.pages:
            inside = sorted(given_path.rglob("*.html")) if given_path.is_dir() else [given_path]
            pages = [p for p in inside if not NO_PAGES & set(p.relative_to(given_path).parts)]
            for page in pages:
                for width in WIDTHS:
                    wrong, scrolls = set(), set()
                    for scheme in SCHEMES:
                        one, two = looked_at(browser, page.resolve(), width, scheme, given.out)
                        wrong, scrolls, count = wrong | set(one), scrolls | set(two), count + 1
                    failed += bool(wrong)
                    told = "; ".join(sorted(wrong)) or "nothing wrong"
                    inner = f" ({', '.join(sorted(scrolls))} scrolls in its frame)" * bool(scrolls)
                    print(f"{page.parent.name}/{page.name}, {width} px: {told}{inner}", flush=True)
        browser.close()
    print(f"{count} times looked at, {failed} pages and widths with something wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
