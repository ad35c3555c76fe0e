"""The harness' tasks find their data below one directory, and say what is missing."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from tests.support.lazy import Lazy, needs

needs("lm_eval")


from mindspeed.errors import ConfigError, DataError
from tests.support.fabricated import WRITERS, write_json_lines

LocalTasks = Lazy("mindspeed.evaluation.lm_eval_tasks", "LocalTasks")
read_splits = Lazy("mindspeed.evaluation.lm_eval_tasks", "read_splits")

PUBLISHED = {  # what a task of the harness says, and how many rows each split has
    "boolq": ("aps/super_glue", "boolq", {"validation": 10, "train": 10}),
    "mmlu": ("cais/mmlu", "anatomy", {"test": 5, "dev": 5}),
    "gsm8k": ("openai/gsm8k", "main", {"test": 10}),
    "ceval": ("ceval/ceval-exam", "law", {"val": 5, "dev": 5, "test": 5}),
    "bbh": ("SaylorTwift/bbh", "snarks", {"test": 8}),
    "human_eval": ("openai/openai_humaneval", None, {"test": 10}),
}


def config(path, name=None, **splits):
    return {"task": "some_task", "dataset_path": path, "dataset_name": name, **splits}


@pytest.mark.parametrize("benchmark", PUBLISHED)
def test_published_files_are_read(tmp_path, benchmark):
    WRITERS[benchmark](tmp_path / benchmark)
    path, name, rows = PUBLISHED[benchmark]
    asked = next(iter(rows))
    found = read_splits(config(path, name, test_split=asked), tmp_path)
    assert {split: len(part) for split, part in found.items()} == rows


def test_labels_take_the_form_of_the_hub(tmp_path):
    WRITERS["boolq"](tmp_path / "boolq")
    WRITERS["mmlu"](tmp_path / "mmlu")
    boolq = read_splits(config("aps/super_glue", "boolq", test_split="validation"), tmp_path)
    assert [row["label"] for row in boolq["validation"][:3]] == [1, 0, 1]
    mmlu = read_splits(config("cais/mmlu", "anatomy", test_split="test"), tmp_path)
    assert mmlu["test"][2] == {
        "question": "Which, [anatomy-2]?",
        "choices": ["one, or", "two", "three", "four"],
        "answer": 2,
    }


@pytest.mark.parametrize(
    "file",
    [
        "some_task/test.jsonl",
        "data_set/test.json",
        "data_set/en/test.csv",
        "data_set/en/test-00000-of-00001.parquet",
        "data_set/data/test-00000-of-00001.parquet",
    ],
)
def test_files_of_the_hubs_layout_are_read(tmp_path, file):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / file
    path.parent.mkdir(parents=True)
    rows = [{"text": "a, b"}, {"text": "c"}]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        path.write_text('text\n"a, b"\nc\n')
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        write_json_lines(path, rows)
    assert read_splits(config("me/data_set", "en", test_split="test"), tmp_path) == {"test": rows}


def test_missing_data_says_where_it_is_expected(tmp_path):
    wanted = config("me/data_set", "en", test_split="test")
    with pytest.raises(DataError) as error:
        read_splits(wanted, tmp_path)
    message = str(error.value)
    assert "no data for some_task" in message
    assert str(tmp_path / "some_task" / "test") in message
    assert str(tmp_path / "data_set" / "en") in message


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "some_task").mkdir()
    (tmp_path / "some_task" / "test.jsonl").write_text("{broken")
    with pytest.raises(DataError, match=r"test\.jsonl is damaged"):
        read_splits(config("me/data_set", test_split="test"), tmp_path)


@pytest.fixture
def tasks(tmp_path):
    """Four tasks of our own in the harness' form."""
    own = tmp_path / "yaml"
    own.mkdir()
    common = {
        "dataset_path": "me/data_set",
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": 0,
        "doc_to_choice": ["a", "b"],
        "metric_list": [{"metric": "acc"}],
    }
    more = {
        "plain": {},
        "shots": {"num_fewshot": 2, "fewshot_split": "train"},
        "unsafe": {"unsafe_code": True},
        "absent": {"dataset_path": "me/other"},
    }
    for name, changes in more.items():
        (own / f"{name}.yaml").write_text(json.dumps({**common, "task": name, **changes}))
    group = {"group": "both", "task": ["plain", "shots"]}
    (own / "both.yaml").write_text(json.dumps(group))
    write_json_lines(tmp_path / "data_set" / "test.jsonl", [{"text": f"t{i}"} for i in range(3)])
    return lambda: LocalTasks(tmp_path, [own], defaults=False)


