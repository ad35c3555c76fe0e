"""``ascendspeed.initialize``: read the command line, join the job, make the parallel groups."""

import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
from mindspeed.training.initialize import initialize_megatron

__all__ = ["initialize_megatron"]
