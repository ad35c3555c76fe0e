"""``ascendspeed.training``: the trainer, for scripts with a model of their own."""

import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
from mindspeed.adaptor.printing import print_rank_0
from mindspeed.training.scripts import pretrain

__all__ = ["pretrain", "print_rank_0"]
