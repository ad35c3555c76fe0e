"""The definition of a benchmark: an entry of ``tasks.yaml``, typed.

A new benchmark is a new entry. Code that an entry needs (how a raw record becomes fields, how
generated text is matched) is named there: a key of ``prompts.PREPARE`` or
``answer_matching.MATCHERS``, or ``module:function`` (:func:`function_named`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

from mindspeed import plugins
from mindspeed.errors import ConfigError
from mindspeed.parsing import parse_yaml

SAME_FILE = "same"
FROM_OPTIONS = "from_options"


@dataclass(frozen=True)
class Task:
    """A benchmark.

    Attributes:
        name: Its name for ``--task``.
        title: One-line description.
        files: Patterns of the question files; each match of ``{subject}`` is one subject,
            ``{split}`` is the requested split.
        format: ``jsonl`` (also a JSON list, also gzipped), ``csv`` or ``examples`` (a JSON object
            with a list under that name).
        columns: Column names of a CSV file without a header.
        fields: Required fields of a record: name -> ``str``, ``bool`` or ``letter``.
        fields_of_split: Additional required fields of a split.
        other_names: Field -> its name in other published versions of the data.
        prepare: Name of the function that adds derived fields.
        splits: Available splits; the first is the default.
        intro: Start of the prompt.
        intro_files: Files whose text starts the prompt.
        prompt: Template of one question.
        answer: Template of an example's answer, for tasks without choices.
        choices: Texts of which the most likely is the answer; ``from_options`` means one letter
            per option of the record; empty for tasks that only generate.
        score: Name of the matcher for generated text, or ``program``.
        shots: Default number of few-shot examples.
        shot_files: Their files; ``same`` takes them from the start of the question file.
        own_shots: Examples used if the data has no such file.
        stop: Strings that end an answer.
        max_new_tokens: Maximum length of a generated answer.
        groups: Group -> subjects, for the report.
        subject_words: Subject -> its name in the prompt (default: underscores become spaces).
        variants: Overrides for some subjects: ``subjects`` and any of the fields above.
    """

    name: str
    title: str
    files: tuple[str, ...]
    format: str
    fields: Mapping[str, str]
    prompt: str
    score: str
    max_new_tokens: int
    columns: tuple[str, ...] = ()
    fields_of_split: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    other_names: Mapping[str, str] = field(default_factory=dict)
    prepare: str | None = None
    splits: tuple[str, ...] = ()
    intro: str = ""
    intro_files: tuple[str, ...] = ()
    answer: str = ""
    choices: tuple[str, ...] | str = ()
    shots: int = 0
    shot_files: tuple[str, ...] | str = ()
    own_shots: tuple[Mapping[str, Any], ...] = ()
    stop: tuple[str, ...] = ()
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    subject_words: Mapping[str, str] = field(default_factory=dict)
    variants: tuple[Mapping[str, Any], ...] = ()

    def for_subject(self, subject: str) -> Task:
        """This task with the overrides for ``subject``."""
        for variant in self.variants:
            if subject in variant["subjects"]:
                return replace(self, **{k: v for k, v in variant.items() if k != "subjects"})
        return self

    def required_fields(self, split: str) -> dict[str, str]:
        """Required fields of a record: name -> type."""
        return {**self.fields, **self.fields_of_split.get(split, {})}

    def words_for(self, subject: str) -> str:
        """The subject's name in prompts."""
        return self.subject_words.get(subject, subject.replace("_", " "))


def task(name: str) -> Task:
    """The task called ``name``.

    Raises:
        ConfigError: There is none.
    """
    known = tasks()
    if name not in known:
        raise ConfigError(f"--task {name} is unknown; allowed are {', '.join(known)}")
    return known[name]


@cache
def tasks() -> dict[str, Task]:
    """All tasks by name: those of ``tasks.yaml``, then those of installed plug-ins.

    Raises:
        ConfigError: a plug-in cannot be used, or has the name of another task.
    """
    return plugins.with_plugins(
        plugins.TASKS,
        builtin(),
        lambda value: isinstance(value, Task),
        "a mindspeed.evaluation.task.Task",
    )


def names() -> str:
    """The names of all tasks; a plug-in's with its package."""
    origins = {name: plugins.origin(plugins.TASKS, name) for name in tasks()}
    return ", ".join(
        name if origin == plugins.BUILT_IN else f"{name} ({origin})"
        for name, origin in origins.items()
    )


@cache
def builtin() -> dict[str, Task]:
    """All tasks of ``tasks.yaml``, in its order."""
    text = files(__package__).joinpath("tasks.yaml").read_text("utf-8")
    return {name: _task(name, entry) for name, entry in parse_yaml(text, "tasks.yaml").items()}


def function_named(name: str, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """One of ``known``, or the function that ``module:function`` names."""
    module, colon, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute) if colon else known[name]


def _task(name: str, entry: Mapping[str, Any]) -> Task:
    known = {item.name for item in fields(Task)} - {"name"}
    for part in (entry, *entry.get("variants", ())):
        if unknown := set(part) - known - {"subjects"}:
            raise ConfigError(f"tasks.yaml: {name} has unknown fields {sorted(unknown)}")
    return Task(name=name, **{key: _frozen(value) for key, value in entry.items()})


def _frozen(value: Any) -> Any:
    """YAML lists as tuples, at every depth."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return value
