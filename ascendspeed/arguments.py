"""``ascendspeed.arguments``: the model's configuration from the command line."""

import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
from mindspeed.training.initialize import core_transformer_config_from_args

__all__ = ["core_transformer_config_from_args"]
