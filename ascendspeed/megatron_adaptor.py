"""``import ascendspeed.megatron_adaptor`` still works: it is ``mindspeed.megatron_adaptor``."""

import sys
import warnings

import mindspeed.megatron_adaptor

warnings.warn(
    "ascendspeed.megatron_adaptor is now mindspeed.megatron_adaptor",
    DeprecationWarning,
    stacklevel=2,
)
sys.modules[__name__] = mindspeed.megatron_adaptor
