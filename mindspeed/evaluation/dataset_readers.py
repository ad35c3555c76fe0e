"""The files of a benchmark -> records, checked field by field.

Everything that can be wrong with the data is said here, with file and line, before a model is
loaded: a wrong directory (with the layout that was expected), a missing file of examples, a record
without a field, a value of the wrong kind.
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
    """One file of questions.

    Attributes:
        name: Empty for a benchmark that is one file.
        records: What is asked.
        shots: What the examples in the prompt are made of.
        intro: Text of the task's ``intro_files``; empty without.
    """

    name: str
    records: tuple[Record, ...]
    shots: tuple[Record, ...]
    intro: str


def read(task: Task, path: Path, shots: int, split: str = "") -> list[Subject]:
    """All subjects of a benchmark.

    Args:
        task: Which.
        path: Its directory; one of its files where the task is one file.
        shots: Examples per prompt.
        split: One of ``task.splits``; empty for the first.

    Raises:
        ConfigError: There is no such split, or there are fewer examples than ``shots``.
        DataError: The directory has another layout, or a record is not as it should be.
    """
    split = _split(task, split)
    root, found = _question_files(task, path, split)
    subjects = []
    for name, files in found.items():
        wanted = task.required_fields(split)
        records = [record for file in files for record in _records(task, file, wanted)]
        if not records:
            raise DataError(f"{files[0]}: there are no questions")
        examples = _shots(task, root, name, records, shots)
        if task.shot_files == SAME_FILE:
            records = records[shots:]
        subjects.append(Subject(name, tuple(records), tuple(examples), _intro(task, root, name)))
    return subjects


def layout(task: Task) -> str:
    """The files a task reads, for people."""
    text = " or ".join(task.files)
    if task.shot_files and task.shot_files != SAME_FILE:
        text += f"; for examples {' or '.join(task.shot_files)}"
    return text


def _split(task: Task, split: str) -> str:
    if not split:
        return task.splits[0] if task.splits else ""
    if split not in task.splits:
        allowed = ", ".join(task.splits) or "none, it has one part only"
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
        f"--task-data-path {path}: nothing of {task.name} is here; expected are files "
        f"{layout(task)}"
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
                f"which has {len(records)} records; ask for fewer"
            )
        return records[:number]
    wanted = task.required_fields(task.splits[0] if task.splits else "")
    paths = [root / pattern.replace("{subject}", subject) for pattern in task.shot_files]
    file = next((path for path in paths if path.is_file()), None)
    if file is not None and file.name.endswith("_prompts.csv"):
        examples: Sequence[Record] = list(_table_of_examples(file, subject))
    elif file is not None:
        examples = list(_records(task, file, wanted))
    elif task.own_shots:
        examples = [dict(record) for record in task.own_shots]
    else:
        expected = " or ".join(map(str, paths[:1])) if paths else "no file: it has no examples"
        raise ConfigError(
            f"{task.name} puts {number} examples before a question and takes them from {expected}"
            f"{', which is not there' if paths else ''}; give --num-fewshot 0 to ask without"
        )
    if len(examples) < number:
        source = file or "the built-in examples"
        raise ConfigError(
            f"--num-fewshot {number}: {source} has {len(examples)} examples"
            + (f" for {subject}" if subject else "")
        )
    return examples[:number]


def _intro(task: Task, root: Path, subject: str) -> str:
    """What follows the line of dashes in a file of published prompts; such files begin with a
    notice for those who collect training data."""
    if not task.intro_files:
        return ""
    paths = [root / pattern.replace("{subject}", subject) for pattern in task.intro_files]
    file = next((path for path in paths if path.is_file()), None)
    if file is None:
        raise DataError(f"{task.name} needs {paths[0]}, which is not there")
    text = file.read_text("utf-8")
    return text.partition("-----\n")[2].strip() + "\n\n" if "-----\n" in text else text


def _records(task: Task, file: Path, wanted: Mapping[str, str]) -> Iterator[Record]:
    readers = {"jsonl": _json_lines, "csv": _csv_rows, "examples": _json_examples}
    for place, record in readers[task.format](file, task):
        for name, other in task.other_names.items():
            if name not in record and other in record:
                record[name] = record[other]
        for name, kind in wanted.items():
            if name not in record:
                raise DataError(
                    f"{file}:{place}: field {name!r} is missing; a record of {task.name} has "
                    f"{', '.join(wanted)}"
                )
            record[name] = _checked(record[name], kind, f"{file}:{place}: field {name!r}")
        options = [record[name] for name in wanted if name in tuple(_LETTERS)]
        if options and sum(bool(option.strip()) for option in options) < 2:
            raise DataError(f"{file}:{place}: fewer than two options have a text")
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
    """JSON lines, or one JSON list."""
    text = _text(file)
    items: Iterator[tuple[int, Any]]
    if text.lstrip().startswith("["):
        items = enumerate(_parsed(text, str(file)), 1)
    else:
        # Not splitlines(): it also cuts at characters that JSON texts may hold unescaped.
        lines = enumerate(text.split("\n"), 1)
        items = ((n, _parsed(line, f"{file}:{n}")) for n, line in lines if line.strip())
    for place, item in items:
        if not isinstance(item, dict):
            raise DataError(f"{file}:{place}: a JSON object is expected, got {str(item)[:40]!r}")
        yield place, item


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
        raise DataError(f"{file}:{rows.line_num} is no valid CSV: {error}") from error


def _table_of_examples(file: Path, subject: str) -> Iterator[Record]:
    """A column of AGIEval's ``few_shot_prompts.csv``: records as Python literals, every other row.

    The set without passages has no column of its own.
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
            raise DataError(f"{file}: column {column} has no record: {error}") from error
        if column != subject:
            record["passage"] = None
        yield record
