"""Files of conversations for ``generate --messages``: their forms, and what is refused."""

from __future__ import annotations

import json

import pytest

from tests.support.lazy import Lazy, needs

needs("megatron.core")

from mindspeed.errors import DataError

main = Lazy("mindspeed.cli.main")
messages = Lazy("mindspeed.inference.conversation")

USER = {"role": "user", "content": "hello"}
CALL = {"function": {"name": "f", "arguments": '{"a": 1}'}, "id": "1"}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "2"}
CALLED = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT]


def read(folder, content, name="a.json"):
    file = folder / name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return messages.read_conversations(file)


def test_a_file_is_one_conversation_or_many(tmp_path):
    for content in ([USER], {"messages": [USER]}):
        [one] = read(tmp_path, content)
        assert one.messages == [USER] and not one.tools and not one.variables
    record = {"messages": CALLED, "tools": [{"name": "f"}], "chat_template_kwargs": {"b": True}}
    for name, content in {
        "a.json": [[USER], record],
        "a.jsonl": f"{json.dumps([USER])}\n\n{json.dumps(record)}\n",
    }.items():
        first, second = read(tmp_path, content, name)
        assert first.messages == [USER]
        assert second.variables == {"b": True}
        assert second.tools == [{"type": "function", "function": {"name": "f"}}]
        assert second.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
        assert second.messages[2] == RESULT


def test_what_is_not_used_is_counted(tmp_path):
    found = read(tmp_path, [{"messages": [USER], "id": n} for n in range(3)])
    assert messages.remarks_of(found) == ["3 records have a column 'id' that is not used"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "line 1"),
        ([], "no conversations"),
        (3, "an object with messages"),
        ([[USER], 3], "conversation 2: .*an object with messages"),
        ({"messages": []}, "the last message"),
        ([USER, {"role": "assistant", "content": "x"}], "the last message"),
        ({"prompt": "x"}, "no column 'messages'"),
        ([{"role": "wizard", "content": "x"}], "'wizard'"),
        ([USER, RESULT], "the answer before lacks"),
        ({"messages": [USER], "rejected": "x"}, "'rejected'"),
        ({"messages": [USER], "chat_template_kwargs": [1]}, "chat_template_kwargs is no object"),
    ],
)
def test_bad_conversations_name_their_place(tmp_path, content, said):
    with pytest.raises(DataError, match=rf"a\.json.*{said}"):
        read(tmp_path, content)


def test_lines_and_names_of_files(tmp_path):
    with pytest.raises(DataError, match=r"a\.jsonl, line 3 is no valid JSON"):
        read(tmp_path, f"{json.dumps([USER])}\n\n{{]\n", "a.jsonl")
    with pytest.raises(DataError, match=r"named \.json or \.jsonl"):
        read(tmp_path, [USER], "a.txt")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prompt", "x", "--messages", "a.json"], "either --messages or prompts"),
        (["--prompt", "x", "--prompt-type", "chatml"], "--prompt-type is for conversations"),
        (["--prompt", "x", "--chat-template-kwargs", '{"a": 1}'], "is for conversations"),
        (["--prompt", "x", "--tool-call-parser", "auto"], "is for conversations"),
        (["--messages", "none.json"], "there is no such file"),
    ],
)
def test_flags_that_contradict(flags, said, capsys):
    assert main.main(["generate", "--load", "hf:none", *flags]) == 1
    assert said in capsys.readouterr().err
