"""A template, its numbers and data in, the text of one self-contained page out."""

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup


def page(template: str, *, data: Any = None, **values: Any) -> str:
    """Return the page that the template makes of `values`; `data` is what its scripts read.

    Args:
        template: package and file, as in "tisa.analysis.page/page.html".
        data: anything JSON can hold, in the page as the constant DATA.
        values: what the template names; text is escaped, `Markup` is not.
    """
    return _environment().get_template(template).render(data=data, **values)


def minus(text: str) -> str:
    """Return a number's text with a minus as printers set it."""
    return text.replace("-", "−")


def signed(offset: int) -> str:
    """Return an offset with its sign: −3, 0, +3."""
    return minus(f"{offset:+d}" if offset else "0")


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FunctionLoader(lambda name: (_text(name), name, None)),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {
        "ensure_ascii": False, "allow_nan": False, "separators": (",", ":"),
    }  # fmt: skip
    made.globals["file"] = lambda name: Markup(_text(name))
    made.filters["signed"] = signed
    return made


def _text(name: str) -> str:
    package, _, file = name.partition("/")
    return files(package).joinpath(file).read_text(encoding="utf-8")
