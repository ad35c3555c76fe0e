"""What the columns of a record mean: handlers turn records into conversations or texts.

================================== ==================================== ==========================
``--handler-name``                 columns                              samples of a record
================================== ==================================== ==========================
GeneralPretrainHandler             the ``--json-keys``                  the text
AlpacaPretrainHandler              instruction, input, output           one text by the template
StackOverflowPythonPretrainHandler title, question, answer              one text
GeneralInstructionHandler          instruction, input, output           one question and answer
AlpacaStyleInstructionHandler      the same, and system, history        one conversation
BelleMultiTurnInstructionHandler   instruction (Human:/Assistant:       one conversation
                                   turns), output
MOSSInstructionHandler             chat                                 one per turn: 1, 1-2, ...
MOSSMultiTurnHandler               chat                                 one conversation
LeetcodePythonInstructionHandler   code_with_problem, code_only,        one question and answer
                                   explanation_only
SharegptStyleInstructionHandler    conversations [from, value]          one conversation
OpenAIInstructionHandler           messages [role, content]             one conversation
================================== ==================================== ==========================

``--map-keys`` names other columns. What a record lacks is a ValueError that lists what it has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from mindspeed.data.chat_template import ChatTemplate
from mindspeed.errors import ConfigError

Conversation = list[dict[str, str]]

_BELLE_TURN = re.compile(r"(?:^|(?<=\n))[ \t]*(Human|Assistant)[ \t]*[:\uff1a]")
_BELLE_ROLES = {"Human": "user", "Assistant": "assistant"}
_MOSS_MARKS = re.compile(r"<\|(?:Human|MOSS)\|>:|<eo[hm]>")


class Fields:
    """A record seen through ``--map-keys``.

    Args:
        record: columns and values.
        keys: column of every meaning.
    """

    def __init__(self, record: Mapping[str, Any], keys: Mapping[str, str]) -> None:
        self._record = record
        self._keys = keys

    def value(self, meaning: str) -> Any:
        """The value of a column that must be there."""
        column = self._keys[meaning]
        if column not in self._record:
            has = ", ".join(map(repr, self._record)) or "nothing"
            raise ValueError(f"no column {column!r} ({meaning}); the record has {has}")
        return self._record[column]

    def text(self, meaning: str) -> str:
        """A text that must be there."""
        return _text(self.value(meaning), self._keys[meaning])

    def optional(self, meaning: str) -> str:
        """A text; empty where the column is missing or null."""
        value = self._record.get(self._keys[meaning])
        return "" if value is None else _text(value, self._keys[meaning])

    def items(self, meaning: str, required: bool = True) -> list[Any]:
        """A list."""
        value = self.value(meaning) if required else self._record.get(self._keys[meaning])
        if value is None and not required:
            return []
        if not isinstance(value, list):
            column = self._keys[meaning]
            raise ValueError(f"{column!r} is {type(value).__name__}, a list is expected")
        return value

    def tag(self, meaning: str) -> str:
        """The word that ``--map-keys`` gives for something inside a list."""
        return self._keys[meaning]


@dataclass(frozen=True)
class Handler:
    """How records of one kind are read.

    Attributes:
        keys: meaning to default column.
        conversations: samples of a record, or
        text: the one text of a record, by a template.
        prompt_type: default template.
    """

    keys: Mapping[str, str]
    conversations: Callable[[Fields], list[Conversation]] | None = None
    text: Callable[[Fields, ChatTemplate], str] | None = None
    prompt_type: str = "alpaca"

    def with_keys(self, given: Mapping[str, Any]) -> dict[str, str]:
        """The columns to read, with those of ``--map-keys``.

        Raises:
            ConfigError: a meaning this handler does not know.
        """
        flat = dict(given)
        tags = flat.pop("tags", {})
        flat |= tags if isinstance(tags, Mapping) else {"tags": tags}
        for meaning, column in flat.items():
            if meaning not in self.keys or not isinstance(column, str):
                raise ConfigError(
                    f"--map-keys {json.dumps(given)}: {meaning!r} is not one of "
                    f"{', '.join(self.keys)}, each with the name of a column"
                )
        return {**self.keys, **flat}


def find(name: str) -> Handler:
    """The handler of a name; the empty name is GeneralPretrainHandler.

    Raises:
        ConfigError: lists the names that exist.
    """
    if (name or "GeneralPretrainHandler") not in HANDLERS:
        raise ConfigError(f"--handler-name {name} is unknown; allowed are {', '.join(HANDLERS)}")
    return HANDLERS[name or "GeneralPretrainHandler"]


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{column!r} is {type(value).__name__}, a string is expected")
    return value


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _general(fields: Fields) -> list[Conversation]:
    question = fields.text("prompt") + "\n" + fields.optional("query")
    return [[_message("user", question), _message("assistant", fields.text("response"))]]


def _alpaca_style(fields: Fields) -> list[Conversation]:
    messages = []
    if system := fields.optional("system"):
        messages.append(_message("system", system))
    for turn in fields.items("history", required=False):
        if not isinstance(turn, Sequence) or len(turn) != 2:
            raise ValueError("'history' is a list of [question, answer]")
        messages.append(_message("user", _text(turn[0], "history")))
        messages.append(_message("assistant", _text(turn[1], "history")))
    query = fields.optional("query")
    question = fields.text("prompt") + ("\n" + query if query else "")
    messages.append(_message("user", question))
    return [[*messages, _message("assistant", fields.text("response"))]]


def _belle(fields: Fields) -> list[Conversation]:
    _, *parts = _BELLE_TURN.split(fields.text("prompt"))
    messages = [
        _message(_BELLE_ROLES[who], said.strip())
        for who, said in zip(parts[::2], parts[1::2], strict=True)
    ]
    if not messages:  # a single question without marks
        messages = [_message("user", fields.text("prompt").strip())]
    if messages[-1]["role"] == "assistant":
        messages.pop()
    return [[*messages, _message("assistant", fields.text("response"))]]


def _moss_turns(fields: Fields) -> list[Conversation]:
    """Question and answer of every turn."""
    chat = fields.value("chat")
    if isinstance(chat, str):
        chat = json.loads(chat)
    if not isinstance(chat, Mapping):
        raise ValueError(f"'chat' is {type(chat).__name__}, an object of turns is expected")
    turns = []
    for name, turn in chat.items():
        if turn is None:  # columnar files give every record the turns of the longest
            continue
        for who in ("Human", "MOSS"):
            if not isinstance(turn, Mapping) or who not in turn:
                raise ValueError(f"{name} of 'chat' has no {who!r}")
        said = [_MOSS_MARKS.sub("", _text(turn[who], who)).strip() for who in ("Human", "MOSS")]
        turns.append([_message("user", said[0]), _message("assistant", said[1])])
    return turns


def _moss_prefixes(fields: Fields) -> list[Conversation]:
    turns = _moss_turns(fields)
    return [list(chain(*turns[: end + 1])) for end in range(len(turns))]


def _moss_whole(fields: Fields) -> list[Conversation]:
    return [list(chain(*_moss_turns(fields)))]


def _leetcode(fields: Fields) -> list[Conversation]:
    problem = fields.text("problem").split("```", maxsplit=1)[0].strip()
    answer = fields.text("code") + "\n" + fields.text("explanation")
    return [[_message("user", problem), _message("assistant", answer)]]


def _tagged(fields: Fields) -> list[Conversation]:
    """A list of messages whose role and text stand under any names."""
    roles = {fields.tag(f"{role}_tag"): role for role in ("user", "assistant", "system")}
    roles = {"gpt": "assistant", "human": "user", "developer": "system"} | roles
    roles |= {role: role for role in ("user", "assistant", "system") if role not in roles}
    column = fields.tag("messages")
    role_tag, content_tag = fields.tag("role_tag"), fields.tag("content_tag")
    messages = []
    for number, item in enumerate(fields.items("messages"), start=1):
        if not isinstance(item, Mapping) or role_tag not in item:
            raise ValueError(f"{column!r}: message {number} has no {role_tag!r}")
        role = roles.get(item[role_tag])
        if role is None:
            raise ValueError(
                f"{column!r}: message {number} is by {item[role_tag]!r}; known are "
                f"{', '.join(roles)}"
            )
        messages.append(_message(role, _joined(item.get(content_tag), f"{column}[{number}]")))
    system = fields.optional("system")
    if system and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, _message("system", system))
    return [messages]


def _joined(content: Any, where: str) -> str:
    """Text, or the texts of a list of content parts."""
    if isinstance(content, list):
        if any(not isinstance(part, Mapping) or part.get("type") != "text" for part in content):
            raise ValueError(f"{where!r}: only parts of type text can be used")
        content = "".join(_text(part.get("text"), where) for part in content)
    return _text(content, where)


def _alpaca_text(fields: Fields, template: ChatTemplate) -> str:
    return template.render(_general(fields)[0]).text


def _stack_overflow(fields: Fields, template: ChatTemplate) -> str:
    title, question = fields.optional("title"), fields.text("question")
    head = f"{title}\n\n" if title else ""
    return f"{head}Question: {question}\nAnswer: {fields.text('answer')}"


_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
_MESSAGES = {
    "messages": "conversations",
    "system": "system",
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "system_tag": "system",
}
_OPENAI = _MESSAGES | {
    "messages": "messages",
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
}

HANDLERS: dict[str, Handler] = {
    "GeneralPretrainHandler": Handler({}),
    "AlpacaPretrainHandler": Handler(_ALPACA, text=_alpaca_text),
    "StackOverflowPythonPretrainHandler": Handler(
        {"title": "title", "question": "question", "answer": "answer"}, text=_stack_overflow
    ),
    "GeneralInstructionHandler": Handler(_ALPACA, _general),
    "AlpacaStyleInstructionHandler": Handler(
        {**_ALPACA, "system": "system", "history": "history"}, _alpaca_style
    ),
    "BelleMultiTurnInstructionHandler": Handler(
        {"prompt": "instruction", "response": "output"}, _belle
    ),
    "MOSSInstructionHandler": Handler({"chat": "chat"}, _moss_prefixes),
    "MOSSMultiTurnHandler": Handler({"chat": "chat"}, _moss_whole, prompt_type="baichuan2"),
    "LeetcodePythonInstructionHandler": Handler(
        {
            "problem": "code_with_problem",
            "code": "code_only",
            "explanation": "explanation_only",
        },
        _leetcode,
    ),
    "SharegptStyleInstructionHandler": Handler(_MESSAGES, _tagged, prompt_type="chatml"),
    "OpenAIInstructionHandler": Handler(_OPENAI, _tagged, prompt_type="chatml"),
}
