"""The chat: history, commands, scripted input, several ranks."""

from __future__ import annotations

import json

import pytest

from tests.support.lazy import needs

needs("megatron.core", "transformers")

from tests.inference import chat_ranks, tiny_chat
from tests.support import commands_job

SETUP = "tests.support.warm"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_chat.write(folder)
    return folder


def test_history_grows_is_cleared_and_is_saved(ranks, folder, tmp_path):
    file = tmp_path / "talk.json"
    lines = ["hello", "", "birds?", f"/save {file}", "clear", "the cat", "q", "never read"]
    out, messages, prompts = ranks(
        1, chat_ranks.talk, str(folder), (1, 1), lines, None, 6, setup=SETUP
    )[0]
    first, second = (m["content"] for m in json.loads(file.read_text())["messages"][2::2])
    assert prompts[0] == "system: be brief\nuser: hello\nassistant: "
    assert prompts[1] == (
        f"system: be brief\nuser: hello\nassistant: {first}user: birds?\nassistant: "
    )
    assert prompts[2] == "system: be brief\nuser: the cat\nassistant: "
    assert [m["role"] for m in messages] == ["system", "user", "assistant"]
    assert out.splitlines()[-1].strip() == messages[-1]["content"]
    assert f"saved {file}" in out and second in out


@pytest.mark.slow
def test_all_ranks_follow_the_same_conversation(ranks, folder):
    lines = ["hello", "/params top_p=0.5 greedy=false", "birds?", "new", "again"]
    alone = ranks(1, chat_ranks.talk, str(folder), (1, 1), lines, setup=SETUP)[0]
    together = ranks(4, chat_ranks.talk, str(folder), (2, 2), lines, setup=SETUP, timeout=120)
    assert together[0] == alone
    assert all(result == ("", *alone[1:]) for result in together[1:])


def test_old_turns_are_dropped_as_a_whole(ranks, folder):
    lines = ["one", "two", "three"]
    *_, prompts = ranks(1, chat_ranks.talk, str(folder), (1, 1), lines, 1, setup=SETUP)[0]
    assert "user: one" in prompts[1]
    assert "user: one" not in prompts[2] and "user: two" in prompts[2]
    long = ["the cat sat on the mat " * 3] * 4  # four of them do not fit into the context
    *_, prompts = ranks(1, chat_ranks.talk, str(folder), (1, 1), long, None, 40, setup=SETUP)[0]
    assert prompts[-1].count("user:") < 4
    assert all(prompt.startswith("system: be brief\nuser:") for prompt in prompts)


def test_mistakes_are_answered_and_the_chat_goes_on(ranks, folder, tmp_path):
    lines = [
        "/nonsense",
        "/params heat=3",
        "/params top_p=warm",
        "/params temperature=0 greedy=false",
        "/save",
        f"/save {tmp_path}/no/such/directory/x",
        "hello " * 200,
        "/params",
        "/help",
        "hello",
    ]
    out, messages, _ = ranks(1, chat_ranks.talk, str(folder), (1, 1), lines, setup=SETUP)[0]
    for message in (
        "/nonsense is unknown; /help lists the commands",
        "heat is unknown; there are greedy",
        "top_p=warm is invalid; an example is 1.0",
        "--temperature 0.0",
        "/save needs a file name",
        "no/such/directory",
        "the message is",
        "max_new_tokens=12",
        "start a new conversation",
    ):
        assert message in out
    assert len(messages) == 3 and messages[1]["content"] == "hello"


@pytest.mark.slow
def test_the_command_reads_a_pipe(ranks, folder):
    words = ["chat", f"--load=hf:{folder}", "--greedy", "--max-new-tokens=6"]
    call = chat_ranks.piped, words, "hello\n/params\n"
    ((status, text, errors),) = ranks(1, *call, setup=SETUP, backend=None)
    assert status == 0, errors
    assert "max_new_tokens=6" in text
    assert ">>" not in text  # prompts are for people


@pytest.mark.slow
def test_an_answer_takes_half_of_a_short_context(ranks, folder):
    words = ["chat", f"--load=hf:{folder}", "--greedy"]
    call = chat_ranks.piped, words, "hello\n/params\n"
    ((status, text, errors),) = ranks(1, *call, setup=SETUP, backend=None)
    assert status == 0, errors
    assert f"max_new_tokens={tiny_chat.CONTEXT // 2}" in text


@pytest.mark.slow
def test_the_command_answers_conversations(ranks, folder, tmp_path):
    file = tmp_path / "chats.jsonl"
    talk = [{"role": "user", "content": "hello"}]
    file.write_text(f"{json.dumps(talk)}\n{json.dumps({'messages': talk, 'id': 1})}\n")
    words = ["generate", f"--load=hf:{folder}", f"--messages={file}", "--json", "--tp=2"]
    words += ["--greedy", "--max-new-tokens=6"]
    (status, text, errors), (other, *_) = ranks(
        2, commands_job.run, words, setup=SETUP, backend=None, timeout=200
    )
    assert (status, other) == (0, 0), errors[-3000:]
    first, second = map(json.loads, text.splitlines())
    assert first == second and first["role"] == "assistant" and first["finish_reason"] == "length"
    assert "1 records have a column 'id' that is not used" in errors
