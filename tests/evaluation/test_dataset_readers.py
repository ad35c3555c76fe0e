"""Damaged or missing data is one error message, before a model is loaded."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError, DataError
from mindspeed.evaluation import dataset_readers, prepared_tasks
from mindspeed.evaluation.prompts import TaskOptions, questions
from mindspeed.evaluation.task import builtin, task
from tests.support.fabricated import WRITERS, write_csv, write_json_lines


def read(name, root, shots=None, split=""):
    item = task(name)
    return dataset_readers.read(item, root, item.shots if shots is None else shots, split)


@pytest.mark.parametrize("name", builtin())
def test_a_wrong_directory_says_which_files_are_expected(tmp_path, name):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError) as error:
        read(name, tmp_path, shots=0)
    assert f"no files of {name} found" in str(error.value)
    assert builtin()[name].files[0] in str(error.value)


def test_another_benchmarks_directory_is_a_wrong_one(tmp_path):
    WRITERS["boolq"](tmp_path)
    with pytest.raises(DataError, match="no files of agieval found"):
        read("agieval", tmp_path)


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(DataError, match="none: there is no such file or directory"):
        read("boolq", tmp_path / "none")


def test_a_file_may_be_named_itself(tmp_path):
    WRITERS["boolq"](tmp_path)
    [subject] = read("boolq", tmp_path / "dev.jsonl")
    assert len(subject.records) == 10


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("mmlu", "dev/anatomy_dev.csv"),
        ("ceval", "dev/law_dev.csv"),
        ("agieval", "few_shot_prompts"),
    ],
)
def test_missing_examples_name_their_file_and_the_remedy(tmp_path, name, missing):
    WRITERS[name](tmp_path)
    for path in [*tmp_path.glob("dev/*"), *tmp_path.glob("*prompts.csv")]:
        path.unlink()
    with pytest.raises(ConfigError) as error:
        read(name, tmp_path)
    assert missing in str(error.value) and "--num-fewshot 0" in str(error.value)
    assert read(name, tmp_path, shots=0)


def test_too_few_examples_are_counted(tmp_path):
    WRITERS["mmlu"](tmp_path)
    with pytest.raises(ConfigError, match=r"--num-fewshot 6: .*anatomy_dev.csv has 5 examples"):
        read("mmlu", tmp_path, shots=6)
    WRITERS["bbh"](tmp_path)
    with pytest.raises(ConfigError, match="navigate itself, which has 8 records"):
        read("bbh", tmp_path, shots=8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"passage": "p", "answer": true}', "dev.jsonl:1: field 'question' is missing"),
        ('{"question": "q", "passage": "p", "answer": "yes"}', "'answer' is 'yes'; true or false"),
        ('{"question": 3, "passage": "p", "answer": true}', "'question' is 3; a text"),
        ("{broken", "dev.jsonl:1 is no valid JSON"),
        ("[1, 2]", "dev.jsonl:1: a JSON object is expected"),
        ("", "has no questions"),
    ],
)
def test_a_broken_record_is_named(tmp_path, text, message):
    (tmp_path / "dev.jsonl").write_text(text)
    with pytest.raises(DataError) as error:
        read("boolq", tmp_path)
    assert message in str(error.value)


def test_the_line_of_a_broken_record_is_right_after_empty_and_odd_lines(tmp_path):
    good = '{"question": "a\u2028b", "passage": "p", "answer": true}'
    (tmp_path / "dev.jsonl").write_text(f"{good}\n\n{good}\n" + '{"question": "q"}\n', "utf-8")
    with pytest.raises(DataError, match=r"dev\.jsonl:4: field 'passage' is missing"):
        read("boolq", tmp_path)


def test_csv_rows_are_checked(tmp_path):
    write_csv(tmp_path / "test" / "anatomy_test.csv", [["q", "1", "2", "3", "4"]])
    with pytest.raises(DataError, match=r"anatomy_test\.csv:1: field 'answer' is missing"):
        read("mmlu", tmp_path, shots=0)
    write_csv(tmp_path / "test" / "anatomy_test.csv", [["q", "1", "2", "3", "4", "four"]])
    with pytest.raises(DataError, match="'answer' is 'four'; a letter of ABCDEFG"):
        read("mmlu", tmp_path, shots=0)


def test_a_question_without_choices_is_refused(tmp_path):
    """Of one option any model takes the right one: 100 %."""
    write_csv(tmp_path / "test" / "anatomy_test.csv", [["q", "only", "", "", " ", "A"]])
    with pytest.raises(DataError, match=r"anatomy_test\.csv:1: fewer than two options have a text"):
        read("mmlu", tmp_path, shots=0)
    for options in ([], ["A. only"], [""], None):
        row = {"passage": None, "question": "q", "options": options, "label": "A"}
        write_json_lines(tmp_path / "sat-en.jsonl", [row])
        subjects = read("agieval", tmp_path, shots=0)
        with pytest.raises(DataError, match="agieval/sat-en, record 1: fewer than two options"):
            questions(task("agieval"), subjects, TaskOptions())


@pytest.mark.parametrize(
    "text",
    ['{"question": "\\ud800", "passage": "p", "answer": true}', "[" * 100_000, "9" * 5000],
)
def test_json_that_cannot_be_read_is_named(tmp_path, text):
    (tmp_path / "dev.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"dev\.jsonl(:1)? "):
        read("boolq", tmp_path)


def test_an_answer_that_cannot_be_understood_names_its_record(tmp_path):
    rows = [{"question": "a", "answer": "1\n#### 1"}, {"question": "b", "answer": "two"}]
    write_json_lines(tmp_path / "test.jsonl", rows)
    with pytest.raises(DataError, match="gsm8k, record 2: the answer has no '#### number'"):
        questions(task("gsm8k"), read("gsm8k", tmp_path), TaskOptions())


def test_splits_are_checked(tmp_path):
    WRITERS["ceval"](tmp_path)
    assert [subject.name for subject in read("ceval", tmp_path, split="test")] == ["law", "logic"]
    with pytest.raises(ConfigError, match="--split dev: ceval allows val, test"):
        read("ceval", tmp_path, split="dev")
    with pytest.raises(ConfigError, match="none of boolq has splits"):
        prepared_tasks.prepare_tasks(["boolq"], ["x"], options=TaskOptions(), split="test")


def test_paths_find_their_tasks():
    def paths(names, given):
        return [str(path) for path in prepared_tasks.data_paths(names, given)]

    assert paths(["boolq"], ["data/x"]) == ["data/x"]
    assert paths(["boolq", "mmlu"], ["d/MMLU", "d/BoolQ"]) == ["d/BoolQ", "d/MMLU"]
    assert paths(["human_eval", "mmlu"], ["/HumanEval", "/x"]) == ["/HumanEval", "/x"]
    assert paths(["boolq", "mmlu"], ["mmlu=a=b", "c"]) == ["c", "a=b"]
    with pytest.raises(ConfigError, match="one path for each of boolq, mmlu is needed"):
        paths(["boolq", "mmlu"], ["d"])


def test_programs_need_consent_before_anything_is_read(tmp_path):
    with pytest.raises(ConfigError, match="--allow-code-execution"):
        prepared_tasks.prepare_tasks(
            ["human_eval"], [str(tmp_path / "none")], options=TaskOptions()
        )


class Letters:
    """A tokenizer of characters, except for some words."""

    eod = 0

    def __init__(self, *words):
        self.words = words

    def tokenize(self, text):
        ids = []
        while text:
            piece = next((w for w in self.words if text.startswith(w)), text[0])
            ids.append(hash(piece) if piece in self.words else ord(piece))
            text = text[len(piece) :]
        return ids


def test_choices_of_several_tokens_are_pointed_out(tmp_path):
    WRITERS["boolq"](tmp_path)
    planned = prepared_tasks.prepare_tasks(["boolq"], [str(tmp_path)], options=TaskOptions())
    [note] = prepared_tasks.check_choices(planned, Letters(" No"))
    assert note.startswith("boolq: ' Yes' is 4 tokens, so every choice needs its own pass")
    assert prepared_tasks.check_choices(planned, Letters(" No", " Yes")) == []


def test_choices_a_tokenizer_cannot_tell_apart_are_refused(tmp_path):
    class Unknown(Letters):
        def tokenize(self, text):
            return [3] * len(text)

    WRITERS["mmlu"](tmp_path)
    planned = prepared_tasks.prepare_tasks(["mmlu"], [str(tmp_path)], options=TaskOptions())
    with pytest.raises(ConfigError, match="the same ids for different choices"):
        prepared_tasks.check_choices(planned, Unknown())
