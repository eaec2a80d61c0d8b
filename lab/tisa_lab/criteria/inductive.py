"""Inductive: a dependency ten times as far away as training ever was, by a witness or refuted.

- Witness: parameters with which a query attends to the key at that offset and to no other, while
  all tokens are alike, so that only position can tell the keys apart. By construction where
  `witnesses.py` knows one, else by gradient search.
- Refutation: the length is an error; or two such offsets have equal scores for every random draw of
  the parameters.
- Neither: the best weight that the search found; a ✗ that a better search might overturn.

Where a witness is constructed, what the search finds is said beside it: whether training would get
there is another question than whether the method can express it.
"""

import torch

from tisa.shapes import Float, Tensor
from tisa.transformer import SelfAttention
from tisa_lab.criteria.draws import draw_parameters, random_content, random_layer
from tisa_lab.criteria.measurement import Measurement
from tisa_lab.criteria.settings import Settings
from tisa_lab.criteria.witnesses import KNOWN, UNSEARCHED


def measure(name: str, settings: Settings) -> Measurement:
    """Return the largest attention weight on the far key that was brought about."""
    layer = random_layer(name, settings, seed=0)
    length = settings.far + settings.training_length
    nothing = random_content(settings, 1, length, seed=0) * 0
    limit = layer.position.max_length
    try:
        layer.logits(nothing)
    except ValueError:
        if limit is None:
            raise
        return Measurement(0.0, f"{length} tokens are an error: at most {limit}", refuted=True)
    if name in KNOWN:
        with torch.no_grad():
            for p in layer.parameters():
                p.zero_()
            KNOWN[name](layer, settings.far)
            weights = far_weights(layer, nothing, settings)
        searched = _found_by_search(name, settings) if settings.search_beside else ""
        return _witness(weights, settings, "by construction", searched)
    apart = max(_scores_apart(name, settings, draw) for draw in range(settings.draws))
    if apart == 0:
        return Measurement(
            0.0,
            f"offsets {-settings.far} and {-settings.far - 1} have the same score in "
            f"{settings.draws} of {settings.draws} draws",
            refuted=True,
        )
    return _witness(search(name, settings), settings, "by search")


def far_weights(
    layer: SelfAttention, content: Float[Tensor, "one length hidden"], settings: Settings
) -> Float[Tensor, " keys"]:
    """Return the weights that one query gives all keys, in the head that looks farthest away."""
    return _far_log_weights(layer, content, settings).exp()


def _far_log_weights(layer: SelfAttention, content: Tensor, settings: Settings) -> Tensor:
    query, far = _places(settings)
    weights = layer.logits(content)[0, :, query].log_softmax(-1)
    return weights[weights[:, far].argmax()]


def search(name: str, settings: Settings) -> Float[Tensor, " keys"]:
    """Return the weights after gradient ascent on the far key's, over everything trainable."""
    length = settings.far + settings.training_length
    best: Tensor | None = None
    _, far = _places(settings)
    for start in range(settings.draws):
        layer = random_layer(name, settings, seed=start)
        content = random_content(settings, 1, 1, seed=start).expand(1, length, -1).clone()
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
        for _ in range(settings.search_steps):
            optimizer.zero_grad()
            (-_far_log_weights(layer, content, settings)[far]).backward()
            optimizer.step()
        with torch.no_grad():
            found = far_weights(layer, content, settings)
        if best is None or found[far] > best[far]:
            best = found
    assert best is not None
    return best


def _places(settings: Settings) -> tuple[int, int]:
    """Return the position of the query and that of the key `far` before it."""
    query = settings.far + settings.training_length // 2
    return query, query - settings.far


def _scores_apart(name: str, settings: Settings, draw: int) -> float:
    """Return how much the logits of two far offsets differ, relatively; 0 within rounding."""
    layer = random_layer(name, settings, seed=draw)
    draw_parameters(layer, settings.seed + 1000 + draw)
    length = settings.far + settings.training_length
    content = random_content(settings, 1, 1, seed=draw).expand(1, length, -1)
    query, far = _places(settings)
    with torch.no_grad():
        logits = layer.logits(content)[0, :, query]
    apart = float((logits[:, far] - logits[:, far - 1]).abs().max() / logits.abs().max())
    return apart if apart > 1e-12 else 0.0


def _found_by_search(name: str, settings: Settings) -> str:
    if name in UNSEARCHED:
        return f"; not searched: {UNSEARCHED[name]}"
    _, far = _places(settings)
    return (
        f"; gradient search from random parameters finds {float(search(name, settings)[far]):.2g}"
    )


def _witness(
    weights: Float[Tensor, " keys"], settings: Settings, how: str, searched: str = ""
) -> Measurement:
    _, far = _places(settings)
    found = float(weights[far])
    others = weights.clone()
    others[far] = 0
    return Measurement(
        found,
        f"{how}, the key at offset {-settings.far} gets {found:.2g} of a query's attention, the "
        f"next best key {float(others.max()):.2g}{searched}",
    )
