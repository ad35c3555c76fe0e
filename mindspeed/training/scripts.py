"""``pretrain(...)`` as a script in Megatron-LM's style calls it.

    if __name__ == "__main__":
        pretrain(model_provider=model_provider, args_defaults={"bf16": True})

The data sets are those of the command line; model, forward step and loss may be the script's own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from mindspeed.errors import ConfigError
from mindspeed.job import Parallel
from mindspeed.training import pretrain as trainer
from mindspeed.training.arguments import TrainerParser
from mindspeed.training.forward_step import ForwardStep, forward_step
from mindspeed.training.initialize import parser_of, prepare


def pretrain(
    train_valid_test_datasets_provider: None = None,
    model_provider: Callable[..., Any] | None = None,
    forward_step_func: ForwardStep | None = None,
    extra_args_provider: Callable[[TrainerParser], Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
) -> int:
    """Train a model from the command line of the process. Collective.

    Args:
        train_valid_test_datasets_provider: must be None: name the data with ``--data-path``.
        model_provider: ``model_provider(pre_process=, post_process=)`` builds one pipeline stage;
            None for the model that the flags describe.
        forward_step_func: computes the loss of one micro-batch
            (:mod:`mindspeed.training.forward_step`); None for next-token prediction.
        extra_args_provider: adds a script's own flags to the parser.
        args_defaults: values of flags that the command line does not set.

    Returns:
        The last iteration done.

    Raises:
        MindSpeedError: a flag or a file is wrong, or a function is given that would not be used.
    """
    if train_valid_test_datasets_provider is not None:
        raise ConfigError(
            "pretrain(train_valid_test_datasets_provider=...) is not supported: data sets are the "
            "trainer's; pass None and name the data with --data-path"
        )
    parser = parser_of(extra_args_provider, args_defaults)
    settings = prepare(sys.argv[1:], int(os.environ.get("WORLD_SIZE", "1")), parser=parser)
    forward = forward_step if forward_step_func is None else forward_step_func
    if model_provider is None:
        return trainer.pretrain(settings, forward_step=forward)
    if Parallel.of(settings.args).chunks is not None:
        raise ConfigError(
            "a script's model_provider has no argument for virtual pipeline stages: leave out "
            "--num-layers-per-virtual-pipeline-stage, or the model_provider"
        )

    def provider(args: Any, config: Any, pre: bool, post: bool, vp_stage: int | None) -> Any:
        return model_provider(pre_process=pre, post_process=post)

    return trainer.pretrain(settings, provider, forward)
