"""``pretrain(...)`` as a script in Megatron-LM's style calls it.

    if __name__ == "__main__":
        pretrain(model_provider=model_provider, args_defaults={"bf16": True})

The data sets are those of the command line and the loss is the trainer's, so that its logs,
checkpoints and checks hold for such scripts, too; only the model is the script's own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from mindspeed.errors import ConfigError
from mindspeed.training import pretrain as trainer
from mindspeed.training.arguments import Parser
from mindspeed.training.initialize import parser_of, prepare


def pretrain(
    train_valid_test_datasets_provider: None = None,
    model_provider: Callable[..., Any] | None = None,
    forward_step_func: None = None,
    extra_args_provider: Callable[[Parser], Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
) -> int:
    """Train a model from the command line of the process. Collective.

    Args:
        train_valid_test_datasets_provider: must be None, see above.
        model_provider: ``model_provider(pre_process=, post_process=)`` builds one pipeline stage;
            None for the model that the flags describe.
        forward_step_func: must be None, see above.
        extra_args_provider: adds a script's own flags to the parser.
        args_defaults: values of flags that the command line does not set.

    Returns:
        The last iteration done.

    Raises:
        MindSpeedError: a flag or a file is wrong, or a function is given that would not be used.
    """
    for name, given in (
        ("train_valid_test_datasets_provider", train_valid_test_datasets_provider),
        ("forward_step_func", forward_step_func),
    ):
        if given is not None:
            raise ConfigError(
                f"pretrain({name}=...) is not supported: data sets and loss are the trainer's; "
                "pass None and name the data with --data-path"
            )
    parser = parser_of(extra_args_provider, args_defaults)
    settings = prepare(sys.argv[1:], int(os.environ.get("WORLD_SIZE", "1")), parser=parser)
    if model_provider is None:
        return trainer.pretrain(settings)
    if settings.args.virtual_pipeline_model_parallel_size:
        raise ConfigError(
            "a script's model_provider knows nothing of virtual pipeline stages: leave out "
            "--num-layers-per-virtual-pipeline-stage, or the model_provider"
        )
    return trainer.pretrain(
        settings,
        lambda args, config, pre, post, vp_stage: model_provider(
            pre_process=pre, post_process=post
        ),
    )
