"""Handlers turn the columns of a record into conversations or texts.

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
UltraChatHandler                   data [question, answer, ...]         one conversation
GlaiveHandler                      system (functions), chat             one conversation
                                   (USER:/ASSISTANT: turns)
SharegptStyleInstructionHandler    conversations [from, value]          one conversation
OpenAIInstructionHandler           messages [role, content]             one conversation
================================== ==================================== ==========================

``--map-keys`` names other columns. A missing column is a ValueError that lists those of the record.

The last three also read tools: their definitions (column ``tools``, a list or its JSON), calls of
an answer (``tool_calls``, or a message of the role ``function_call``) with their results (role
``tool``, ``observation``, ...), and reasoning (``reasoning_content``). The chat template must
render them.

Nothing is dropped in silence: :class:`~mindspeed.data.record_fields.Fields` knows which columns a
handler has read. Of the others those that change what an answer means (``REFUSED`` there, in a
message :data:`REFUSED_IN_MESSAGE`) make the record invalid, and the rest is counted in
``Fields.remarks``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from mindspeed.data import tools
from mindspeed.data.chat_template import ChatTemplate
from mindspeed.data.record_fields import EMPTY, Fields, text_of, unused_columns
from mindspeed.errors import ConfigError
from mindspeed.parsing import decode_json

Conversation = list[dict[str, Any]]
"""Messages: role, content, weight 0 of an answer not to train, fields of tools and reasoning."""

REFUSED_IN_MESSAGE: dict[str, str] = {
    "tool_calls": "only answers call tools",
    "function_call": "write it as tool_calls",
    "refusal": "it is not rendered: write it into the content",
    "audio": "only text is supported",
}
_SWITCHES = ("loss", "train", "training", "trainable")  # other tools' ways to say weight 0
_REASONING = ("reasoning_content", "reasoning", "thinking")
_RESULT_ROLES = ("tool", "function", "observation", "ipython", "function_response")
_BELLE_TURN = re.compile(r"(?:^|(?<=\n))[ \t]*(Human|Assistant)[ \t]*[:\uff1a]")
_BELLE_ROLES = {"Human": "user", "Assistant": "assistant"}
_GLAIVE_TURN = re.compile(r"(?:^|\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE):")
_GLAIVE_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
_GLAIVE_CALL = re.compile(r'\{\s*"name":\s*"([^"]+)"\s*(?:,\s*"arguments":\s*(.*?))?\s*\}', re.S)
_GLAIVE_FUNCTIONS = " with access to the following functions. Use them if required -"
_MOSS_MARKS = re.compile(r"<\|(?:Human|MOSS)\|>:|<eo[hm]>")


@dataclass(frozen=True)
class Handler:
    """How records of one format are read. Either ``conversations`` or ``text`` is set, or neither.

    Attributes:
        keys: role of a column -> its default name.
        conversations: record -> its samples.
        text: record and chat template -> one text.
        prompt_type: default chat template.
    """

    keys: Mapping[str, str]
    conversations: Callable[[Fields], list[Conversation]] | None = None
    text: Callable[[Fields, ChatTemplate], str] | None = None
    prompt_type: str = "alpaca"

    def with_keys(self, given: Mapping[str, Any]) -> dict[str, str]:
        """The columns to read, overridden by ``--map-keys``.

        Raises:
            ConfigError: this handler has no such key.
        """
        flat = dict(given)
        tags = flat.pop("tags", {})
        flat |= tags if isinstance(tags, Mapping) else {"tags": tags}
        for key, column in flat.items():
            if key not in self.keys or not isinstance(column, str):
                raise ConfigError(
                    f"--map-keys {json.dumps(given)}: {key!r} is not one of "
                    f"{', '.join(self.keys)}, each with the name of a column"
                )
        return {**self.keys, **flat}


def find(name: str) -> Handler:
    """The handler called ``name``; empty for GeneralPretrainHandler.

    Raises:
        ConfigError: there is no such handler; the message lists all.
    """
    if (name or "GeneralPretrainHandler") not in HANDLERS:
        raise ConfigError(f"--handler-name {name} is unknown; allowed are {', '.join(HANDLERS)}")
    return HANDLERS[name or "GeneralPretrainHandler"]


def of_record(record: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Name of the handler for the columns of a record, and its ``--map-keys``.

    Raises:
        ValueError: no handler reads such columns.
    """
    for columns, name, keys in _BY_COLUMNS:
        if columns <= record.keys() and _is_of(name, record, {**HANDLERS[name].keys, **keys}):
            return name, keys
    known = dict.fromkeys(" with ".join(sorted(columns)) for columns, *_ in _BY_COLUMNS)
    has = ", ".join(map(repr, record)) or "nothing"
    raise ValueError(
        f"the first record has {has}; conversations have {', '.join(known)}: name the format with "
        "--handler-name, and its columns with --map-keys"
    )


