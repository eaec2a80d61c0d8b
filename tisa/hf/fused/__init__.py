"""Stock models whose positions are a function of the offset from birth, at the operator's speed.

    model = tisa.hf.fuse(model)      # T5 and its kin, MPNet, BLOOM, MPT, Falcon with ALiBi

models.py      which modules of a model are fused, or why none can be; `fuse` and `unfuse`
t5.py          T5's attention: the score vector travels where its dense bias did
mpnet.py       MPNet, whose table stands beside absolute positions
alibi.py       BLOOM, MPT, Falcon: slopes by the offset, with code for attention of their own
declared.py    attention that transformers has not, its scores declared by whoever knows them
attention.py   what all of them call: the operator, masks that are never dense, weights on request
packing.py     examples end to end in one row, and the ends that tell them apart
"""

from tisa.hf.fused.attention import register
from tisa.hf.fused.declared import offset_scores
from tisa.hf.fused.models import fuse, unfuse
from tisa.hf.fused.packing import PackedCollator

register()

__all__ = ["PackedCollator", "fuse", "offset_scores", "unfuse"]
