"""Records -> questions: the prompt of a model and the right answer.

    intro       The following are multiple choice questions (with answers) about anatomy.
    shots       Which bone ...?\\nA. ...\\nAnswer: C          (examples with their answers)
    body        Which nerve ...?\\nA. ...\\nAnswer:
    choices     " A" " B" " C" " D"        the most likely one is the answer; without choices, text
                                          is generated and matched (``answer_matching``)

The parts are joined when the context length is known: a prompt that is too long loses its first
examples, and only then text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mindspeed.errors import ConfigError, DataError
from mindspeed.evaluation.dataset_readers import Record, Subject
from mindspeed.evaluation.task import FROM_OPTIONS, Task, function_named

Mode = Literal["auto", "loglikelihood", "generate"]
MODES: tuple[Mode, ...] = ("auto", "loglikelihood", "generate")

_SEPARATOR = "\n\n"
_LETTERS = "ABCDEFG"


@dataclass(frozen=True)
class BenchmarkQuestion:
    """One question for a model.

    Attributes:
        task: Name of the benchmark.
        subject: Part of it; may be empty.
        index: Position within the subject.
        intro: Start of the prompt.
        shots: Few-shot examples.
        body: The question itself.
        choices: Texts to compare; empty if the answer is generated.
        target: Right answer: a text, or several letters; None if the data has none.
        score: Key of ``answer_matching.MATCHERS``, or ``program``.
        stop: Stop strings of a generated answer.
        max_new_tokens: Maximum length of a generated answer.
        sample: Index of this attempt, if a question is asked several times.
        record: The record it was made from.
    """

    task: str
    subject: str
    index: int
    intro: str
    shots: tuple[str, ...]
    body: str
    choices: tuple[str, ...]
    target: Any
    score: str
    stop: tuple[str, ...]
    max_new_tokens: int
    sample: int = 0
    record: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def key(self) -> str:
        """Unique name within a run."""
        parts = [self.task, self.subject, str(self.index)]
        name = "/".join(part for part in parts if part)
        return f"{name}#{self.sample}" if self.sample else name

    def prompt(self, shots: int | None = None) -> str:
        """The prompt with the last ``shots`` examples (default: all)."""
        kept = self.shots if shots is None else self.shots[len(self.shots) - shots :]
        return self.intro + "".join(shot + _SEPARATOR for shot in kept) + self.body


@dataclass(frozen=True)
class TaskOptions:
    """How a benchmark is run.

    Attributes:
        mode: ``loglikelihood`` compares choices, ``generate`` matches generated text, ``auto``
            compares if there are choices.
        limit: Questions per subject; None for all.
        samples: Attempts per question whose answer is a program (pass@k).
        max_new_tokens: Maximum length of generated answers; None for the task's default.
    """

    mode: Mode = "auto"
    limit: int | None = None
    samples: int = 1
    max_new_tokens: int | None = None


def questions(
    task: Task, subjects: Sequence[Subject], options: TaskOptions
) -> list[BenchmarkQuestion]:
    """Every question of a benchmark, in the order of its files.

    Raises:
        ConfigError: The task has no choices to compare.
        DataError: A record's answer cannot be parsed.
    """
    if options.mode == "loglikelihood" and not task.choices:
        raise ConfigError(
            f"--scoring loglikelihood: {task.name} has no choices to compare; use generate or auto"
        )
    result: list[BenchmarkQuestion] = []
    for subject in subjects:
        result += _of_subject(task.for_subject(subject.name), subject, options)
    return result


def fingerprint(questions: Sequence[BenchmarkQuestion]) -> str:
    """SHA-256 over all prompts, choices and targets."""
    digest = hashlib.sha256()
    for question in questions:
        parts = [question.key, question.prompt(), question.choices, question.target]
        digest.update(json.dumps(parts, ensure_ascii=False).encode())
    return digest.hexdigest()


def _of_subject(task: Task, subject: Subject, options: TaskOptions) -> Iterator[BenchmarkQuestion]:
    words = {"subject_words": task.words_for(subject.name)}
    intro = task.intro.format_map(words) + subject.intro
    shots = []
    for index, record in enumerate(subject.shots):
        prepared = _prepared(task, subject.name, index, record)
        shots.append(task.prompt.format_map(prepared) + _answer(task, prepared))
    repeats = options.samples if task.score == "program" else 1
    for index, record in enumerate(subject.records[: options.limit]):
        prepared = _prepared(task, subject.name, index, record)
        if task.choices == FROM_OPTIONS and not prepared["has_options"]:
            raise DataError(
                f"{_place(task, subject.name, index)}: fewer than two options: any answer would "
                "be right"
            )
        target = prepared.get("target")
        choices = _choices(task, prepared) if options.mode != "generate" else ()
        if len(target or "") != 1 and task.choices == FROM_OPTIONS:
            choices = ()  # several right letters: only generated text can name them
        for sample in range(repeats):
            yield BenchmarkQuestion(
                task.name,
                subject.name,
                index,
                intro,
                tuple(shots),
                task.prompt.format_map(prepared),
                choices,
                target,
                task.score,
                task.stop,
                options.max_new_tokens or task.max_new_tokens,
                sample,
                record,
            )


def _prepared(task: Task, subject: str, index: int, record: Record) -> Record:
    """The record with the derived fields that templates and score need."""
    fields = dict(record)
    if task.prepare is None:
        fields.setdefault("target", record.get("answer"))
        return fields
    try:
        return {**fields, **function_named(task.prepare, PREPARE)(fields)}
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(f"{_place(task, subject, index)}: {error}") from error


def _place(task: Task, subject: str, index: int) -> str:
    return f"{task.name}{'/' + subject if subject else ''}, record {index + 1}"


def _answer(task: Task, prepared: Record) -> str:
    """The answer of an example, in the form that follows its prompt."""
    if task.answer:
        return task.answer.format_map(prepared)
    choices, target = _choices(task, prepared), prepared["target"]
    right = [choice for choice in choices if choice.strip() == target]
    return right[0] if right else f" {target}"


def _choices(task: Task, prepared: Record) -> tuple[str, ...]:
    if task.choices == FROM_OPTIONS:
        return tuple(f" {letter}" for letter in _LETTERS[: prepared["number_of_options"]])
    return tuple(task.choices)


def _prepare_boolq(record: Record) -> Record:
    return {"target": "Yes" if record["answer"] else "No"}


def _prepare_gsm8k(record: Record) -> Record:
    """``16 - 3 = <<16-3=13>>13 left.\\n#### 13`` -> the reasoning on one line, and the number."""
    reasoning, marked, number = record["answer"].rpartition("####")
    if not marked:
        raise ValueError(f"the answer has no '#### number': {record['answer'][-40:]!r}")
    reasoning = re.sub(r"<<.*?>>", "", reasoning)
    number = number.strip()
    return {"reasoning": " ".join(reasoning.split()), "number": number, "target": number}


def _prepare_agieval(record: Record) -> Record:
    """Published versions differ: null for an empty passage, a label that is a letter or a list."""
    options = record.get("options") or []
    if isinstance(options, str):
        options = [options]
    label, answer = record.get("label"), record.get("answer")
    target = label if label else answer
    if not target:
        raise ValueError("label and answer are both missing or empty")
    target = "".join(target) if isinstance(target, list) else str(target)
    # Some records hold all options in one string: "A. ...\tB. ...".
    number = len(options) if len(options) != 1 else len(re.findall(r"\b[A-G]\. ", options[0]))
    return {
        "passage": record.get("passage") or "",
        "options": " ".join(options),
        "number_of_options": number or 4,
        "has_options": number != 1 and bool("".join(options).strip()),
        "last": _LETTERS[(number or 4) - 1],
        "target": target.strip(),
    }


PREPARE: dict[str, Callable[[Record], Record]] = {
    "boolq": _prepare_boolq,
    "gsm8k": _prepare_gsm8k,
    "agieval": _prepare_agieval,
}
