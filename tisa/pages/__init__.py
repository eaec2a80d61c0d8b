"""One page kit for every page of library and laboratory: a template and data in, one HTML file out.

    kit.py       a template, its numbers and data in, the page's text out
    base.html    what every page is: head, header with a switch of theme, main, footer
    heads.html   every head's curve as a small picture to choose, and the chosen one large
    style.css    type, colours (light and dark), tables, charts; from 400 px on
    curves.js    elements, charts and curves: numbers in, parts of the page out
    heads.js     what is chosen in heads.html, drawn
    moving.py    a phrase that is dragged through a sentence: with moving.html, .css and .js

A page is self-contained: it asks the network for nothing and needs no file beside it. A template's
name is its package and its file: `{% extends "tisa.pages/base.html" %}`. Whatever comes from a
model, a file or a user is escaped.
"""

from tisa.pages.kit import page
from tisa.pages.moving import moving_phrase

__all__ = ["moving_phrase", "page"]
