"""What a benchmark is: an entry of ``tasks.yaml``, typed.

A new benchmark is a new entry. What cannot be said in data, how a raw record becomes fields and how
generated text becomes an answer, is named there: a name of ``prompts.PREPARE`` and
``answer_matching.MATCHERS``, or ``module:function`` (:func:`function_named`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from mindspeed import plugins
from mindspeed.errors import ConfigError

SAME_FILE = "same"
FROM_OPTIONS = "from_options"


@dataclass(frozen=True)
class Task:
    """A benchmark.

    Attributes:
        name: What ``--task`` calls it.
        title: One line for people.
        files: Patterns of the question files; ``{subject}`` makes one subject of each file,
            ``{split}`` is the split asked for.
        format: ``jsonl`` (also a JSON list, also gzipped), ``csv`` or ``examples`` (a JSON object
            with a list under that name).
        columns: Names of the columns of a CSV file without a header.
        fields: What every record must have: name -> ``str``, ``bool`` or ``letter``.
        fields_of_split: Further fields of one split.
        other_names: Field -> the name it has in other published versions.
        prepare: Name of the function that adds derived fields.
        splits: Splits to choose from; the first is the default.
        intro: Begins the prompt.
        intro_files: Files whose text begins the prompt.
        prompt: Template of one question.
        answer: Template of an example's answer, for tasks without choices.
        choices: Texts of which the likeliest is the answer; ``from_options`` takes a letter for
            each option of the record; empty for tasks that only generate.
        score: Name of the function that judges generated text.
        shots: Examples in front of the question, unless said otherwise.
        shot_files: Where they are read; ``same`` takes them from the question file's start.
        own_shots: Records used where the data has no such file.
        stop: Texts that end an answer.
        max_new_tokens: Length of a generated answer.
        groups: Group -> subjects, for the report.
        subject_words: Subject -> how the prompt calls it (default: underscores become spaces).
        variants: Changes for some subjects: ``subjects`` and any of the fields above.
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
        """This task with the changes that ``subject`` asks for."""
        for variant in self.variants:
            if subject in variant["subjects"]:
                return replace(self, **{k: v for k, v in variant.items() if k != "subjects"})
        return self

    def required_fields(self, split: str) -> dict[str, str]:
        """Name -> type of what a record must have."""
        return {**self.fields, **self.fields_of_split.get(split, {})}

    def words_for(self, subject: str) -> str:
        """How a prompt calls the subject."""
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
    return {name: _task(name, entry) for name, entry in yaml.safe_load(text).items()}


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
