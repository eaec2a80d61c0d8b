"""A made-up text in which what comes next depends on what came before, near and far.

Every document has a few names and things of its own. A sentence says who does what to whom; the
next one begins with the person that the last one ended with.
"""

from random import Random

PEOPLE = ("ann", "bob", "cleo", "dan", "eva", "finn", "gus", "hanna", "ida", "jon", "kim", "lea")
THINGS = ("a lamp", "the boat", "a stone", "the letter", "some bread", "the key", "a horse")
DEEDS = ("gives", "shows", "sells", "sends", "brings")


def made_up(documents: int, sentences: int, seed: int) -> str:
    """Return documents of so many sentences, with a blank line between them."""
    drawn = Random(seed)
    made = []
    for _ in range(documents):
        people, things = drawn.sample(PEOPLE, 4), drawn.sample(THINGS, 3)
        speaker, told = drawn.choice(people), []
        for _ in range(sentences):
            other = drawn.choice([one for one in people if one != speaker])
            told.append(f"{speaker} {drawn.choice(DEEDS)} {drawn.choice(things)} to {other}.")
            speaker = other
        made.append(" ".join(told))
    return "\n\n".join(made) + "\n"
