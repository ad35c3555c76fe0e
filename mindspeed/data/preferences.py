"""Records of preferences: two answers to one prompt, or one answer that is judged.

======================================================= ==========================================
columns                                                  form
======================================================= ==========================================
``prompt``, ``chosen``, ``rejected``                     texts, or lists of messages
``chosen``, ``rejected``                                 whole conversations with equal beginnings,
                                                         or texts with ``Human:`` and ``Assistant:``
``instruction``, ``input`` or ``question`` for a prompt  texts (LLaMA-Factory, SQuAD's names)
``messages`` or ``conversations`` for a prompt           lists of messages; answers are one message
``input``, ``preferred_output``, ``non_preferred_output``  OpenAI's files of preferences
``prompt``, ``completion``, ``label``                    one answer, wanted or not (KTO)
======================================================= ==========================================

``system`` and ``tools`` belong to the prompt; ``margin`` says how much better the chosen answer is
(reward models). A text is a question or an answer of the chat template, as in conversations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed.data import tools
from mindspeed.data.messages import OPENAI, SHAREGPT, Conversation, message_of, tagged, tools_of
from mindspeed.data.record_fields import EMPTY, RecordFields, text_of

PAIR: dict[str, str] = {
    "prompt": "prompt",
    "chosen": "chosen",
    "rejected": "rejected",
    "margin": "margin",
    "system": "system",
    "tools": "tools",
    "question": "question",
    "instruction": "instruction",
    "input": "input",
    "messages": "messages",
    "conversations": "conversations",
    "preferred": "preferred_output",
    "non_preferred": "non_preferred_output",
}
UNPAIRED: dict[str, str] = PAIR | {"completion": "completion", "label": "label"}
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True)
class Preference:
    """One record.

    Attributes:
        prompt: its last message is the user's, or a tool's.
        answers: the chosen and the rejected one, or the only one.
        value: margin of a pair; of one answer 1 where it is wanted, else 0.
        tools: definitions of tools, in OpenAI's form.
    """

    prompt: Conversation
    answers: tuple[Conversation, ...]
    value: float
    tools: list[dict[str, Any]]


def pairs(fields: RecordFields) -> list[Preference]:
    """The pair of a record."""
    if fields.has("preferred"):
        (prompt, defined), names = _openai_input(fields), ("preferred", "non_preferred")
    else:
        prompt, defined, names = _prompt(fields), tools_of(fields), ("chosen", "rejected")
    chosen, rejected = (fields.value(name) for name in names)
    columns = [fields.tag(name) for name in names]
    if isinstance(chosen, str) and prompt is None:
        chosen, rejected = (
            _turns(text_of(value, column))
            for value, column in zip((chosen, rejected), columns, strict=True)
        )
    answers = [
        _answer(value, column, fields)
        for value, column in zip((chosen, rejected), columns, strict=True)
    ]
    asked = prompt or []
    if answers[0][0]["role"] != "assistant":  # whole conversations
        asked, answers = _split(answers, asked)
    margin = fields.number("margin") if fields.has("margin") else 0.0
    return [_checked(Preference(asked, tuple(answers), margin, defined), columns)]


def unpaired(fields: RecordFields) -> list[Preference]:
    """The judged answer of a record; of a pair, both."""
    if fields.has("chosen") or fields.has("preferred"):
        (pair,) = pairs(fields)
        return [
            Preference(pair.prompt, (answer,), value, pair.tools)
            for answer, value in zip(pair.answers, (1.0, 0.0), strict=True)
        ]
    column, label = fields.tag("completion"), fields.value("label")
    if label not in (True, False):  # 0 and 1 are equal to them
        raise ValueError(f"{fields.tag('label')!r} is {label!r}: true or false is expected")
    answer = _answer(fields.value("completion"), column, fields)
    prompt = _prompt(fields) or []
    if answer[: len(prompt)] == prompt:
        answer = answer[len(prompt) :]
    found = Preference(prompt, (answer,), float(label), tools_of(fields))
    return [_checked(found, [column])]


def _prompt(fields: RecordFields) -> Conversation | None:
    """What is answered; None where the answers are whole conversations."""
    system = fields.optional("system")
    names = ("prompt", "instruction", "question", "messages", "conversations")
    name = next((name for name in names if fields.has(name)), None)
    if name is None:
        return [message_of("system", system)] if system else None
    value, column = fields.value(name), fields.tag(name)
    if isinstance(value, list):
        messages = _messages(value, column, fields)
    else:
        asked = text_of(value, column)
        if name == "instruction" and (more := fields.optional("input")):
            asked += f"\n{more}"
        messages = [message_of("user", asked)]
    return [message_of("system", system), *messages] if system else messages


def _openai_input(fields: RecordFields) -> tuple[Conversation | None, list[dict[str, Any]]]:
    """Messages and tools of the column ``input``."""
    column, value = fields.tag("input"), fields.value("input")
    if not isinstance(value, Mapping) or not isinstance(value.get("messages"), list):
        raise ValueError(f"{column!r} is no object with a list of messages")
    for name in value:
        if name not in ("messages", "tools") and value[name] not in EMPTY:
            fields.remarks[f"the column {column!r} has {name!r}, which is not used"] += 1
    defined = value.get("tools")
    return _messages(value["messages"], f"{column}.messages", fields), (
        [] if defined in EMPTY else tools.definitions(tools.from_json(defined, "tools"))
    )


def _answer(value: Any, column: str, fields: RecordFields) -> Conversation:
    """An answer: a text, a message, or a list of messages."""
    if isinstance(value, str):
        return [message_of("assistant", value)]
    messages = [value] if isinstance(value, Mapping) else value
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"{column!r} is {type(value).__name__}: a text, a message or a list of messages is "
            "expected"
        )
    return _messages(messages, column, fields)


def _messages(value: list[Any], column: str, fields: RecordFields) -> Conversation:
    """Messages in OpenAI's or ShareGPT's form."""
    first = value[0] if value and isinstance(value[0], Mapping) else {}
    keys = (SHAREGPT if SHAREGPT["role_tag"] in first else OPENAI) | {"messages": column}
    own = RecordFields({column: value}, keys)
    (messages,) = tagged(own)
    fields.remarks.update(own.remarks)
    return messages


def _turns(text: str) -> Conversation:
    r"""A conversation in one text, whose turns begin with ``\n\nHuman:`` and ``\n\nAssistant:``."""
    before, *parts = _TURN.split(text)
    if before.strip() or not parts:
        raise ValueError(
            "there is no prompt: give its column, or answers that are lists of messages or texts "
            "with Human: and Assistant: before each turn"
        )
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [message_of(_ROLES[who], said.strip()) for who, said in turns]


def _split(
    answers: list[Conversation], prompt: Conversation
) -> tuple[Conversation, list[Conversation]]:
    """Prompt and answers of two conversations with equal beginnings.

    Args:
        answers: whole conversations.
        prompt: of another column, which repeats a part of them; a system message of it is added.
    """
    same = 0
    while all(len(one) > same + 1 for one in answers) and answers[0][same] == answers[1][same]:
        same += 1
    shared = answers[0][:same]
    while shared and shared[-1]["role"] == "assistant":
        shared = shared[:-1]
    head = [one for one in prompt if one["role"] == "system"]
    for message in prompt:
        if message not in shared and message not in head:
            raise ValueError(
                "the prompt is not a part of the conversations of both answers: "
                f"{str(message['content'])[:40]!r}"
            )
    begin = [] if any(one["role"] == "system" for one in shared) else head
    return [*begin, *shared], [one[len(shared) :] for one in answers]


def _checked(found: Preference, columns: list[str]) -> Preference:
    """Refuse what cannot be compared."""
    last = found.prompt[-1]["role"] if found.prompt else "nothing"
    if last not in ("user", "tool"):
        raise ValueError(f"the prompt ends with {last}: the last message is the user's or a tool's")
    for answer, column in zip(found.answers, columns, strict=True):
        roles = [message["role"] for message in answer]
        if not roles or roles[0] != "assistant" or roles[-1] != "assistant":
            raise ValueError(
                f"{column!r} has the roles {', '.join(roles) or 'of no message'}: an answer begins "
                "and ends with the assistant's"
            )
        if not any(m["content"].strip() or "tool_calls" in m for m in answer):
            raise ValueError(f"{column!r} is empty")
    if len(found.answers) == 2 and found.answers[0] == found.answers[1]:
        raise ValueError(f"{columns[1]!r} is equal to {columns[0]!r}")
    if not math.isfinite(found.value):
        raise ValueError(f"the margin is {found.value}")
    return found
