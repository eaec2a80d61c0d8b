"""For `make docs`: records outside docs/ that pages link to become files of the site.

The log and the records in docs/ are pages too, which the search leaves out.

A page of the repository links to ../benchmarks/results/…; the site has no such place, so the file
is copied to outside/… in it, and the link leads there. What is linked and not there is a warning,
which is an error in a strict build.
"""

import logging
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
LINK = re.compile(
    r"\]\((?:\.\./)+((?:benchmarks|examples|runs|tisa)/[^)#\s]+|[A-Z]+\.(?:md|cff))\)"
)
LOG = logging.getLogger("mkdocs.plugins.outside")


def _place(path):
    # Not as pages: Markdown among the records is shown as it is.
    return f"outside/{path}" + (".txt" if path.endswith((".md", ".py")) else "")


def on_files(files, config):
    """Return the site's files with those that pages link to outside docs/."""
    pages = [Path(file.abs_src_path) for file in files.documentation_pages()]
    for path in sorted({p for page in pages for p in LINK.findall(page.read_text("utf-8"))}):
        if (ROOT / path).is_file():
            content = (ROOT / path).read_text("utf-8")
            files.append(File.generated(config, _place(path), content=content))
        else:
            LOG.warning(f"a page links to {path}, which is not in the repository")
    return files


def on_page_markdown(markdown, page, config, files):
    """Return the page with its links to files outside docs/ led to their copies."""
    if page.file.src_uri == "log.md" or page.file.src_uri.startswith("records/"):
        page.meta["search"] = {"exclude": True}
    up = "../" * page.file.src_uri.count("/")
    return LINK.sub(lambda found: f"]({up}{_place(found[1])})", markdown)
