"""Imported once by the server of ranks that train: the emulated NPU first, then the trainer."""

import tests.npu_emulator.preload  # noqa: F401, I001 (before anything of mindspeed or Megatron)
import mindspeed.megatron_adaptor
import mindspeed.training.arguments
import mindspeed.training.pretrain

mindspeed.training.arguments.build_parser()
