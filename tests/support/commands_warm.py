"""Imported once by the server that forks ranks, so that no command imports Megatron again."""

import contextlib
import importlib

import mindspeed.megatron_adaptor
import mindspeed.training.arguments
import mindspeed.training.pretrain

mindspeed.training.arguments.build_parser()

for package in ("matplotlib.figure", "transformers"):
    with contextlib.suppress(ImportError):
        importlib.import_module(package)
