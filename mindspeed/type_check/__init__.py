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
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindspeed.errors import ConfigError, MindSpeedError, PlanError
from mindspeed.flags import changed

if TYPE_CHECKING:
    import torch

    from mindspeed.spmd import Type
    from mindspeed.type_check.chunk import WrongUse


@dataclass(frozen=True)
class Verdict:
    """What was found in all stages.

    Attributes:
        wrong: the first wrong use; None if there is none.
        parameters: how many have each type on the tensor-parallel ranks.
        stages: pipeline stages that ran; the others are made of the same chunks.
        with_values: why stages ran on short samples of real tensors, and not on FakeTensors.
    """

    wrong: WrongUse | None
    parameters: Mapping[Type, int]
    stages: tuple[int, ...]
    with_values: Mapping[int, str]


def check_types(
    args: argparse.Namespace, jobs: int = 1, progress: Callable[[int, int], None] | None = None
) -> Verdict:
    """Check the types of a job's gradients, pipeline stages in children of this process.

    Args:
        args: final values, as of a dry run.
        jobs: children at a time.
        progress: is called with the stages that are done, and all of them.

    Raises:
        ConfigError: the package ``spmd_types`` is missing.
        MindSpeedError: the model cannot be built or run.
    """
    require_package()
    from mindspeed.planner import isolated
    from mindspeed.planner.count.planned_tensors import NoFakeKernel, ReadsValue
    from mindspeed.type_check.equal_parts import chunks_of_stages
    from mindspeed.type_check.stage import check_stage, import_ahead, shortened

    chunks = chunks_of_stages(args)
    asked: dict[Hashable, tuple[int, int]] = {}
    for stage, own in enumerate(chunks):
        for number, chunk in enumerate(own):
            asked.setdefault(chunk, (stage, number))
    numbers: dict[int, list[int]] = {}
    for stage, number in asked.values():
        numbers.setdefault(stage, []).append(number)
    stages = list(numbers)
    import_ahead(args)
    counts: dict[Hashable, Mapping[Type, int]] = {}
    wrong, with_values = None, {}
    results = isolated.map(check_stage, [(args, *each) for each in numbers.items()], jobs)
    for stage, result in zip(stages, results, strict=True):
        if isinstance(result, ReadsValue | NoFakeKernel | PlanError):
            with_values[stage] = str(result).partition(";")[0]  # not what planning would need
            check = functools.partial(check_stage, with_values=True)
            result = isolated.call(check, shortened(args), stage, numbers[stage])
        if isinstance(result, MindSpeedError):
            raise result
        wrong = wrong or result.wrong
        for number, found in zip(numbers[stage], result.parameters, strict=False):
            counts[chunks[stage][number]] = found
        if progress is not None:
            progress(stages.index(stage) + 1, len(stages))
    total: Counter[Type] = Counter()
    for chunk in itertools.chain(*chunks):
        total.update(counts.get(chunk, {}))
    return Verdict(wrong, total, tuple(stages), with_values)


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
        MindSpeedError: the model cannot be built or run.
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

    job = changed(args, planned_loop=ProvidedModel(model_provider))
    add_names_of_the_trainer(job)
    verdict = check_types(job, jobs)
    text = describe(job, verdict)
    if verdict.wrong is not None:
        raise ConfigError(text)
    return text


def require_package() -> None:
    """Import the type checker.

    Raises:
        ConfigError: it is not installed, or torch is too old; says what to install.
    """
    from mindspeed.device.torch_versions import at_least

    if not at_least("2.10"):
        raise ConfigError("mindspeed check --types needs torch 2.10 or newer")
    try:
        import spmd_types.checker  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "mindspeed check --types needs the package spmd_types: pip install 'mindspeed[types]'"
        ) from error
