"""Definitions, calls and results of tools in records, in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mindspeed.parsing import decode_json


def definitions(found: Any) -> list[dict[str, Any]]:
    """Definitions of tools in OpenAI's form, which functions alone are put into."""
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        raise ValueError("'tools' is not a list of definitions")
    tools = [
        dict(one) if "function" in one else {"type": "function", "function": dict(one)}
        for one in found
    ]
    if nameless := [one for one in tools if not _named(one["function"])]:
        raise ValueError(f"'tools': a definition has no name: {json.dumps(nameless[0])[:60]}")
    return tools


def calls_of(value: Any, where: str) -> list[dict[str, Any]]:
    """Calls in OpenAI's form, with arguments as an object, as chat templates read them."""
    calls = []
    for one in value if isinstance(value, list) else [value]:
        function = one.get("function", one) if isinstance(one, Mapping) else {}
        if not _named(function):
            raise ValueError(f"{where!r}: a call of a tool has a name and arguments")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = from_json(arguments, f"{where}: arguments of {function['name']}")
        if not isinstance(arguments, Mapping):
            raise ValueError(f"{where!r}: the arguments of {function['name']} are not an object")
        call = {"name": function["name"], "arguments": dict(arguments)}
        calls.append({"type": "function", "function": call})
        if isinstance(one.get("id"), str):
            calls[-1]["id"] = one["id"]
    return calls


def check_result(
    before: Sequence[Mapping[str, Any]], result: Mapping[str, Any], where: str
) -> None:
    """Refuse the result of a tool that the answer before has not called."""
    nothing: dict[str, Any] = {}
    answer = next((one for one in reversed(before) if one["role"] != "tool"), nothing)
    calls = answer.get("tool_calls", ())
    known = [call["id"] for call in calls if "id" in call]
    asked = result.get("tool_call_id")
    if not calls or (asked and known and asked not in known):
        which = f" {asked!r}" if asked else ""
        raise ValueError(f"{where!r}: the result of a call{which} that the answer before lacks")


def from_json(value: Any, where: str) -> Any:
    """The value of a JSON text; others as they are."""
    if not isinstance(value, str):
        return value
    try:
        return decode_json(value)
    except ValueError as error:
        raise ValueError(f"{where!r} is no JSON: {value[:40]!r}") from error


def objects(text: str) -> Iterator[Any]:
    """The JSON values that follow each other in a text."""
    decoder, rest = json.JSONDecoder(), text.strip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except ValueError as error:
            raise ValueError(f"'system' has no definition of a function: {rest[:40]!r}") from error
        yield value
        rest = rest[end:].strip()


def _named(function: Any) -> bool:
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)
