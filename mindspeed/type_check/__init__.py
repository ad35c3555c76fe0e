"""``mindspeed check --types``: does a parallel program compute the gradients of one rank?

    check_types(args)                  # a job's final values -> a :class:`Verdict`
    check_model(model_provider, args)  # the same for a model that a framework builds

What it proves: every value that ranks share is used as it is, and every gradient is summed over
exactly the ranks that hold a part of it, on each pipeline stage and for any number of ranks. What
it does not look at: values (factors, counts, seeds), the optimizer, checkpoints, the order of a
pipeline. Data-parallel ranks are taken to sum their gradients, as Megatron's DDP does.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindspeed.errors import ConfigError, MindSpeedError

if TYPE_CHECKING:
    import torch

    from mindspeed.spmd import Type
    from mindspeed.type_check.chunk import WrongUse
    from mindspeed.type_check.stage import StageResult


@dataclass(frozen=True)
class Verdict:
    """What was found in all stages.

    Attributes:
        stages: results, in the order of the pipeline.
    """

    stages: tuple[StageResult, ...]

    @property
    def wrong(self) -> WrongUse | None:
        """The first wrong use; None if there is none."""
        return next((one.wrong for one in self.stages if one.wrong), None)

    def parameters(self) -> dict[Type, int]:
        """How many parameters have each type on the tensor-parallel ranks."""
        kinds = self.stages[0].parameters
        return {kind: sum(one.parameters[kind] for one in self.stages) for kind in kinds}


def check_types(
    args: argparse.Namespace, jobs: int = 1, progress: Callable[[int, int], None] | None = None
) -> Verdict:
    """Check the types of a job's gradients, each pipeline stage in a child of this process.

    Args:
        args: final values, as of a dry run.
        jobs: children at a time.
        progress: is called with the stages that are done, and all of them.

    Raises:
        ConfigError: the package ``spmd_types`` is missing.
        MindSpeedError: the model cannot be built, or not without values of tensors.
    """
    require_package()
    from mindspeed.planner import isolated
    from mindspeed.type_check.stage import check_stage

    count = args.pipeline_model_parallel_size
    found = []
    for result in isolated.map(check_stage, [(args, stage) for stage in range(count)], jobs):
        if isinstance(result, MindSpeedError):
            raise result
        found.append(result)
        if progress is not None:
            progress(len(found), count)
    return Verdict(tuple(found))


def check_model(
    model_provider: Callable[..., torch.nn.Module], args: argparse.Namespace, jobs: int = 1
) -> str:
    """Check the model of a framework before it trains.

    Args:
        model_provider: Megatron's: takes ``pre_process``, ``post_process`` and, with virtual
            pipeline stages, ``vp_stage``; returns a chunk with Megatron's ``forward`` and
            ``config``.
        args: the final values of Megatron's arguments.
        jobs: children at a time, one for each pipeline stage.

    Returns:
        What is proven, in words.

    Raises:
        ConfigError: the first wrong use, in words; the package ``spmd_types`` is missing; or
            torch.distributed is initialised, whose groups would be shared by the children.
        MindSpeedError: the model cannot be built, or not without values of tensors.
    """
    import torch.distributed as dist

    require_package()
    import mindspeed.megatron_adaptor  # noqa: F401  (Megatron asks for the CUDA device)

    if dist.is_available() and dist.is_initialized():
        raise ConfigError(
            "mindspeed.check makes the process groups of every stage itself: call it before "
            "torch.distributed.init_process_group"
        )
    from mindspeed.training.arguments import add_names_of_the_trainer
    from mindspeed.type_check.report import describe
    from mindspeed.type_check.stage import ProvidedModel

    job = copy.copy(args)
    add_names_of_the_trainer(job)
    job.planned_loop = ProvidedModel(model_provider)
    verdict = check_types(job, jobs)
    text = describe(job, verdict)
    if verdict.wrong is not None:
        raise ConfigError(text)
    return text


def require_package() -> None:
    """Import the type checker.

    Raises:
        ConfigError: it is not installed; says what to install.
    """
    try:
        import spmd_types.checker  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "mindspeed check --types needs the package spmd_types: pip install 'mindspeed[types]'"
        ) from error
