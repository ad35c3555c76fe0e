"""Lists of messages with roles, in OpenAI's and ShareGPT's form.

Tools: their definitions (column ``tools``, a list or its JSON), calls of an answer (``tool_calls``,
or a message of the role ``function_call``) with their results (role ``tool``, ``observation``,
...); reasoning of an answer (``reasoning_content``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from typing import Any

from mindspeed.data import tools
from mindspeed.data.record_fields import EMPTY, RecordFields, text_of, unused_columns

Conversation = list[dict[str, Any]]
"""Messages: role, content, weight 0 of an answer not to train, fields of tools and reasoning."""

REFUSED_IN_MESSAGE: dict[str, str] = {
    "tool_calls": "only answers call tools",
    "function_call": "write it as tool_calls",
    "refusal": "it is not rendered: write it into the content",
    "audio": "only text is supported",
}
SHAREGPT: dict[str, str] = {
    "messages": "conversations",
    "system": "system",
    "tools": "tools",
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "system_tag": "system",
}
OPENAI: dict[str, str] = SHAREGPT | {
    "messages": "messages",
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
}
"""Keys of the two forms: role of a column or tag -> its default name."""
_SWITCHES = ("loss", "train", "training", "trainable")  # other tools' ways to say weight 0
_REASONING = ("reasoning_content", "reasoning", "thinking")
_RESULT_ROLES = ("tool", "function", "observation", "ipython", "function_response")


def message_of(role: str, content: str) -> dict[str, Any]:
    """A message of a conversation."""
    return {"role": role, "content": content}


def tagged(fields: RecordFields) -> list[Conversation]:
    """A list of messages with configurable keys for role and text."""
    roles = {fields.tag(f"{role}_tag"): role for role in ("user", "assistant", "system")}
    roles = {"gpt": "assistant", "human": "user", "developer": "system"} | roles
    roles |= {role: role for role in ("user", "assistant", "system") if role not in roles}
    roles |= dict.fromkeys(_RESULT_ROLES, "tool") | {"function_call": "assistant"}
    column = fields.tag("messages")
    role_tag, content_tag = fields.tag("role_tag"), fields.tag("content_tag")
    fields.tools = tools_of(fields)
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
            message = message_of(role, "") | {
                "tool_calls": tools.calls_of(tools.from_json(content, where), where)
            }
        else:
            more = _message_options(item, role, (role_tag, content_tag), where, fields.remarks)
            empty = "" if content is None and "tool_calls" in more else content
            message = message_of(role, _joined(empty, where)) | more
        if role == "tool":
            tools.check_result(messages, message, where)
        messages.append(message)
    system = fields.optional("system")
    if system and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, message_of("system", system))
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


def tools_of(fields: RecordFields) -> list[dict[str, Any]]:
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


def remarks_on(messages: Conversation) -> Iterator[str]:
    """Yield what is unusual in a conversation that is trained as it stands."""
    roles = [message["role"] for message in messages if message["role"] != "system"]
    if roles and roles[0] == "assistant":
        yield "conversations begin with an answer"
    if any(one == other and one != "tool" for one, other in pairwise(roles)):
        yield "conversations have two questions, or two answers, in a row"
    if any(message["role"] == "system" for message in messages[1:]):
        yield "conversations have a system message that is not the first one"
    for message in messages:
        said = ("content", "reasoning_content", "tool_calls")
        if message["role"] == "assistant" and not any(message.get(name) for name in said):
            yield "answers are empty: their end alone is trained"
