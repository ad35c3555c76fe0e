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
PreferenceHandler                  prompt, chosen, rejected ...         two answers to one prompt
UnpairedPreferenceHandler          prompt, completion, label            one answer, good or bad
================================== ==================================== ==========================

``--map-keys`` names other columns. A missing column is a ValueError that lists those of the record.

Those of messages and preferences also read tools: their definitions (column ``tools``, a list or
its JSON), calls of an answer (``tool_calls``, or a message of the role ``function_call``) with
their results (role ``tool``, ``observation``, ...), and reasoning (``reasoning_content``). The chat
template must render them.

Nothing is dropped in silence: :class:`~mindspeed.data.record_fields.RecordFields` knows which
columns a handler has read. Of the others those that change what an answer means (``REFUSED`` there,
in a message :data:`~mindspeed.data.messages.REFUSED_IN_MESSAGE`) make the record invalid, and the
rest is counted in ``RecordFields.remarks``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from mindspeed.data import tools
from mindspeed.data.chat_template import ChatTemplate
from mindspeed.data.messages import OPENAI, SHAREGPT, Conversation, message_of, tagged
from mindspeed.data.preferences import PAIR, UNPAIRED, Preference, pairs, unpaired
from mindspeed.data.record_fields import RecordFields, text_of, unused_columns
from mindspeed.errors import ConfigError
from mindspeed.parsing import decode_json

_BELLE_TURN = re.compile(r"(?:^|(?<=\n))[ \t]*(Human|Assistant)[ \t]*[:\uff1a]")
_BELLE_ROLES = {"Human": "user", "Assistant": "assistant"}
_GLAIVE_TURN = re.compile(r"(?:^|\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE):")
_GLAIVE_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
_GLAIVE_CALL = re.compile(r'\{\s*"name":\s*"([^"]+)"\s*(?:,\s*"arguments":\s*(.*?))?\s*\}', re.S)
_GLAIVE_FUNCTIONS = " with access to the following functions. Use them if required -"
_MOSS_MARKS = re.compile(r"<\|(?:Human|MOSS)\|>:|<eo[hm]>")


@dataclass(frozen=True)
class Handler:
    """How records of one format are read. One of the three functions is set, or none.

    Attributes:
        keys: role of a column -> its default name.
        conversations: record -> its samples.
        text: record and chat template -> one text.
        preferences: record -> its pairs or judged answers (:mod:`mindspeed.data.preferences`).
        prompt_type: default chat template.
    """

    keys: Mapping[str, str]
    conversations: Callable[[RecordFields], list[Conversation]] | None = None
    text: Callable[[RecordFields, ChatTemplate], str] | None = None
    preferences: Callable[[RecordFields], list[Preference]] | None = None
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


def _general(fields: RecordFields) -> list[Conversation]:
    question = fields.text("prompt") + "\n" + fields.optional("query")
    return [[message_of("user", question), message_of("assistant", fields.text("response"))]]


def _alpaca_style(fields: RecordFields) -> list[Conversation]:
    messages = []
    if system := fields.optional("system"):
        messages.append(message_of("system", system))
    for turn in fields.items("history", required=False):
        if not isinstance(turn, Sequence) or len(turn) != 2:
            raise ValueError("'history' is a list of [question, answer]")
        messages.append(message_of("user", text_of(turn[0], "history")))
        messages.append(message_of("assistant", text_of(turn[1], "history")))
    query = fields.optional("query")
    question = fields.text("prompt") + ("\n" + query if query else "")
    messages.append(message_of("user", question))
    return [[*messages, message_of("assistant", fields.text("response"))]]


def _belle(fields: RecordFields) -> list[Conversation]:
    before, *parts = _BELLE_TURN.split(fields.text("prompt"))
    if parts and before.strip():
        raise ValueError(f"text before the first turn is not trained: {before.strip()[:40]!r}")
    messages = [
        message_of(_BELLE_ROLES[who], said.strip())
        for who, said in zip(parts[::2], parts[1::2], strict=True)
    ]
    if not messages:  # a single question without role marks
        messages = [message_of("user", fields.text("prompt").strip())]
    if messages[-1]["role"] == "assistant" and (said := messages.pop()["content"]):
        raise ValueError(f"an answer before the column of the answer: {said[:40]!r}")
    return [[*messages, message_of("assistant", fields.text("response"))]]


def _moss_turns(fields: RecordFields) -> list[Conversation]:
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
        turns.append([message_of("user", said[0]), message_of("assistant", said[1])])
        for part in unused_columns(turn, ("Human", "MOSS")):
            text = str(turn[part]).partition("|>:")[2].strip()
            if not text.startswith("None"):  # <|Commands|>: None<eoc>
                fields.remarks[f"turns have a part {part!r} that is not used"] += 1
    return turns


def _moss_prefixes(fields: RecordFields) -> list[Conversation]:
    turns = _moss_turns(fields)
    return [list(chain(*turns[: end + 1])) for end in range(len(turns))]


def _moss_whole(fields: RecordFields) -> list[Conversation]:
    return [list(chain(*_moss_turns(fields)))]


def _leetcode(fields: RecordFields) -> list[Conversation]:
    problem = fields.text("problem").split("```", maxsplit=1)[0].strip()
    answer = fields.text("code") + "\n" + fields.text("explanation")
    return [[message_of("user", problem), message_of("assistant", answer)]]


def _ultrachat(fields: RecordFields) -> list[Conversation]:
    """Questions and answers that alternate."""
    said = fields.items("data")
    return [
        [
            message_of(("user", "assistant")[index % 2], text_of(text, f"data[{index + 1}]"))
            for index, text in enumerate(said)
        ]
    ]


def _glaive(fields: RecordFields) -> list[Conversation]:
    """Turns in one text, with calls of the functions that the system message defines."""
    system = fields.optional("system").removeprefix("SYSTEM:").strip()
    head, found, defined = system.partition(_GLAIVE_FUNCTIONS)
    fields.tools = tools.definitions(list(tools.objects(defined)))
    messages = [message_of("system", f"{head}." if found else head)] if head else []
    before, *parts = _GLAIVE_TURN.split(fields.text("chat"))
    if before.strip():
        raise ValueError(f"text before the first turn is not trained: {before.strip()[:40]!r}")
    for who, said in zip(parts[::2], parts[1::2], strict=True):
        text, where = said.replace("<|endoftext|>", "").strip(), f"chat[{len(messages) + 1}]"
        content, call, rest = text.partition("<functioncall>")
        message = message_of(_GLAIVE_ROLES[who], content.strip() if who == "ASSISTANT" else text)
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


def _alpaca_text(fields: RecordFields, template: ChatTemplate) -> str:
    return template.render(_general(fields)[0]).text


def _stack_overflow(fields: RecordFields, template: ChatTemplate) -> str:
    title, question = fields.optional("title"), fields.text("question")
    head = f"{title}\n\n" if title else ""
    return f"{head}Question: {question}\nAnswer: {fields.text('answer')}"


_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
_ASKED = ("prompt", "response")
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
    "SharegptStyleInstructionHandler": Handler(SHAREGPT, tagged, prompt_type="chatml"),
    "OpenAIInstructionHandler": Handler(OPENAI, tagged, prompt_type="chatml"),
    "PreferenceHandler": Handler(PAIR, preferences=pairs, prompt_type="chatml"),
    "UnpairedPreferenceHandler": Handler(UNPAIRED, preferences=unpaired, prompt_type="chatml"),
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
