"""Tasks of lm-evaluation-harness on local files, without network.

A task of lm-evaluation-harness names a data set on the Hugging Face Hub. Its splits are searched
below ``--data-dir``; the first match counts:

* the published files that :mod:`.dataset_readers` reads as well: ``boolq/dev.jsonl``,
  ``mmlu/test/*_test.csv``, ``gsm8k/test.jsonl``, ``ceval/val/*_val.csv``, ``bbh/*.json``,
  ``human_eval/HumanEval.jsonl``;
* files of the Hub's layout, named after the split (``test.jsonl``, ``test-00000-of-00001.parquet``,
  also ``.json``, ``.csv``), in ``TASK/``, ``DATASET/CONFIGURATION/`` or ``DATASET/``, where
  ``DATASET`` is the last part of the data set's name.

Everything else of the task (prompts, examples, filters, metrics, groups) stays the harness' own.
Programs that a model writes run in our sandbox.

The harness has no public way to replace a task's data, so two of its private methods are
overridden; tests fail if they change.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed.errors import ConfigError, DataError
from mindspeed.evaluation import code_execution
from mindspeed.parsing import decode_json, read_json

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


Record = dict[str, Any]
Splits = dict[str, list[Record]]

OPTIONAL_SPLITS = ("training_split", "validation_split", "fewshot_split")
_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


def read_splits(config: Mapping[str, Any], directory: Path) -> Splits:
    """The records of every split that a task uses.

    Args:
        config: The harness' configuration of the task.
        directory: ``--data-dir``.

    Raises:
        DataError: There are no files for the task, or a record is invalid.
    """
    published = _PUBLISHED.get(str(config.get("dataset_path")))
    found: Splits = {}
    if config.get("dataset_path") == "aps/super_glue" and config.get("dataset_name") != "boolq":
        published = None
    if published is not None:
        found = published(directory, str(config.get("dataset_name")))
    folders = _folders(config, directory)
    for split in _splits(config):
        if split not in found:
            records = next(
                (some for folder in folders if (some := _hub_split(folder, split))), None
            )
            if records is not None:
                found[split] = records
    scored = config.get("test_split") or config.get("validation_split")
    if scored not in found:
        raise DataError(
            f"--data-dir {directory}: no data for {config['task']}; expected is "
            f"{folders[0] / str(scored)}{{{','.join(_SUFFIXES)}}} or the same in "
            f"{' or '.join(map(str, folders[1:]))}"
        )
    compared = config.get("output_type", "multiple_choice") == "multiple_choice"
    for split, records in found.items() if compared else ():
        for number, record in enumerate(records, start=1):
            if problem := _too_few_options(record):
                raise DataError(f"{config['task']}, {split}, record {number}: {problem}")
    return found


def _too_few_options(record: Any) -> str | None:
    """A message if there are fewer than two options: any model would choose the right one."""
    if not isinstance(record, Mapping):
        return "an object with fields is expected"
    for name in ("choices", "endings", "options"):
        options = record.get(name)
        if isinstance(options, Mapping):  # of ARC: {"text": [...], "label": [...]}
            options = options.get("text")
        if isinstance(options, list) and sum(bool(str(one).strip()) for one in options) < 2:
            return f"fewer than two {name}: any answer would be right"
    return None


def _splits(config: Mapping[str, Any]) -> list[str]:
    return sorted({config[name] for name in (*OPTIONAL_SPLITS, "test_split") if config.get(name)})


def _folders(config: Mapping[str, Any], directory: Path) -> list[Path]:
    data_set = str(config.get("dataset_path") or config["task"]).rpartition("/")[2]
    folders = [directory / config["task"], directory / data_set]
    if config.get("dataset_name"):
        folders.insert(1, directory / data_set / str(config["dataset_name"]))
    return list(dict.fromkeys(folders))


def _hub_split(folder: Path, split: str) -> list[Record]:
    files = [
        path
        for path in sorted([*folder.glob(f"{split}*"), *folder.glob(f"data/{split}*")])
        if path.suffix in _SUFFIXES and path.name[len(split)] in ".-"
    ]
    return [record for path in files for record in _records(path)]


def _records(path: Path) -> Iterator[Record]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        yield from pyarrow.parquet.read_table(path).to_pylist()
        return
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
        if path.suffix == ".csv":
            yield from csv.DictReader(io.StringIO(text, newline=""))
        elif text.lstrip().startswith("["):
            yield from decode_json(text)
        else:
            yield from (decode_json(line) for line in text.split("\n") if line.strip())
    except (ValueError, EOFError, csv.Error, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}") from error


def _boolq(directory: Path, name: str) -> Splits:
    folder = directory / "boolq"
    sources = {"train": ("train",), "validation": ("dev", "val", "validation")}
    found: Splits = {}
    for split, names in sources.items():
        files = [path for part in names if (path := folder / f"{part}.jsonl").is_file()]
        if files:
            found[split] = [_with_label(record) for record in _records(files[0])]
    return found


def _with_label(record: Record) -> Record:
    answer = record["label"] if "label" in record else record["answer"]
    return {**record, "label": int(answer)}


def _mmlu(directory: Path, name: str) -> Splits:
    found: Splits = {}
    for split in ("test", "dev"):
        path = directory / "mmlu" / split / f"{name}_{split}.csv"
        if path.is_file():
            rows = csv.reader(io.StringIO(path.read_text("utf-8-sig"), newline=""))
            try:
                found[split] = [
                    {"question": r[0], "choices": r[1:5], "answer": "ABCD".index(r[5])}
                    for r in rows
                ]
            except (IndexError, ValueError) as error:
                raise DataError(
                    f"{path}:{rows.line_num}: a question, four options and a letter are expected"
                ) from error
    return found


def _human_eval(directory: Path, name: str) -> Splits:
    files = [directory / "human_eval" / name for name in ("HumanEval.jsonl", "HumanEval.jsonl.gz")]
    return next(({"test": list(_records(path))} for path in files if path.is_file()), {})


def _gsm8k(directory: Path, name: str) -> Splits:
    files = {split: directory / "gsm8k" / f"{split}.jsonl" for split in ("train", "test")}
    return {split: list(_records(path)) for split, path in files.items() if path.is_file()}


def _ceval(directory: Path, name: str) -> Splits:
    files = {s: directory / "ceval" / s / f"{name}_{s}.csv" for s in ("dev", "val", "test")}
    return {split: list(_records(path)) for split, path in files.items() if path.is_file()}


def _bbh(directory: Path, name: str) -> Splits:
    path = directory / "bbh" / f"{name}.json"
    if not path.is_file():
        return {}
    content = read_json(path, str(path), DataError)
    examples = content.get("examples") if isinstance(content, dict) else None
    if not isinstance(examples, list):
        raise DataError(f'{path}: {{"examples": [...]}} is expected')
    return {"test": examples}


_PUBLISHED: dict[str, Callable[[Path, str], Splits]] = {
    "aps/super_glue": _boolq,
    "super_glue": _boolq,
    "cais/mmlu": _mmlu,
    "openai/openai_humaneval": _human_eval,
    "openai/gsm8k": _gsm8k,
    "gsm8k": _gsm8k,
    "ceval/ceval-exam": _ceval,
    "SaylorTwift/bbh": _bbh,
}
