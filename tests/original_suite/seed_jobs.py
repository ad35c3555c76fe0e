"""Code as the original suite's documentation has it, run inside ranks."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SETUP = "tests.support.warm"
ROOT = Path(__file__).resolve().parents[2]


def train(argv: Sequence[str]) -> dict[str, Any]:
    """A pretraining script with a model provider of its own."""
    sys.argv = ["pretrain_llama.py", *argv]
    from ascendspeed import get_args, get_tokenizer
    from ascendspeed.arguments import core_transformer_config_from_args
    from ascendspeed.training import pretrain, print_rank_0
    from mindspeed.training import forward_step
    from mindspeed.training.model import gpt_model

    built = []
    passes = []

    def forward(data_iterator, model):
        passes.append(model.training)
        return forward_step.forward_step(data_iterator, model)

    def model_provider(pre_process=True, post_process=True):
        """Build the model."""
        print_rank_0("building GPT model ...")
        config = core_transformer_config_from_args(get_args())
        built.append((pre_process, post_process))
        return gpt_model(get_args(), config, pre_process, post_process, None)

    iteration = pretrain(None, model_provider, forward, args_defaults={"log_interval": 1})
    return {
        "iteration": iteration,
        "built": built,
        "passes": len(passes),
        "hidden_size": get_args().hidden_size,
        "vocab_size": get_tokenizer().vocab_size,
    }


def initialize(argv: Sequence[str]) -> dict[str, Any]:
    """The documentation's start of text generation, and what it leaves."""
    sys.argv = ["inference_llama.py", *argv]
    from ascendspeed import get_args, get_num_microbatches, get_tokenizer
    from ascendspeed.initialize import initialize_megatron

    initialize_megatron(args_defaults={"no_load_rng": True, "no_load_optim": True})
    from megatron.core import parallel_state

    return {
        "no_load_rng": get_args().no_load_rng,
        "no_load_optim": get_args().no_load_optim,
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "vocab_size": get_tokenizer().vocab_size,
        "callable": callable(get_num_microbatches),
    }


def refused(argv: Sequence[str]) -> list[str]:
    """What is said to scripts that want what the trainer does itself, or forgot something."""
    from ascendspeed import get_args
    from ascendspeed.initialize import initialize_megatron
    from ascendspeed.training import pretrain
    from mindspeed.errors import ConfigError

    sys.argv = ["pretrain_llama.py", *argv]
    said = []
    for attempt in (
        get_args,
        lambda: pretrain(lambda counts: None, None, None),
        lambda: initialize_megatron(args_defaults={"no_such_flag": True}),
    ):
        try:
            attempt()
        except ConfigError as error:
            said.append(str(error))
    return said


def run_script(path: str, argv: Sequence[str], stdin: str = "") -> tuple[int, str, str]:
    """A script of the repository as ``__main__``: exit code, standard output and error."""
    sys.argv = [path, *argv]
    sys.stdin = io.StringIO(stdin)
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        try:
            runpy.run_path(str(ROOT / path), run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0), printed.getvalue(), errors.getvalue()
    raise AssertionError(f"{path} did not end with an exit code")
