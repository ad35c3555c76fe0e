"""``--engine lm-eval``: runs lm-evaluation-harness on a mindspeed model and writes its results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lm_eval import simple_evaluate, utils

from mindspeed import __version__
from mindspeed.evaluation import code_execution
from mindspeed.evaluation.lm_eval_adapter import MindSpeedLM
from mindspeed.evaluation.lm_eval_tasks import LocalTasks
from mindspeed.files import atomic_write_text


def evaluate(
    model: MindSpeedLM,
    names: Sequence[str],
    tasks: LocalTasks,
    *,
    shots: int | None = None,
    limit: int | None = None,
    chat: bool = False,
    allow_code: bool = False,
) -> dict[str, Any] | None:
    """The harness' results on rank 0, None on the others. Collective.

    Args:
        model: This rank's part of the model.
        names: Tasks, groups or tags of the harness.
        tasks: Provides them with local data.
        shots: Few-shot examples per prompt; None for each task's default.
        limit: Documents per task.
        chat: Whether to apply the chat template.
        allow_code: Whether tasks may run programs that the model writes.
    """
    results = simple_evaluate(
        model=model,
        tasks=list(names),
        num_fewshot=shots,
        limit=limit,
        apply_chat_template=chat,
        confirm_run_unsafe_code=allow_code,
        task_manager=tasks,
        bootstrap_iters=1000,
    )
    if results is None or dist.get_rank() != 0:
        return None
    if allow_code:
        results["config"]["code_execution"] = code_execution.isolation_record()
    return results


def report(results: dict[str, Any], weights: Mapping[str, str], output: Path | None) -> None:
    """Print the harness' tables; write ``results.json`` and ``samples.jsonl``.

    Args:
        results: From :func:`evaluate`.
        weights: Identity of the model's weights.
        output: Directory of the files; None to write none.
    """
    print(utils.make_table(results), flush=True)
    if results.get("groups"):
        print(utils.make_table(results, "groups"), flush=True)
    if output is None:
        return
    dump = partial(json.dumps, default=str, ensure_ascii=False)
    samples = results.pop("samples", {})
    results["config"].update(model_files=dict(weights), mindspeed=__version__)
    lines = [dump({"task": name, **sample}) for name, found in samples.items() for sample in found]
    atomic_write_text(output / "samples.jsonl", "".join(f"{line}\n" for line in lines))
    atomic_write_text(output / "results.json", dump(results, indent=2) + "\n")
