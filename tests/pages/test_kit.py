"""The page kit: what it is given is escaped, what a template misspells is an error."""

import json
import re
from importlib.resources import files

import pytest
from jinja2 import UndefinedError

from tisa.pages import page
from tisa.pages.kit import signed

HOSTILE = "</title></script><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7 * 7 }}"


@pytest.fixture
def template(tmp_path, monkeypatch):
    """Return a function that makes a page of a template's text."""

    package = f"their_{tmp_path.name}"
    folder = tmp_path / package
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    def make(text, **values):
        name = f"{len(list(folder.iterdir()))}.html"
        (folder / name).write_text(text)
        return page(f"{package}/{name}", **values)

    return make


def test_a_page_is_one_file_that_asks_for_nothing(template):
    made = template('{% extends "tisa.pages/base.html" %}{% block main %}Words{% endblock %}')
    assert made.startswith("<!doctype html>")
    assert "default-src 'none'" in made
    assert set(re.findall(r"https?://[^\s\"')]+", made)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"""(src|href)=["'](?!#)|@import|url\((?!#)""", made)
    assert files("tisa.pages").joinpath("style.css").read_text() in made
    assert files("tisa.pages").joinpath("curves.js").read_text() in made


def test_what_is_shown_is_escaped_and_data_cannot_end_its_script(template):
    made = template(
        '{% extends "tisa.pages/base.html" %}{% block title %}{{ name }}{% endblock %}'
        '{% block main %}<p title="{{ name }}">{{ name }}</p>{% endblock %}',
        name=HOSTILE, data={"name": HOSTILE},
    )  # fmt: skip
    assert "<script>alert" not in made
    assert "<img" not in made
    assert made.count("</script>") == made.count("<script") == 2
    assert "{{ 7 * 7 }}" in made  # what is put in is not read as a template
    (data,) = re.findall(r'id="data">(.*?)</script>', made, flags=re.DOTALL)
    assert json.loads(data) == {"name": HOSTILE}


def test_a_misspelt_name_is_an_error(template):
    with pytest.raises(UndefinedError, match="nmae"):
        template("{{ nmae }}", name="x")
    with pytest.raises(ValueError, match="JSON"):
        template('{% extends "tisa.pages/base.html" %}', data={"loss": float("nan")})


def test_signs_are_those_of_printers():
    assert [signed(n) for n in (-3, 0, 4)] == ["−3", "0", "+4"]
