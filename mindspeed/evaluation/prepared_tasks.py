"""Reads and checks all benchmarks of a command line before a model is loaded.

A missing file that is found after the model was loaded, or after the first of seven benchmarks,
wastes a run. So all data is read, every prompt built and every choice tokenized first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed.data.tokenizer_types import TextTokenizer
from mindspeed.errors import ConfigError
from mindspeed.evaluation import code_execution, dataset_readers
from mindspeed.evaluation.model_adapter import encode_pair
from mindspeed.evaluation.prompts import BenchmarkQuestion, TaskOptions, fingerprint, questions
from mindspeed.evaluation.task import Task, task


@dataclass(frozen=True)
class PreparedTask:
    """One benchmark, ready to run.

    Attributes:
        task: Its definition.
        path: Its data.
        shots: Few-shot examples per prompt.
        questions: All questions.
    """

    task: Task
    path: Path
    shots: int
    questions: tuple[BenchmarkQuestion, ...]

    def identity(self) -> dict[str, Any]:
        """Properties that another run must share to continue this one or to be comparable."""
        return {
            "data": str(self.path),
            "shots": self.shots,
            "asked": len(self.questions),
            "prompts_sha256": fingerprint(self.questions),
        }


def prepare_tasks(
    names: Sequence[str],
    paths: Sequence[str],
    *,
    options: TaskOptions,
    shots: int | None = None,
    split: str = "",
    allow_code: bool = False,
) -> list[PreparedTask]:
    """Read the data of every task and build its questions.

    Args:
        names: ``--task``.
        paths: ``--task-data-path``: ``name=path``, or paths alone.
        options: How the benchmarks are run.
        shots: Few-shot examples per prompt; None for each task's default.
        split: For tasks that have splits.
        allow_code: Whether generated programs may run.

    Raises:
        ConfigError, DataError: Something is wrong with the flags or the data.
    """
    tasks = [task(name) for name in names]
    if len(set(names)) < len(names):
        raise ConfigError(f"--task {' '.join(names)}: name every task once")
    for item in tasks:
        if item.score == "program":
            code_execution.require_consent(allow_code, item.name)
    if split and not any(item.splits for item in tasks):
        raise ConfigError(f"--split {split}: none of {', '.join(names)} has splits")
    planned = []
    for item, path in zip(tasks, data_paths(names, paths), strict=True):
        number = item.shots if shots is None else shots
        subjects = dataset_readers.read(item, path, number, split if item.splits else "")
        planned.append(PreparedTask(item, path, number, tuple(questions(item, subjects, options))))
    return planned


def data_paths(names: Sequence[str], paths: Sequence[str]) -> list[Path]:
    """The path of each task: ``name=path``, else the path that contains the name, else by order.

    Raises:
        ConfigError: A task has no path, or a path no task.
    """
    parts = [path.partition("=") for path in paths]
    named = {name: path for name, equals, path in parts if equals and name in names}
    rest = ["".join(part) for part in parts if not (part[1] and part[0] in names)]
    for name in names:
        found = [path for path in rest if _mentions(path, name)]
        if name not in named and len(found) == 1:
            named[name] = found[0]
            rest.remove(found[0])
    missing = [name for name in names if name not in named]
    if len(missing) != len(rest):
        raise ConfigError(
            f"--task-data-path {' '.join(paths)}: one path for each of {', '.join(names)} is "
            f"needed; write them as {names[0]}=PATH"
        )
    named.update(zip(missing, rest, strict=True))
    return [Path(named[name]) for name in names]


def check_choices(planned: Sequence[PreparedTask], tokenizer: TextTokenizer) -> list[str]:
    """Check how the tokenizer splits the choices.

    Returns:
        Notes for the user: tasks whose choices need one pass each.

    Raises:
        ConfigError: A choice has no token, or two choices have the same tokens.
    """
    encode, start = tokenizer.tokenize, tokenizer.eod
    notes = []
    for item in planned:
        seen: set[tuple[str, ...]] = set()
        for question in item.questions:
            if not question.choices or question.choices in seen:
                continue
            seen.add(question.choices)
            ids = [
                tuple(encode_pair(encode, question.body, choice, start)[1])
                for choice in question.choices
            ]
            if len(set(ids)) < len(ids):
                raise ConfigError(
                    f"{item.task.name}: the tokenizer has the same ids for different choices "
                    f"{question.choices}; is it the tokenizer of this model?"
                )
            longest = max(ids, key=len)
            if len(longest) > 1:
                choice = question.choices[ids.index(longest)]
                notes.append(
                    f"{item.task.name}: {choice!r} is {len(longest)} tokens, so every choice needs "
                    "its own pass"
                )
    return notes


def _mentions(path: str, name: str) -> bool:
    """Whether a path contains a task's name in any spelling (``human_eval``, HumanEval)."""
    return name.replace("_", "") in path.lower().replace("_", "").replace("-", "")
