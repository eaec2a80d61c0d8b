"""A method of anybody's beside the others: one file in, one page out.

settings.py   how large a comparison is: small or large, and each size by itself
reckoning.py  what the large form would take without a GPU
text.py       a made-up text, whose sentences speak of names that came before
speed.py      a layer's step with each method, in turns
comparing.py  everything that is measured: a record
page.py       the record as a page, Markdown and a figure; the page's sentences: page.html
"""
