"""Files as somebody else would write them, outside of the package: a function, and a method."""

import sys

from tisa.positions import naming, sources

FUNCTION = '''
import torch
import tisa


class Root(tisa.ScoringFunction):
    """f(k) = −r·√|k|, r learned."""

    def __init__(self, num_attention_heads=12, *, start=0.5):
        super().__init__(num_attention_heads)
        self.rates = torch.nn.Parameter(torch.linspace(start, 2 * start, num_attention_heads))

    def scores(self, offsets):
        k = self._distances(offsets).reshape(-1)
        flat = -self.rates.to(k.dtype).unsqueeze(-1) * k.abs().sqrt()
        return flat.reshape(self.num_attention_heads, *offsets.shape)

    def support(self, eps):
        return None
'''

METHOD = '''
import torch
import tisa


class Twist(tisa.Position):
    """Input embeddings plus a learned wave of the position."""

    def __init__(self, config, *, layers="each", periods=(7.0, 31.0)):
        super().__init__(config, layers=layers)
        self.periods = periods
        self.waves = torch.nn.Parameter(torch.randn(len(periods), config.embedding_width) / 8)

    def embed(self, embeddings, prepared):
        at = prepared.places.positions.to(torch.promote_types(embeddings.dtype, torch.float32))
        angles = torch.stack([at / period for period in self.periods], -1)
        return embeddings + (angles.sin() @ self.waves.to(angles.dtype)).to(embeddings.dtype)


class Neither:
    pass
'''


def forget():
    """Leave a process in which nobody has named or imported such files."""
    naming.REGISTERED.clear()
    for cls in list(sources._alive(*sources.KINDS)):
        if cls.__qualname__ in ("Root", "Twist", "Wave"):
            cls.__qualname__ = "Forgotten"
            sys.modules.pop(cls.__module__, None)
