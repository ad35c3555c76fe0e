"""Tasks of lm-evaluation-harness on local files, without network.

The data of a task comes from ``--data-dir`` (:mod:`.lm_eval_datasets`); everything else of the task
(prompts, examples, filters, metrics, groups) stays the harness' own. Programs that a model writes
run in our sandbox.

The harness has no public way to replace a task's data, so two of its private methods are
overridden; tests fail if they change.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed.errors import ConfigError, DataError
from mindspeed.evaluation import code_execution
from mindspeed.evaluation.lm_eval_datasets import OPTIONAL_SPLITS, Record, Splits, read_splits

# Before any Hugging Face package is imported: no network access.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

from lm_eval.tasks import TaskManager
from lm_eval.tasks._factory import TaskFactory
from lm_eval.tasks._yaml_loader import load_yaml


class LocalTasks(TaskManager):
    """The harness' tasks with their data below ``directory``.

    Args:
        directory: ``--data-dir``.
        more: Directories with additional tasks, as YAML files of the harness.
        defaults: Whether to include the harness' own tasks; reading them takes seconds.
    """

    def __init__(
        self, directory: Path, more: Sequence[Path] = (), *, defaults: bool = True
    ) -> None:
        if not directory.is_dir():
            raise DataError(f"--data-dir {directory}: there is no such directory")
        super().__init__(include_path=list(more), include_defaults=defaults)
        self._factory = _LocalFactory(directory)

    def check(
        self, names: Sequence[str], shots: int | None = None, allow_code: bool = False
    ) -> None:
        """Check that all tasks exist and read their data.

        Raises:
            ConfigError: A task is unknown, or runs programs without consent.
            DataError: A task has no local data.
        """
        for name in names:
            if name not in self.task_index:
                raise ConfigError(
                    f"--tasks {name}: lm-evaluation-harness has no such task; lm_eval ls tasks "
                    "lists them"
                )
        for name, task in self.load(list(names))["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False):
                code_execution.require_consent(allow_code, name)
            number = task.config.num_fewshot if shots is None else shots
            if number and not (task.has_training_docs() or _has_examples(task)):
                raise DataError(
                    f"{name} needs {number} few-shot examples per prompt, but their split is "
                    "missing; give --num-fewshot 0 to run without"
                )


class _LocalFactory(TaskFactory):
    def __init__(self, directory: Path) -> None:
        super().__init__(meta={})
        self._directory = directory

    def _load_full_config(
        self, entry: Any, overrides: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        if entry.name != "humaneval":
            return super()._load_full_config(entry, overrides)
        # Its own functions load a metric from the Hub when they are imported.
        config = load_yaml(entry.yaml_path, resolve_func=False)
        config["metric_list"] = [
            {"metric": pass_at_1, "aggregation": "mean", "higher_is_better": True}
        ]
        join = {"function": "custom", "filter_fn": _whole_programs}
        config["filter_list"] = [{"name": "create_test", "filter": [join]}]
        return {**config, **(overrides or {})}

    def _build_task(self, entry: Any, overrides: dict[str, Any] | None) -> Any:
        config = {**self._load_full_config(entry, None), **(overrides or {})}
        splits = read_splits(config, self._directory)
        # Missing splits matter only for few-shot examples.
        absent = [name for name in OPTIONAL_SPLITS if config.get(name) not in splits]
        local = {"custom_dataset": partial(_data_set, splits), **dict.fromkeys(absent)}
        return super()._build_task(entry, {**(overrides or {}), **local})


def _data_set(splits: Splits, **_: Any) -> Any:
    """Called by the harness instead of a download."""
    import datasets

    return {name: datasets.Dataset.from_list(records) for name, records in splits.items()}


def _has_examples(task: Any) -> bool:
    samples = getattr(task.config.fewshot_config, "samples", None)
    return bool(samples or task.config.fewshot_split or task.has_validation_docs())


def _whole_programs(resps: Sequence[Sequence[str]], docs: Sequence[Record]) -> list[list[str]]:
    """Prompt and answer joined; the harness prescribes the argument names."""
    return [
        [doc["prompt"] + text for text in texts] for texts, doc in zip(resps, docs, strict=True)
    ]


def pass_at_1(references: Sequence[str], predictions: Sequence[Sequence[str]]) -> float:
    """Fraction of programs that pass their tests, run in the sandbox."""
    [tests], [programs] = references, predictions
    verdicts = code_execution.run_programs([f"{program}\n{tests}\n" for program in programs])
    return sum(verdict.passed for verdict in verdicts) / len(verdicts)
