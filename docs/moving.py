"""For `make docs`: the phrase that a reader drags through a sentence, where a page asks for one.

A page asks with the comment `<!-- moving: records/….json -->`. The record is that of a demo: the
page says what the demo found.
"""

import json
import re
from pathlib import Path

from tisa.pages import moving_phrase

ASKED = re.compile(r"<!-- moving: (\S+) -->")


def on_page_content(html, page, config, files):
    """Return the page with the part in place of the comment."""

    def made(found):
        record = json.loads(Path(config.docs_dir, found[1]).read_text("utf-8"))
        return moving_phrase(
            record["curves"]["phrase"],
            model=record["model"]["name"],
            before=record["gain"]["before"],
            after=record["gain"]["after"],
        )

    return ASKED.sub(made, html)
