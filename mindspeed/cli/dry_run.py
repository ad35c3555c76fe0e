"""``--dry-run`` of a training job, and its final values for commands that inspect them.

The dry run prints the resolved values, parameters, bubble and FLOPs at once, then the bytes that
the planner counts (:mod:`mindspeed.planner`), as ``mindspeed plan --check`` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mindspeed.cli.plan_output import memory_table, print_whole
from mindspeed.cli.plan_run import progress
from mindspeed.errors import MindSpeedError, PlanError

if TYPE_CHECKING:
    from mindspeed.planner.compose.compose import Composed
    from mindspeed.training.resolve import Settings


def settings_of(flags: Sequence[str], command: str, ranks: int | None = None) -> Settings:
    """The values of a dry run; features of this process are then those of the job.

    Figures of shapes do not depend on learning rate and duration: these flags may be missing.

    Args:
        flags: of the job.
        command: what the user typed, for messages.
        ranks: size of the job; default ``--nproc``, else what the flags need.

    Raises:
        MindSpeedError: a flag is wrong.
    """
    from mindspeed.training.warning_filters import filter_warnings

    filter_warnings()
    import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
    from mindspeed.training.arguments import build_parser
    from mindspeed.training.initialize import prepare

    parser = build_parser(with_help=False)
    parser.prog = f"mindspeed {command}"
    parser.set_defaults(lr=1e-4)
    if not {"--train-samples", "--config"} & set(flags):
        parser.set_defaults(train_iters=1)
    return prepare(["--dry-run", *flags], ranks, parser=parser)


def print_dry_run(settings: Settings, flags: Sequence[str], defaults: Mapping[str, Any]) -> None:
    """Print what would run, and the bytes of its ranks.

    Args:
        settings: of the dry run; its features are attached.
        flags: of the job.
        defaults: values of flags that neither these nor a recipe set.
    """
    from mindspeed.planner import isolated
    from mindspeed.planner.isolated import import_ahead

    args = settings.args
    import_ahead()
    found = isolated.call(figures, args)  # initialises an accelerator, after which none may fork
    print(f"# resolved configuration\n{settings.recipe}\n# figures\n{found}", flush=True)
    try:
        composed = counted(args, flags, defaults)
    except MindSpeedError as error:  # the other figures do not depend on it
        print(f"# bytes are not counted: {str(error).strip() or type(error).__name__}")
        return
    print("# bytes of the tensors of a rank, counted")
    print_whole(memory_table(composed.check, flops=False))
    if composed.check.note:
        print(composed.check.note)


def figures(args: argparse.Namespace) -> str:
    """Sizes, parameters, bubble and FLOPs, one a line.

    Args:
        args: final values; the process is not part of a job.
    """
    from mindspeed.training.parameter_counts import count, entries_of_model
    from mindspeed.training.pipeline_figures import figures, micro_batches
    from mindspeed.training.token_counts import training_flops

    stages, pipeline = count(args), figures(args)
    fullest = max(stage.entries() for stage in stages)
    layout = (
        f"{args.world_size} = tensor {args.tensor_model_parallel_size} x pipeline "
        f"{args.pipeline_model_parallel_size} x context {args.context_parallel_size} x data "
        f"{args.data_parallel_size}"
    )
    lines = {
        "ranks": layout,
        "micro-batches": f"{micro_batches(args)} per step and rank",
        "parameters": f"{entries_of_model(args, stages):,} ({fullest:,} on the fullest rank)",
        "pipeline bubble": f"{100 * pipeline.bubble:.1f} % ({pipeline.name})",
        "model FLOPs": f"{training_flops(args, args.global_batch_size):.3e} per step",
    }
    return "\n".join(f"  {name:<16} {value}" for name, value in lines.items())


FEW_LAYER_RUNS = 100
"""Layers times micro-batches that are counted as soon as small runs are."""
MANY_LAYER_RUNS = 1_000
"""Those that take minutes, too many for a dry run."""


def counted(
    args: argparse.Namespace, flags: Sequence[str], defaults: Mapping[str, Any]
) -> Composed:
    """Bytes of whole ranks with as few micro-batches as show their peak, or of small runs.

    Args:
        args: final values of a dry run; its features are attached.
        flags: of the job.
        defaults: values of flags that neither these nor a recipe set.

    Raises:
        MindSpeedError: the job cannot be counted, or not in a few minutes; says what is in the way.
    """
    from mindspeed.planner.compose.compose import Composed, compose
    from mindspeed.planner.count.check import check
    from mindspeed.planner.job import Job
    from mindspeed.planner.time.whole_ranks import peak_micro_batches
    from mindspeed.training.pipeline_figures import micro_batches

    batches = peak_micro_batches(args)
    stages = args.pipeline_model_parallel_size
    every = batches or [micro_batches(args)] * stages
    layer_runs = args.num_layers / stages * sum(every)
    composed = None
    if batches is None or layer_runs > FEW_LAYER_RUNS:
        try:
            with progress("counting bytes of small runs") as tell:
                tell(0, 1)
                composed = compose(Job(flags, defaults), args, None)
        except MindSpeedError:  # the job reads values from files that small runs do without
            pass
    if composed is not None:
        return composed
    if layer_runs > MANY_LAYER_RUNS:
        raise PlanError(
            "they cannot be composed of small runs, and whole ranks take minutes: mindspeed plan "
            "--check -- with these flags counts them"
        )
    with progress("counting bytes of whole ranks") as tell:
        return Composed(check(args, progress=tell, micro_batches=batches))