def text_column(record: Mapping[str, Any]) -> str:
    """The column that holds the text of a document.

    Raises:
        ValueError: there is none called text, and not exactly one with a string.
    """
    texts = [name for name, value in record.items() if isinstance(value, str)]
    if "text" in texts or len(texts) == 1:
        return "text" if "text" in texts else texts[0]
    has = ", ".join(map(repr, record)) or "nothing"
    raise ValueError(f"the first record has {has}; a text is in the column 'text'")


def _is_of(name: str, record: Mapping[str, Any], keys: Mapping[str, str]) -> bool:
    """Whether the values of a record have the form that a handler reads."""
    if "messages" in keys:
        messages = record[keys["messages"]]
        first = messages[0] if isinstance(messages, list) and messages else None
        return isinstance(first, Mapping) and keys["role_tag"] in first
    if name.startswith("Glaive"):
        return bool(_GLAIVE_TURN.match(str(record[keys["chat"]])))
    if name.startswith("Belle"):
        return bool(_BELLE_TURN.search(str(record[keys["prompt"]])))
    return True


def _message(role: str, content: str) -> dict[str, Any]:
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
        messages.append(_message("user", text_of(turn[0], "history")))
        messages.append(_message("assistant", text_of(turn[1], "history")))
    query = fields.optional("query")
    question = fields.text("prompt") + ("\n" + query if query else "")
    messages.append(_message("user", question))
    return [[*messages, _message("assistant", fields.text("response"))]]


def _belle(fields: Fields) -> list[Conversation]:
    before, *parts = _BELLE_TURN.split(fields.text("prompt"))
    if parts and before.strip():
        raise ValueError(f"text before the first turn is not trained: {before.strip()[:40]!r}")
    messages = [
        _message(_BELLE_ROLES[who], said.strip())
        for who, said in zip(parts[::2], parts[1::2], strict=True)
    ]
    if not messages:  # a single question without role marks
        messages = [_message("user", fields.text("prompt").strip())]
    if messages[-1]["role"] == "assistant" and (said := messages.pop()["content"]):
        raise ValueError(f"an answer before the column of the answer: {said[:40]!r}")
    return [[*messages, _message("assistant", fields.text("response"))]]


def _moss_turns(fields: Fields) -> list[Conversation]:
    """Question and answer of every turn."""
    chat = fields.value("chat")
    if isinstance(chat, str):
        chat = decode_json(chat)
    if not isinstance(chat, Mapping):
        raise ValueError(f"'chat' is {type(chat).__name__}, an object of turns is expected")
    turns = []
    for name, turn in chat.items():
        if turn is None:  # columnar files pad every record to the longest
            continue
        for who in ("Human", "MOSS"):
            if not isinstance(turn, Mapping) or who not in turn:
                raise ValueError(f"{name} of 'chat' has no {who!r}")
        said = [_MOSS_MARKS.sub("", text_of(turn[who], who)).strip() for who in ("Human", "MOSS")]
        turns.append([_message("user", said[0]), _message("assistant", said[1])])
        for part in unused_columns(turn, ("Human", "MOSS")):
            text = str(turn[part]).partition("|>:")[2].strip()
            if not text.startswith("None"):  # <|Commands|>: None<eoc>
                fields.remarks[f"turns have a part {part!r} that is not used"] += 1
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


