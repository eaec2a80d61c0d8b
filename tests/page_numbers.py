"""Numbers in a page's sentences, and a record in which every number is another one.

A page that is made of both has to differ wherever a number stands: what does not follow the record
is written in the template (a "literal") or false.
"""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

NUMBER = re.compile(r"[−-]?\d(?:[\d,]*\d)?(?:\.\d+)?(?:e[+−-]?\d+)?")
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="no Node here: apt install nodejs")
# What is read aloud or shown when one points at it.
TOLD = ("title", "aria-label", "alt")


class _Text(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.told, self.inside = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.told += [value for name, value in attrs if name in TOLD and value]
        if tag in ("script", "style"):
            self.inside.append(tag)

    def handle_endtag(self, tag):
        if self.inside and self.inside[-1] == tag:
            self.inside.pop()

    def handle_data(self, text):
        if not self.inside and text.strip():
            self.told.append(" ".join(text.split()))


def told(page):
    """Return every piece of text that a reader of the page meets, scripts apart."""
    return _Text(page).told


def other(record):
    """Return the record with another number in every place; equal ones stay equal."""
    if isinstance(record, dict):
        # A key of several words is told too.
        return {other(name) if " " in name else name: other(part) for name, part in record.items()}
    if isinstance(record, (list, tuple)):
        return [other(part) for part in record]
    if isinstance(record, str):
        return re.sub(r"\d", lambda digit: str((int(digit[0]) + 3) % 10), record)
    if isinstance(record, bool) or record is None:
        return record
    return 3 * record + 7 if isinstance(record, int) else 3.7 * record + 0.613


def untraced(before, after, literals):
    """Return each number that both pages have in the same place, with the text around it.

    `before` and `after` are texts of a page made of a record and of `other(record)`; a literal is a
    phrase of the template in which numbers are what they are.
    """
    assert len(before) == len(after)
    found, seen = [], set()
    for one, two in zip(before, after, strict=True):
        for phrase in literals:
            if phrase in one and phrase in two:
                seen.add(phrase)
                one, two = (text.replace(phrase, "…") for text in (one, two))
        numbers = NUMBER.findall(one)
        others = NUMBER.findall(two)
        assert len(numbers) == len(others), (one, two)
        found += [(n, one) for n, m in zip(numbers, others, strict=True) if n == m]
    assert seen == set(literals), f"not on the page: {set(literals) - seen}"
    return found


def scripts_tell(page, folder, *steps):
    """Return what a page's scripts tell at the start and after each step, a line of JavaScript."""
    (folder / "page.html").write_text(page)
    command = [NODE, Path(__file__).with_name("browser.js"), folder / "page.html"]
    done = subprocess.run(
        [*command, json.dumps(["", *steps])], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
