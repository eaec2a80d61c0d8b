"""`tisa-lab glue` under FSDP2, for torchrun: the command's arguments are those of the command line.

accelerate offers FSDP on accelerators alone. It is told that this is one: all of its own FSDP2 code
and the Trainer's run, on CPU tensors.
"""

import accelerate
import torch
import transformers
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from tisa_lab.cli import main

made_by_trainer = transformers.Trainer.create_accelerator_and_postprocess


def sharded(trainer):
    made_by_trainer(trainer)
    state = trainer.accelerator.state
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["BertLayer"], reshard_after_forward=True,
        state_dict_type="FULL_STATE_DICT", cpu_ram_efficient_loading=False,
    )  # fmt: skip
    state.distributed_type = DistributedType.FSDP
    accelerate.PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    trainer.is_fsdp_enabled = True


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.Trainer.create_accelerator_and_postprocess = sharded
    main()