def _ultrachat(fields: Fields) -> list[Conversation]:
    """Questions and answers that alternate."""
    said = fields.items("data")
    return [
        [
            _message(("user", "assistant")[index % 2], text_of(text, f"data[{index + 1}]"))
            for index, text in enumerate(said)
        ]
    ]


def _glaive(fields: Fields) -> list[Conversation]:
    """Turns in one text, with calls of the functions that the system message defines."""
    system = fields.optional("system").removeprefix("SYSTEM:").strip()
    head, found, defined = system.partition(_GLAIVE_FUNCTIONS)
    fields.tools = tools.definitions(list(tools.objects(defined)))
    messages = [_message("system", f"{head}." if found else head)] if head else []
    before, *parts = _GLAIVE_TURN.split(fields.text("chat"))
    if before.strip():
        raise ValueError(f"text before the first turn is not trained: {before.strip()[:40]!r}")
    for who, said in zip(parts[::2], parts[1::2], strict=True):
        text, where = said.replace("<|endoftext|>", "").strip(), f"chat[{len(messages) + 1}]"
        content, call, rest = text.partition("<functioncall>")
        message = _message(_GLAIVE_ROLES[who], content.strip() if who == "ASSISTANT" else text)
        if call and who == "ASSISTANT":
            message |= {"tool_calls": [_glaive_call(rest.strip(), where)]}
        if who == "FUNCTION RESPONSE":
            tools.check_result(messages, message, where)
        messages.append(message)
    return [messages]


def _glaive_call(text: str, where: str) -> dict[str, Any]:
    """A call whose arguments are JSON in single quotes, or an object."""
    found = _GLAIVE_CALL.fullmatch(text)
    if found is None:
        raise ValueError(f"{where!r} is no call of a function: {text[:40]!r}")
    arguments = (found[2] or "{}").strip()
    if arguments[:1] == arguments[-1:] == "'":
        arguments = arguments[1:-1].replace("\\'", "'")
    (call,) = tools.calls_of({"name": found[1], "arguments": arguments}, where)
    return call


def _tagged(fields: Fields) -> list[Conversation]:
    """A list of messages with configurable keys for role and text."""
    roles = {fields.tag(f"{role}_tag"): role for role in ("user", "assistant", "system")}
    roles = {"gpt": "assistant", "human": "user", "developer": "system"} | roles
    roles |= {role: role for role in ("user", "assistant", "system") if role not in roles}
    roles |= dict.fromkeys(_RESULT_ROLES, "tool") | {"function_call": "assistant"}
    column = fields.tag("messages")
    role_tag, content_tag = fields.tag("role_tag"), fields.tag("content_tag")
    fields.tools = _tools_of(fields)
    messages: Conversation = []
    for number, item in enumerate(fields.items("messages"), start=1):
        if not isinstance(item, Mapping) or role_tag not in item:
            raise ValueError(f"{column!r}: message {number} has no {role_tag!r}")
        role = roles.get(item[role_tag])
        if role is None:
            raise ValueError(
                f"{column!r}: message {number} has the role {item[role_tag]!r}; allowed are "
                f"{', '.join(roles)}"
            )
        where, content = f"{column}[{number}]", item.get(content_tag)
        if item[role_tag] == "function_call":
            message = _message(role, "") | {
                "tool_calls": tools.calls_of(tools.from_json(content, where), where)
            }
        else:
            more = _message_options(item, role, (role_tag, content_tag), where, fields.remarks)
            empty = "" if content is None and "tool_calls" in more else content
            message = _message(role, _joined(empty, where)) | more
        if role == "tool":
            tools.check_result(messages, message, where)
        messages.append(message)
    system = fields.optional("system")
    if system and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, _message("system", system))
    elif system and messages[0]["content"] != system:
        raise ValueError(f"two system messages: a column and the first message of {column!r}")
    return [messages]


