"""Train with verl on a CPU, where it knows CUDA devices and Ascend NPUs.

torchrun --nproc_per_node 2 verl_cpu.py model.path=DIR data.train_files=FILE engine=megatron ...
"""

import mindspeed.megatron_adaptor  # noqa: F401 (before anything of Megatron)
from mindspeed.device import treat_as_megatron

# verl asks for the device in modules that do not import Megatron.
treat_as_megatron("verl", "mbridge")

if __name__ == "__main__":
    from verl.trainer.sft_trainer import main

    main()
