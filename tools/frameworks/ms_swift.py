"""Train with ms-swift where it does not import mindspeed by itself, without an Ascend NPU.

torchrun --nproc_per_node 2 ms_swift.py sft --model DIR --dataset FILE ...
"""

import sys

from mindspeed.megatron_adaptor import repatch  # before anything of Megatron

if __name__ == "__main__":
    from swift.megatron import megatron_pretrain_main, megatron_rlhf_main, megatron_sft_main
    from swift.megatron.pipelines.train import sft

    # What ms-swift calls with its arguments on Ascend, and what features are switched on by.
    sft.apply_mindspeed_patches = repatch
    commands = {"pt": megatron_pretrain_main, "sft": megatron_sft_main, "rlhf": megatron_rlhf_main}
    commands[sys.argv.pop(1)]()