def _message_options(
    item: Mapping[str, Any],
    role: str,
    used: Collection[str],
    where: str,
    remarks: Counter[str],
) -> dict[str, Any]:
    """Reasoning, calls and ``weight`` 0 of an answer, name and call of a tool's result.

    Other keys are refused or counted.
    """
    found: dict[str, Any] = {}
    for name in unused_columns(item, used):
        value = item[name]
        if role == "assistant" and name in _REASONING and "reasoning_content" not in found:
            found["reasoning_content"] = text_of(value, f"{where}.{name}")
        elif role == "assistant" and name == "tool_calls":
            found[name] = tools.calls_of(value, where)
        elif role == "tool" and name in ("name", "tool_call_id"):
            found[name] = text_of(value, f"{where}.{name}")
        elif name in (*REFUSED_IN_MESSAGE, *_REASONING, "tool_call_id"):
            why = REFUSED_IN_MESSAGE.get(name, f"a message of the {role} has none")
            raise ValueError(f"{where!r} has {name!r}: {why}")
        elif name in _SWITCHES and not value:
            raise ValueError(f"{where!r} has {name!r}: mark an answer not to train with weight 0")
        elif name != "weight" or role != "assistant":
            remarks[f"messages have a key {name!r} that is not used"] += 1
    weight = item.get("weight")
    if role != "assistant" or weight is None or weight == 1:
        return found
    if weight != 0:
        raise ValueError(f"{where!r} has weight {weight!r}: allowed are 0 and 1")
    remarks["answers have weight 0 and are not trained"] += 1
    return {**found, "weight": 0}


def _tools_of(fields: Fields) -> list[dict[str, Any]]:
    """Definitions in a column."""
    value = fields.either("tools", "functions")
    if value in EMPTY:
        return []
    return tools.definitions(tools.from_json(value, "tools"))


def _joined(content: Any, where: str) -> str:
    """A text, or the joined texts of a list of content parts."""
    if isinstance(content, list):
        if any(not isinstance(part, Mapping) or part.get("type") != "text" for part in content):
            raise ValueError(f"{where!r}: only parts of type text are supported")
        content = "".join(text_of(part.get("text"), where) for part in content)
    if content is None:
        raise ValueError(f"{where!r} has no content (null); an empty text is ''")
    return text_of(content, where)


def _alpaca_text(fields: Fields, template: ChatTemplate) -> str:
    return template.render(_general(fields)[0]).text


def _stack_overflow(fields: Fields, template: ChatTemplate) -> str:
    title, question = fields.optional("title"), fields.text("question")
    head = f"{title}\n\n" if title else ""
    return f"{head}Question: {question}\nAnswer: {fields.text('answer')}"


_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
_ASKED = ("prompt", "response")
_MESSAGES = {
    "messages": "conversations",
    "system": "system",
    "tools": "tools",
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
    "UltraChatHandler": Handler({"data": "data"}, _ultrachat, prompt_type="chatml"),
    "GlaiveHandler": Handler({"system": "system", "chat": "chat"}, _glaive, prompt_type="chatml"),
    "SharegptStyleInstructionHandler": Handler(_MESSAGES, _tagged, prompt_type="chatml"),
    "OpenAIInstructionHandler": Handler(_OPENAI, _tagged, prompt_type="chatml"),
}

_BY_COLUMNS: tuple[tuple[frozenset[str], str, dict[str, str]], ...] = (
    (frozenset({"messages"}), "OpenAIInstructionHandler", {}),
    (frozenset({"conversations"}), "SharegptStyleInstructionHandler", {}),
    (frozenset({"conversations"}), "OpenAIInstructionHandler", {"messages": "conversations"}),
    (frozenset({"chat", "system"}), "GlaiveHandler", {}),
    (frozenset({"chat"}), "MOSSMultiTurnHandler", {}),
    (frozenset({"data"}), "UltraChatHandler", {}),
    (frozenset({"instruction", "output"}), "BelleMultiTurnInstructionHandler", {}),
    (frozenset({"instruction", "output"}), "AlpacaStyleInstructionHandler", {}),
    *(
        (frozenset(pair), "AlpacaStyleInstructionHandler", dict(zip(_ASKED, pair, strict=True)))
        for pair in (("prompt", "completion"), ("prompt", "response"), ("question", "answer"))
    ),
)
"""Columns of a record, the handler that reads them, and its ``--map-keys``."""
