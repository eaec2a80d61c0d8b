"""Scoring functions f_θ(k): integer offsets k = key − query in, scores per head out.

Each is a small module with the same five methods (`base.ScoringFunction`): `forward` gives the
vector that `tisa.attention` takes, `scores` any offsets, `matrix` the dense form, `support` the
band outside which nothing changes any more, `parabola_support` that outside which parabolas do.
Every line imports only from lines above it:

    parabolas.py three values of a curve in place of a stretch of it
    base.py      what all of them do: vector, matrix, support, float32
    published.py what checkpoints of their authors call their parameters
    tisa.py      radial-basis kernels: the paper
    tisa_v2.py   soft steps and a slope
    t5.py        learned buckets
    alibi.py     fixed slopes
    kerple.py    learned decays
    near_far.py  TISA near, a learned decay far: ours
    layers.py    the scores of all layers at once
    triton/      on a GPU in one launch
"""

from tisa.scoring.alibi import ALiBi
from tisa.scoring.base import ScoringFunction
from tisa.scoring.kerple import KerpleLog, KerplePower
from tisa.scoring.layers import bands_of, scores_of
from tisa.scoring.near_far import NearFar
from tisa.scoring.t5 import T5Buckets
from tisa.scoring.tisa import TISA
from tisa.scoring.tisa_v2 import TISAv2

__all__ = [
    "TISA",
    "ALiBi",
    "KerpleLog",
    "KerplePower",
    "NearFar",
    "ScoringFunction",
    "T5Buckets",
    "TISAv2",
    "bands_of",
    "scores_of",
]