def test_tasks_and_groups_get_their_documents(tasks, tmp_path):
    write_json_lines(tmp_path / "data_set" / "train.jsonl", [{"text": "x"}, {"text": "y"}])
    loaded = tasks().load(["both"])
    assert set(loaded["tasks"]) == {"plain", "shots"}
    documents = list(loaded["tasks"]["plain"].test_docs())
    assert [document["text"] for document in documents] == ["t0", "t1", "t2"]
    tasks().check(["both"])


def test_missing_inputs_are_reported_before_a_model_is_loaded(tasks, tmp_path):
    tasks().check(["plain"])
    with pytest.raises(ConfigError, match="--tasks plan: lm-evaluation-harness has no such task"):
        tasks().check(["plan"])
    with pytest.raises(DataError, match="no data for absent"):
        tasks().check(["absent"])
    with pytest.raises(DataError, match="shots needs 2 few-shot examples per prompt"):
        tasks().check(["shots"])
    tasks().check(["shots"], shots=0)
    with pytest.raises(ConfigError, match="unsafe runs programs that the model writes"):
        tasks().check(["unsafe"])
    tasks().check(["unsafe"], allow_code=True)
    with pytest.raises(DataError, match=r"--data-dir .*none: there is no such directory"):
        LocalTasks(tmp_path / "none")


def test_the_private_methods_that_are_overridden_are_still_there():
    """A new version of the harness that moves them fails here first."""
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._factory import TaskFactory

    build = inspect.signature(TaskFactory._build_task)
    assert list(build.parameters) == ["self", "entry", "overrides"]
    full = inspect.signature(TaskFactory._load_full_config)
    assert list(full.parameters) == ["self", "entry", "overrides"]
    assert "self._factory" in inspect.getsource(TaskManager.__init__)
    assert "self._factory.build" in inspect.getsource(TaskManager._load_spec)


def test_human_eval_runs_in_our_limited_children(tmp_path):
    import lm_eval.tasks

    WRITERS["human_eval"](tmp_path / "human_eval")
    folder = Path(lm_eval.tasks.__file__).parent / "humaneval"
    manager = LocalTasks(tmp_path, [folder], defaults=False)
    manager.check(["humaneval"], allow_code=True)
    task = manager.load(["humaneval"])["tasks"]["humaneval"]
    document = list(task.test_docs())[3]
    right, wrong = document["prompt"] + "    return x + 3\n", document["prompt"] + "    return x\n"
    results = [task.process_results(document, [[program]]) for program in (right, wrong)]
    assert [next(iter(result.values())) for result in results] == [1.0, 0.0]


@pytest.mark.parametrize(
    "row", [{"choices": ["only"]}, {"endings": []}, {"choices": {"text": ["a", " "]}}, [1]]
)
def test_a_question_without_choices_is_refused(row, tmp_path):
    from mindspeed.evaluation.lm_eval_tasks import read_splits

    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "test.jsonl").write_text(json.dumps({"choices": ["a", "b"]}) + "\n")
    config = {"task": "own", "dataset_path": "own", "test_split": "test"}
    assert len(read_splits(config, tmp_path)["test"]) == 1
    with (tmp_path / "own" / "test.jsonl").open("a") as file:
        file.write(json.dumps(row))
    with pytest.raises(DataError, match="own, test, record 2: "):
        read_splits(config, tmp_path)
