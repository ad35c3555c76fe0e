"""Reads the files of a benchmark as records and checks every field.

Errors in the data are reported here, with file and line, before a model is loaded: a wrong
directory (with the expected layout), a missing file of few-shot examples, a record without a field,
a value of the wrong type.
"""

from __future__ import annotations

import ast
import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed.errors import ConfigError, DataError
from mindspeed.evaluation.task import SAME_FILE, Task
from mindspeed.files import check_path
from mindspeed.parsing import parse_json

Record = dict[str, Any]

_LETTERS = "ABCDEFG"


@dataclass(frozen=True)
class Subject:
    """The records of one subject of a benchmark.

    Attributes:
        name: Empty for a benchmark that is one file.
        records: Questions.
        shots: Few-shot examples.
        intro: Text of the task's ``intro_files``, or empty.
    """

    name: str
    records: tuple[Record, ...]
    shots: tuple[Record, ...]
    intro: str


def read(task: Task, path: Path, shots: int, split: str = "") -> list[Subject]:
    """All subjects of a benchmark.

    Args:
        task: The benchmark.
        path: Its directory, or its file for a benchmark of one file.
        shots: Few-shot examples per prompt.
        split: One of ``task.splits``; empty for the first.

    Raises:
        ConfigError: There is no such split, or there are fewer examples than ``shots``.
        DataError: The directory has another layout, or a record is invalid.
    """
    split = _split(task, split)
    root, found = _question_files(task, path, split)
    subjects = []
    for name, files in found.items():
        wanted = task.required_fields(split)
        records = [record for file in files for record in _records(task, file, wanted)]
        if not records:
            raise DataError(f"{files[0]} has no questions")
        examples = _shots(task, root, name, records, shots)
        if task.shot_files == SAME_FILE:
            records = records[shots:]
        subjects.append(Subject(name, tuple(records), tuple(examples), _intro(task, root, name)))
    return subjects


def layout(task: Task) -> str:
    """The files that a task reads, for error messages and listings."""
    text = " or ".join(task.files)
    if task.shot_files and task.shot_files != SAME_FILE:
        text += f"; for examples {' or '.join(task.shot_files)}"
    return text


def _split(task: Task, split: str) -> str:
    if not split:
        return task.splits[0] if task.splits else ""
    if split not in task.splits:
        allowed = ", ".join(task.splits) or "none: it has a single split"
        raise ConfigError(f"--split {split}: {task.name} allows {allowed}")
    return split


def _question_files(task: Task, path: Path, split: str) -> tuple[Path, dict[str, list[Path]]]:
    """The directory, and subject -> files."""
    if not path.exists():
        raise DataError(f"--task-data-path {path}: there is no such file or directory")
    check_path(path, "input")
    if path.is_file():
        return path.parent, {"": [path]}
    for pattern in task.files:
        pattern = pattern.replace("{split}", split)
        head, subject, tail = pattern.partition("{subject}")
        matches = sorted(path.glob(f"{head}*{tail}" if subject else pattern))
        if subject:
            prefix, suffix = Path(f"{head}x{tail}").name.split("x", 1)
            names = [file.name[len(prefix) : len(file.name) - len(suffix)] for file in matches]
            found = {name: [file] for name, file in zip(names, matches, strict=True)}
        else:
            examples = {Path(name).name for name in task.shot_files}
            matches = [file for file in matches if file.name not in examples]
            found = {"": matches} if matches else {}
        known = {name for names in task.groups.values() for name in names}
        if found and (not known or known & set(found)):
            return path, found
    raise DataError(
        f"--task-data-path {path}: no files of {task.name} found; expected files are {layout(task)}"
    )


def _shots(
    task: Task, root: Path, subject: str, records: Sequence[Record], number: int
) -> Sequence[Record]:
    if not number:
        return ()
    if task.shot_files == SAME_FILE:
        if len(records) <= number:
            raise ConfigError(
                f"--num-fewshot {number}: {task.name} takes its examples from {subject} itself, "
                f"which has {len(records)} records; use a smaller number"
            )
        return records[:number]
    wanted = task.required_fields(task.splits[0] if task.splits else "")
    paths = [root / pattern.replace("{subject}", subject) for pattern in task.shot_files]
    file = next((path for path in paths if path.is_file()), None)
    if file is not None and file.name.endswith("_prompts.csv"):
        examples: Sequence[Record] = list(_agieval_examples(file, subject))
    elif file is not None:
        examples = list(_records(task, file, wanted))
    elif task.own_shots:
        examples = [dict(record) for record in task.own_shots]
    else:
        where = f"{paths[0]}, which does not exist" if paths else "nowhere: it has no examples"
        raise ConfigError(
            f"{task.name} needs {number} few-shot examples per prompt and reads them from "
            f"{where}; give --num-fewshot 0 to run without"
        )
    if len(examples) < number:
        source = file or "the built-in examples"
        raise ConfigError(
            f"--num-fewshot {number}: {source} has {len(examples)} examples"
            + (f" for {subject}" if subject else "")
        )
    return examples[:number]


