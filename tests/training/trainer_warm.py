"""Imported once by the server that forks ranks, so that no rank imports Megatron again."""

import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
import mindspeed.training.arguments  # noqa: F401
import mindspeed.training.pretrain  # noqa: F401
import mindspeed.training.recipe  # noqa: F401

mindspeed.training.arguments.build_parser()
