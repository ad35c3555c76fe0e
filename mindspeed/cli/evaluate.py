"""``mindspeed evaluate``: score a model on benchmarks from local files.

    mindspeed evaluate --load runs/llama/checkpoints --task boolq --task-data-path data/boolq
    mindspeed evaluate --load DIR --tp 2 --dp 2 --task mmlu ceval \\
        --task-data-path mmlu=data/mmlu ceval=data/ceval --output runs/llama/scores
    mindspeed evaluate --load DIR --engine lm-eval --tasks hellaswag,gsm8k --data-dir data

--task below lists the built-in tasks; --engine lm-eval provides those of lm-evaluation-harness.
Data and flags are checked before the model is loaded. With --output, running the same command again
continues an interrupted evaluation. The table is printed to standard output, all else to standard
error.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed.cli.inference_flags import add_model_arguments, run_model
from mindspeed.errors import ConfigError
from mindspeed.evaluation.prompts import MODES, TaskOptions
from mindspeed.evaluation.task import names as task_names
from mindspeed.inference.sampling import SamplingOptions
from mindspeed.ranges import MAX_RANKS, NOT_NEGATIVE, Range, number, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mindspeed.evaluation.prepared_tasks import PreparedTask
    from mindspeed.inference.text_generator import TextGenerator

_SETTINGS = (
    "scoring",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "samples",
    "prompt_type",
    "max_length",
    "max_new_tokens",
    "limit",
    "split",
    "tokenizer_model",
    "lora_load",
)

HELP = "score a model on benchmarks from local files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add = parser.add_argument
    add("--dp", type=whole(1, MAX_RANKS), default=1, help="data-parallel replicas of the model")
    add(
        "--max-length",
        type=whole(1),
        help="maximum tokens of prompt and answer (default: the model's)",
    )
    _add_task_arguments(parser.add_argument_group("tasks"))
    _add_harness_arguments(parser.add_argument_group("lm-evaluation-harness"))
    _add_answer_arguments(parser.add_argument_group("answers"))
    _add_run_arguments(parser.add_argument_group("run"))


def _add_task_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--task",
        nargs="+",
        action="extend",
        metavar="NAME",
        help=f"one or more of: {task_names().replace('%', '%%')}",
    )
    add(
        "--task-data-path",
        nargs="+",
        action="extend",
        metavar="[NAME=]PATH",
        help="data directory of each task; without NAME=, paths are matched by the task's name in "
        "them, otherwise by the order of --task",
    )
    add("--split", default="", help="ceval: val (default), or test, which writes submission.json")
    add("--num-fewshot", type=whole(0), help="few-shot examples per prompt (default: the task's)")
    add("--limit", type=whole(1), help="questions per subject (default: all)")
    add(
        "--scoring",
        choices=MODES,
        default="auto",
        help="loglikelihood: compare the choices; generate: match generated text; auto (default): "
        "compare if there are choices",
    )
    add(
        "--allow-code-execution",
        action="store_true",
        help="human_eval: allow running the programs that the model writes, in a sandbox",
    )


def _add_harness_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--engine",
        choices=("mindspeed", "lm-eval"),
        default="mindspeed",
        help="default: %(default)s",
    )
    add("--tasks", metavar="NAMES", help="tasks and groups of the harness, separated by commas")
    add("--data-dir", type=Path, metavar="DIR", help="directory of their data")


def _add_answer_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--max-new-tokens", type=whole(1), help="maximum length of an answer (default: the task's)")
    add("--greedy", action="store_true", help="greedy decoding, the default without --temperature")
    add("--temperature", type=number(NOT_NEGATIVE), help="sample with this temperature")
    add(
        "--top-k",
        type=whole(0),
        default=0,
        help="sample from the K most likely tokens (default: 0, all)",
    )
    add(
        "--top-p",
        type=number(Range(0, 1, above=True)),
        default=1.0,
        help="nucleus sampling (default: 1, all tokens)",
    )
    add("--seed", type=whole(0, 2**32 - 1), default=SamplingOptions.seed, help="random seed")
    add("--samples", type=whole(1), default=1, help="human_eval: programs per problem, for pass@k")
    add("--prompt-type", metavar="NAME", help="apply this chat template to the prompts")


def _add_run_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--evaluation-batch-size", type=whole(1), default=16, help="questions per batch")
    add(
        "--tokens-per-batch",
        type=whole(1),
        default=4096,
        help="maximum tokens of a log-likelihood pass",
    )
    add("--output", type=Path, metavar="DIR", help="directory for results.json and samples.jsonl")


def run(args: argparse.Namespace) -> int:
    """Run the evaluation; outside a job with more than one rank, launch the ranks first."""
    _check(args)
    from mindspeed.evaluation import code_execution
    from mindspeed.training.launch import inside_a_job

    if args.allow_code_execution and not inside_a_job():
        code_execution.warn_about_gaps()
        print(
            f"mindspeed evaluate: programs run isolated by {code_execution.best_isolation()}",
            file=sys.stderr,
        )
    return (_run_harness if args.engine == "lm-eval" else _run)(args)


def _run(args: argparse.Namespace) -> int:
    """Built-in benchmarks."""
    from mindspeed.evaluation import prepared_tasks, samples
    from mindspeed.training.launch import inside_a_job

    tasks = prepared_tasks.prepare_tasks(
        args.task,
        args.task_data_path,
        options=TaskOptions(args.scoring, args.limit, args.samples, args.max_new_tokens),
        shots=args.num_fewshot,
        split=args.split,
        allow_code=args.allow_code_execution,
    )
    if not inside_a_job():
        _check_choices(args, tasks)
        if args.output is not None:
            samples.check(args.output, _identity(args, tasks))
    return run_model("evaluate", args, lambda generator: _evaluate(args, tasks, generator))


def _run_harness(args: argparse.Namespace) -> int:
    """Tasks of lm-evaluation-harness."""
    _import_megatron_adaptor()
    try:
        from mindspeed.evaluation import lm_eval_adapter
        from mindspeed.evaluation.lm_eval_tasks import LocalTasks
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--engine lm-eval needs a package that is not installed ({error.name}): "
            'pip install "mindspeed[eval]"'
        ) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns about its built-in tasks
    names = args.tasks.split(",")
    tasks = LocalTasks(args.data_dir)
    tasks.check(names, args.num_fewshot, args.allow_code_execution)

    def body(generator: TextGenerator) -> None:
        model = lm_eval_adapter.MindSpeedLM.of(
            generator,
            max_length=args.max_length,
            batch_size=args.evaluation_batch_size,
            tokens_per_batch=args.tokens_per_batch,
            prompt_type=args.prompt_type,
            answers=None if args.output is None else args.output / "answers",
            weights=_model(args),
        )
        results = lm_eval_adapter.evaluate(
            model,
            names,
            tasks,
            shots=args.num_fewshot,
            limit=args.limit,
            chat=args.prompt_type is not None,
            allow_code=args.allow_code_execution,
        )
        if results is not None:
            lm_eval_adapter.report(results, _model(args), args.output)

    return run_model("evaluate", args, body)


def _check(args: argparse.Namespace) -> None:
    needed = {"mindspeed": ("task", "task_data_path"), "lm-eval": ("tasks", "data_dir")}
    for engine, names in needed.items():
        for name in names:
            given, flag = getattr(args, name) is not None, f"--{name.replace('_', '-')}"
            if given and engine != args.engine:
                raise ConfigError(f"{flag} belongs to --engine {engine}")
            if not given and engine == args.engine:
                raise ConfigError(f"{flag} is needed with --engine {engine}")
    sampled = args.temperature is not None
    if args.greedy and sampled:
        raise ConfigError("--greedy and --temperature exclude each other")
    if args.samples > 1 and not sampled:
        raise ConfigError(
            f"--samples {args.samples}: greedy answers are identical; give --temperature, "
            "for example 0.8"
        )
    _sampling(args)


def _sampling(args: argparse.Namespace) -> SamplingOptions:
    if args.temperature is None:
        return SamplingOptions(greedy=True)
    return SamplingOptions(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed
    )


def _check_choices(args: argparse.Namespace, tasks: Sequence[PreparedTask]) -> None:
    """Check that the tokenizer fits the questions, before the model is loaded."""
    _import_megatron_adaptor()
    from mindspeed.data.tokenizer import build_tokenizer
    from mindspeed.data.tokenizer_types import TokenizerOptions
    from mindspeed.evaluation.prepared_tasks import check_choices
    from mindspeed.inference.load import Source, resolve_source

    source = Source(args.load, args.ckpt_step, args.tp, args.pp, args.tokenizer_model)
    final = resolve_source(source, args.tp * args.pp * args.dp)
    for note in check_choices(tasks, build_tokenizer(TokenizerOptions.from_args(final))):
        print(f"mindspeed evaluate: {note}", file=sys.stderr, flush=True)


def _import_megatron_adaptor() -> None:
    """Import the adaptor, before Megatron."""
    from mindspeed.training.warning_filters import filter_warnings

    filter_warnings()
    import mindspeed.megatron_adaptor  # noqa: F401


def _evaluate(
    args: argparse.Namespace, tasks: Sequence[PreparedTask], generator: TextGenerator
) -> None:
    """Evaluate on all ranks and print the table on rank 0. Collective."""
    from mindspeed.evaluation import evaluate
    from mindspeed.evaluation.model_adapter import ModelAdapter
    from mindspeed.evaluation.run import Replica

    wrap, stops = _template(args.prompt_type, generator.tokenizer)
    model = ModelAdapter(
        generator,
        args.max_length or generator.context_length,
        _sampling(args),
        args.tokens_per_batch,
        wrap,
        stops,
    )
    data = generator.groups.dp
    replica = Replica(data.rank(), data.size()) if data is not None else Replica()
    results = evaluate.evaluate(
        tasks,
        model,
        identity=_identity(args, tasks),
        replica=replica,
        is_writer=generator.groups.mp.rank() == 0,
        output=args.output,
        batch_size=args.evaluation_batch_size,
        seed=args.seed,
    )
    if results is not None:
        print(evaluate.table(results["tasks"]), flush=True)


def _template(name: str | None, tokenizer: Any) -> tuple[Any, tuple[str, ...]]:
    if name is None:
        return str, ()
    from mindspeed.data import templates

    template = templates.load(name, tokenizer)

    def wrap(text: str) -> str:
        message = {"role": "user", "content": text}
        return template.render([message], add_generation_prompt=True).text

    return wrap, tuple(template.stop)


def _identity(args: argparse.Namespace, tasks: Sequence[PreparedTask]) -> dict[str, Any]:
    """Identity that another command must share to continue this run."""
    from mindspeed.evaluation.evaluate import identity_of

    settings = {name: getattr(args, name) for name in _SETTINGS}
    return identity_of(tasks, _model(args), settings)


def _model(args: argparse.Namespace) -> dict[str, str]:
    """Identity of the model's weights."""
    from mindspeed.evaluation.evaluate import fingerprint_of_weights

    return fingerprint_of_weights(args.load, args.ckpt_step, args.lora_load)
