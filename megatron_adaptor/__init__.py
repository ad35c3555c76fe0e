"""``import megatron_adaptor`` is ``import mindspeed.megatron_adaptor``, under a shorter name."""

import sys

import mindspeed.megatron_adaptor

sys.modules[__name__] = mindspeed.megatron_adaptor
