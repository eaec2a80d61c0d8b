"""What each process does in the FSDP2 test; started by torchrun with the corpus and a folder.

accelerate offers FSDP on accelerators alone. It is told that this is one: all of its own FSDP2 code
runs, on CPU tensors.
"""

import itertools
import os
import sys
from pathlib import Path

import accelerate
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from tisa_lab.pretrain import training
from tisa_lab.pretrain.config import Length, PretrainConfig, RunSettings
from tisa_lab.pretrain.corpus import StreamedCorpus
from tisa_lab.pretrain.text import Bytes, Source
from tisa_lab.pretrain.training import run


def sharded(settings, config, out):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"], reshard_after_forward=True,
        state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False,
    )  # fmt: skip
    made = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin, project_dir=str(out))
    made.state.distributed_type = DistributedType.FSDP
    made.state.fsdp_plugin = plugin
    accelerate.PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    return made


def main(corpus_file, out, position, *, fsdp):
    if fsdp:
        training.accelerator_for = sharded
    corpus = StreamedCorpus(Source((corpus_file,)), Bytes())
    config = PretrainConfig(
        position=position, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        embedding_size=8, lengths=(Length(32),), batch_tokens=256, learning_rate=1e-2, steps=14,
    )  # fmt: skip
    settings = RunSettings(
        device="cpu", log_every=2, evaluate_every=7, checkpoint_every=4, valid_tokens=600
    )
    stops = itertools.chain([False] * 4, itertools.repeat(True))
    stopped = run(config, corpus, out, valid=corpus, settings=settings, stop=lambda: next(stops))
    assert stopped is None
    return run(config, corpus, out, valid=corpus, settings=settings)


if __name__ == "__main__":
    record = main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], fsdp=True)
    assert record["processes"] == 2
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    # As in test_triton_traced.py: Gloo's threads outlive their group.
    os._exit(0)
