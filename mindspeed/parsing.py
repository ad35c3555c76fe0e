"""YAML and JSON that users write, parsed into exactly what stands there or refused in one sentence.

The parsers of the language are lenient where a run must not be: of a key that is given twice they
keep the last value, YAML 1.1 reads ``010`` as 8 and ``1:30`` as 90, deep nesting ends in a
``RecursionError``, an alias of an alias of an alias in an exponential tree. Here each of them is an
error that names file and line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from mindspeed.errors import ConfigError, MindSpeedError
from mindspeed.files import check_path

_MOST_BYTES = 16 << 20
_MOST_VALUES = 200_000
_LONGEST_LINE = 80
_OCTAL = re.compile(r"[-+]?0[0-9_]+")
Error = type[MindSpeedError]


def read_text(path: Path | str, where: str, error: Error = ConfigError) -> str:
    """The text of a file.

    Args:
        path: the file; nobody else may be able to change it (:func:`mindspeed.files.check_path`).
        where: what names it in a message, such as ``--config FILE``.
        error: class of the error.

    Raises:
        MindSpeedError: of class ``error``: it cannot be read, is too large or no UTF-8.
    """
    try:
        file = check_path(path, "input")
        if not file.is_file():
            raise error(
                f"{where} is no file" if file.exists() else f"{where}: there is no such file"
            )
        if file.stat().st_size > _MOST_BYTES:
            raise error(f"{where} has more than {_MOST_BYTES >> 20} MiB")
        return file.read_text("utf-8-sig")  # editors of Windows write a byte order mark
    except UnicodeDecodeError as problem:
        raise error(f"{where} is no text in UTF-8 (byte {problem.start})") from problem
    except FileNotFoundError as problem:
        raise error(f"{where}: there is no such file") from problem
    except (OSError, ValueError) as problem:  # a null byte in a name is a ValueError
        if isinstance(problem, MindSpeedError):
            raise
        raise error(f"{where}: {getattr(problem, 'strerror', None) or problem}") from problem


def parse_yaml(text: str, where: str, error: Error = ConfigError) -> Any:
    """The value of a YAML document.

    Raises:
        MindSpeedError: of class ``error``: it is no YAML, has a key twice, a number that other
            readers take for another one, or is nested too deep.
    """
    try:
        value = yaml.load(text, Loader=_Loader)
        _count(value, 0)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise error(f"{where} is no valid YAML{line}: {problem.problem}") from problem
    except yaml.YAMLError as problem:
        raise error(f"{where} is no valid YAML: {str(problem).splitlines()[0]}") from problem
    except RecursionError as problem:
        raise error(f"{where} is nested too deep") from problem
    except (ValueError, OverflowError) as problem:  # a date that does not exist, too many values
        raise error(f"{where} is no valid YAML: {problem}") from problem
    return value


def decode_json(text: str | bytes) -> Any:
    """``json.loads`` for text that may be damaged: deep nesting is an error like all others.

    An integer of more digits than Python converts stays a text.

    Raises:
        JSONDecodeError: it is no JSON, or is nested deeper than Python can follow.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("it is nested too deep", "", 0) from None
    except json.JSONDecodeError:
        raise
    except ValueError:
        return json.loads(text, parse_int=int_or_text)


def int_or_text(digits: str) -> int | str:
    """An integer; its digits where there are more than Python converts."""
    try:
        return int(digits)
    except ValueError:
        return digits


def parse_json(text: str, where: str, error: Error = ConfigError) -> Any:
    """The value of a JSON document.

    Raises:
        MindSpeedError: of class ``error``: it is no JSON, has a key twice or half of a character,
            or is nested too deep.
    """
    try:
        value = json.loads(text, object_pairs_hook=_without_duplicates)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as problem:
        line = text.split("\n")[problem.lineno - 1].strip()
        shown = line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..."
        raise error(
            f"{where} is no valid JSON, line {problem.lineno}: {problem.msg}: {shown}"
        ) from problem
    except RecursionError as problem:
        raise error(f"{where} is nested too deep") from problem
    except UnicodeEncodeError as problem:
        raise error(
            f"{where} has half of a character ({problem.object[problem.start]!r})"
        ) from problem
    except ValueError as problem:  # a number of thousands of digits, a key twice
        raise error(f"{where} is no valid JSON: {str(problem).split(';')[0]}") from problem
    return value


def read_yaml(path: Path | str, where: str, error: Error = ConfigError) -> Any:
    """:func:`read_text`, then :func:`parse_yaml`."""
    return parse_yaml(read_text(path, where, error), where, error)


def parse_object(text: str, flag: str) -> dict[str, Any]:
    """The JSON object that is the value of a flag.

    Raises:
        ConfigError: it is none.
    """
    found = parse_json(text, f"{flag} {text}")
    if not isinstance(found, dict):
        raise ConfigError(f"{flag} {text}: a JSON object is expected")
    return found


def read_json(path: Path | str, where: str, error: Error = ConfigError) -> Any:
    """:func:`read_text`, then :func:`parse_json`."""
    return parse_json(read_text(path, where, error), where, error)


class _Loader(yaml.SafeLoader):
    """Refuses what other readers of YAML understand otherwise."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        if isinstance(node, yaml.MappingNode):
            self._refuse_duplicates(node)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put what ``<<`` merges before the own keys, which win; of a list the first mapping wins.

        So says YAML, and so read all releases of PyYAML but 6.0.4, where the last one wins.
        """
        own: dict[Hashable, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[Hashable, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if key.tag != "tag:yaml.org,2002:merge":
                own[_same(key)] = key, value
                continue
            for part in reversed(value.value if isinstance(value, yaml.SequenceNode) else [value]):
                if not isinstance(part, yaml.MappingNode):
                    problem = f"<< merges mappings, and this is a {part.id}"
                    raise yaml.constructor.ConstructorError(None, None, problem, part.start_mark)
                self.flatten_mapping(part)
                merged |= {_same(pair[0]): pair for pair in part.value}
        node.value = list((merged | own).values())
        super().flatten_mapping(node)

    def _refuse_duplicates(self, node: yaml.MappingNode) -> None:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is given twice", key.start_mark
                )
            seen.add((key.tag, key.value))

    def number(self, node: yaml.ScalarNode) -> Any:
        text = str(node.value)
        if _OCTAL.fullmatch(text) or ":" in text:
            kind = "base 60" if ":" in text else "octal"
            problem = f"{text} may be read as a number of {kind}: write it out, or in quotes"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        if node.tag.endswith("int"):
            return self.construct_yaml_int(node)
        return self.construct_yaml_float(node)


def _same(key: yaml.Node) -> Hashable:
    """Equal for keys that are the same key of a mapping."""
    return (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.number)


def _count(value: Any, so_far: int) -> int:
    """The number of values in a tree, with those that aliases repeat; refuses too many."""
    so_far += 1
    if so_far > _MOST_VALUES:
        raise ValueError(f"it has more than {_MOST_VALUES} values")
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        so_far = _count(part, so_far)
    return so_far


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:60]!r} is given twice")
    return found
