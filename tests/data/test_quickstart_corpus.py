"""The quickstart corpus: complete, deterministic, and evaluated on names not in fine-tuning."""

from __future__ import annotations

import builtins
import json

import pytest

from mindspeed.cli import corpus, tokenizer
from mindspeed.cli.main import main
from mindspeed.data import quickstart_corpus, templates
from mindspeed.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def topics_only(monkeypatch):
    """Without the docstrings of six hundred modules; tests/data/test_python_docs.py reads those."""
    monkeypatch.setattr("mindspeed.data.quickstart_corpus._modules", lambda stdlib: iter(()))


@pytest.fixture
def files(tmp_path):
    return quickstart_corpus.write(tmp_path / "practice")[0]


def records(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_the_evaluation_has_the_published_format_and_right_answers(files):
    questions = records(files.evaluation)
    assert len(questions) > 40
    for record in questions:
        assert set(record) == {"question", "title", "answer", "passage"}
        value = getattr(builtins, record["title"])
        is_exception = isinstance(value, type) and issubclass(value, BaseException)
        assert record["answer"] is is_exception
        assert record["title"] in record["question"]
    share = sum(record["answer"] for record in questions) / len(questions)
    assert 0.4 < share < 0.6  # a constant answer scores badly


def test_no_evaluation_question_is_in_the_instructions(files):
    asked = {record["question"] for record in records(files.evaluation)}
    taught = {record.get("input", "") for record in records(files.instructions)}
    assert not {text for text in taught if any(question in text for question in asked)}
    assert sum("Question: is" in text for text in taught) > 40


def test_explanations_are_sentences_of_the_help_texts(files):
    from pydoc_data.topics import topics

    everything = " ".join(" ".join(topics.values()).split())
    explained = [r for r in records(files.instructions) if r["instruction"].startswith("Explain")]
    assert len(explained) > 40
    for record in explained:
        assert record["output"].lstrip() in everything
        assert len(record["output"].lstrip()) <= quickstart_corpus.LONGEST_ANSWER


def test_the_template_renders_an_instruction_in_the_evaluations_format(files):
    """BoolQ's prompt: passage, question, "Answer:"; what is trained begins behind it."""
    template = templates.load(files.template)
    record = next(r for r in records(files.instructions) if r.get("input"))
    content = f"{record['instruction']}\n{record['input']}"
    messages = [{"role": "user", "content": content}]
    prompt = template.render(messages, add_generation_prompt=True).text
    assert prompt == f"{record['instruction']}\n{record['input']}\nAnswer:"
    whole = template.render([*messages, {"role": "assistant", "content": record["output"]}])
    assert whole.text == f"{prompt}{record['output']}<|endoftext|>"
    assert record["output"] in (" Yes", " No")
    ((start, end),) = whole.spans  # with the space, which is a part of the first token
    assert whole.text[start:end] == f"{record['output']}<|endoftext|>"


def test_the_same_python_gives_the_same_files(files, tmp_path, capsys):
    assert main(["corpus", "--output", str(tmp_path)]) == 0
    for name in ("corpus.jsonl", "instructions.jsonl", "boolq/dev.jsonl", "template.yaml"):
        assert (tmp_path / name).read_bytes() == (files.directory / name).read_bytes()
    assert "evaluation questions" in capsys.readouterr().out
    assert corpus.HELP


class TestTokenizerCommand:
    def run(self, *words):
        return main(["tokenizer", *map(str, words)])

    def test_it_learns_from_jsonl_and_plain_text(self, tmp_path, capsys):
        line = "The import statement finds a module. "
        (tmp_path / "a.jsonl").write_text(json.dumps({"body": line * 50}) + "\n")
        (tmp_path / "b.txt").write_text(line * 50)
        given = [tmp_path / "a.jsonl", tmp_path / "b.txt", "--json-key", "body"]
        assert self.run("--input", *given, "--vocab-size", 270, "--output", tmp_path / "tok") == 0
        assert "with 270 entries; for example: Th" in capsys.readouterr().out
        assert (tmp_path / "tok" / "tokenizer_config.json").exists()

    def test_a_small_text_gives_fewer_merges_than_requested(self, tmp_path, capsys):
        (tmp_path / "a.txt").write_text("ab ab ab")
        given = ["--input", tmp_path / "a.txt", "--vocab-size", 400, "--output", tmp_path / "tok"]
        assert self.run(*given) == 0
        assert "the text yields only" in capsys.readouterr().err

    def test_existing_files_are_not_overwritten_by_default(self, tmp_path):
        (tmp_path / "a.txt").write_text("some text " * 30)
        flags = ["--input", str(tmp_path / "a.txt"), "--vocab-size", "260", "--output"]
        assert self.run(*flags, tmp_path / "tok") == 0
        with pytest.raises(ConfigError, match="has a tokenizer: choose another directory"):
            tokenizer.run(_parsed([*flags, str(tmp_path / "tok")]))
        assert self.run(*flags, tmp_path / "tok", "--overwrite") == 0

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ('{"text": 3}', r"a\.jsonl:2: no text under 'text'; the record has 'text'"),
            ('{"te', r"a\.jsonl:2 is no valid JSON"),
            ("[1]", r"a\.jsonl:2: no text under 'text'; the record has list"),
        ],
    )
    def test_a_broken_line_is_named(self, tmp_path, line, message):
        (tmp_path / "a.jsonl").write_text(f'{{"text": "x"}}\n{line}\n')
        flags = ["--input", str(tmp_path / "a.jsonl"), "--vocab-size", "260"]
        with pytest.raises(DataError, match=message):
            tokenizer.run(_parsed([*flags, "--output", str(tmp_path / "tok")]))
        assert not (tmp_path / "tok").exists()


def _parsed(words):
    import argparse

    parser = argparse.ArgumentParser()
    tokenizer.add_arguments(parser)
    return parser.parse_args(words)
