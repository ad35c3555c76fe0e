"""Imported once by the server that forks ranks, so that no rank imports Megatron again.

The adaptor comes before anything of Megatron.
"""

import mindspeed.megatron_adaptor
import mindspeed.training.arguments
import mindspeed.training.pretrain
import mindspeed.training.recipe

mindspeed.training.arguments.build_parser()