def _intro(task: Task, root: Path, subject: str) -> str:
    """The text after the dashed line in a file of published prompts; before it such files have a
    notice for collectors of training data."""
    if not task.intro_files:
        return ""
    paths = [root / pattern.replace("{subject}", subject) for pattern in task.intro_files]
    file = next((path for path in paths if path.is_file()), None)
    if file is None:
        raise DataError(f"{task.name} needs {paths[0]}, which does not exist")
    text = file.read_text("utf-8")
    return text.partition("-----\n")[2].strip() + "\n\n" if "-----\n" in text else text


def _records(task: Task, file: Path, wanted: Mapping[str, str]) -> Iterator[Record]:
    readers = {"jsonl": _json_lines, "csv": _csv_rows, "examples": _json_examples}
    for line, record in readers[task.format](file, task):
        for name, other in task.other_names.items():
            if name not in record and other in record:
                record[name] = record[other]
        for name, kind in wanted.items():
            if name not in record:
                raise DataError(
                    f"{file}:{line}: field {name!r} is missing; a record of {task.name} has "
                    f"{', '.join(wanted)}"
                )
            record[name] = _checked(record[name], kind, f"{file}:{line}: field {name!r}")
        options = [record[name] for name in wanted if name in tuple(_LETTERS)]
        if options and sum(bool(option.strip()) for option in options) < 2:
            raise DataError(f"{file}:{line}: fewer than two options have a text")
        yield record


def _checked(value: Any, kind: str, where: str) -> Any:
    if kind == "bool" and value in (0, 1):  # also True and False
        return bool(value)
    if kind == "letter" and isinstance(value, str) and value.strip() in tuple(_LETTERS):
        return value.strip()
    if kind == "str" and isinstance(value, str):
        return value
    expected = {"bool": "true or false", "letter": f"a letter of {_LETTERS}", "str": "a text"}
    raise DataError(f"{where} is {value!r}; {expected[kind]} is expected")


def _text(file: Path) -> str:
    try:
        data = file.read_bytes()
        if file.suffix == ".gz":
            data = gzip.decompress(data)
        return data.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def _json_lines(file: Path, task: Task) -> Iterator[tuple[int, Record]]:
    """JSON Lines, or one JSON list."""
    text = _text(file)
    items: Iterator[tuple[int, Any]]
    if text.lstrip().startswith("["):
        items = enumerate(_parsed(text, str(file)), 1)
    else:
        # Not splitlines(): it also splits at characters that JSON strings may hold unescaped.
        numbered = enumerate(text.split("\n"), 1)
        items = ((n, _parsed(text, f"{file}:{n}")) for n, text in numbered if text.strip())
    for line, item in items:
        if not isinstance(item, dict):
            raise DataError(f"{file}:{line}: a JSON object is expected, got {str(item)[:40]!r}")
        yield line, item


def _json_examples(file: Path, task: Task) -> Iterator[tuple[int, Record]]:
    content = _parsed(_text(file), str(file))
    examples = content.get("examples") if isinstance(content, dict) else None
    if not isinstance(examples, list) or not all(isinstance(item, dict) for item in examples):
        raise DataError(f'{file}: {{"examples": [{{...}}, ...]}} is expected')
    yield from enumerate(examples, 1)


def _parsed(text: str, where: str) -> Any:
    return parse_json(text, where, DataError)


def _csv_rows(file: Path, task: Task) -> Iterator[tuple[int, Record]]:
    rows = csv.reader(io.StringIO(_text(file), newline=""))
    columns = list(task.columns)
    for row in _csv(rows, file):
        if not columns:
            columns = [name.strip() for name in row]
        elif row:
            if len(row) < len(columns):
                missing = columns[len(row)]
                raise DataError(
                    f"{file}:{rows.line_num}: field {missing!r} is missing; the columns are "
                    f"{', '.join(columns)}"
                )
            yield rows.line_num, dict(zip(columns, row, strict=False))


def _csv(rows: Any, file: Path) -> Iterator[Any]:
    try:
        yield from rows
    except csv.Error as error:
        raise DataError(f"{file}:{rows.line_num} is not valid CSV: {error}") from error


def _agieval_examples(file: Path, subject: str) -> Iterator[Record]:
    """A column of AGIEval's ``few_shot_prompts.csv``: records as Python literals, every other row.

    The variant without passages uses the column of the one with passages.
    """
    column = subject.removesuffix("-without-passage")
    for row in _csv(csv.DictReader(io.StringIO(_text(file), newline="")), file):
        if not row.get("", "").startswith("sample") or not row.get(column):
            continue
        try:
            record = ast.literal_eval(row[column])
            if not isinstance(record, dict):
                raise ValueError("a mapping is expected")
        except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
            raise DataError(f"{file}: column {column} has an invalid record: {error}") from error
        if column != subject:
            record["passage"] = None
        yield record
