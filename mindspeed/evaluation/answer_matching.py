"""Compares generated text with the target, per kind of answer.

A model's text may continue after its answer (it may invent the next question), so each matcher
extracts the answer to this question and normalises both sides.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from mindspeed.evaluation.task import function_named

_CONCLUSION = re.compile(r"the (?:final )?answer is\s*:?", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_LETTER = re.compile(r"(?<![A-Za-z])([A-G])(?![A-Za-z])")
_LETTERS = re.compile(r"(?<![A-Za-z])([A-G]+)(?![A-Za-z])")
_BOX = re.compile(r"\\(?:boxed|fbox)(?:\{| )")
_VARIABLE = re.compile(r"(?:[A-Za-z]|\\[A-Za-z]+)(?:_\w|_\{\w+\})?=(?=[^=]+$)")
_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def is_correct(score: str, text: str, target: str) -> bool:
    """Whether ``text`` answers ``target``.

    Args:
        score: A key of :data:`MATCHERS`, or ``module:function``.
        text: Generated text.
        target: The right answer.
    """
    return bool(function_named(score, MATCHERS)(text, target))


def first_line(text: str) -> str:
    """The first non-empty line."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def conclusion(text: str) -> str:
    """The rest of the line after the last "the answer is"; without one, the first line."""
    parts = _CONCLUSION.split(text)
    return first_line(parts[-1]) if len(parts) > 1 else first_line(text)


def last_number(text: str) -> str | None:
    """The last number after "the answer is", else in the text, without thousands separators."""
    parts = _CONCLUSION.split(text)
    for part in (first_line(parts[-1]) if len(parts) > 1 else "", text):
        if numbers := _NUMBER.findall(part):
            return numbers[-1].replace(",", "")
    return None


def _yes_or_no(text: str, target: str) -> bool:
    word = re.match(r"\W*(\w+)", text)
    return word is not None and word[1].lower() == target.lower()


def _letter(text: str, target: str) -> bool:
    found = _LETTER.search(conclusion(text))
    return found is not None and found[1] == target


def _letters(text: str, target: str) -> bool:
    """A single letter must be the first one; several must all occur, in any order."""
    if len(target) == 1:
        return _letter(text, target)
    return set("".join(_LETTERS.findall(conclusion(text)))) == set(target)


def _number(text: str, target: str) -> bool:
    found, expected = last_number(text), last_number(target)
    return found is not None and expected is not None and float(found) == float(expected)


def _first_line(text: str, target: str) -> bool:
    return first_line(text) == target.strip()


def _conclusion(text: str, target: str) -> bool:
    return conclusion(text).rstrip(".").strip() == target.strip()


def _formula(text: str, target: str) -> bool:
    found, expected = normal_formula(formula_of(text)), normal_formula(target)
    sides = [_VARIABLE.match(formula) for formula in (found, expected)]
    if all(sides) or not expected:
        return found == expected and bool(expected)
    found, expected = _VARIABLE.sub("", found), _VARIABLE.sub("", expected)
    if found == expected:
        return True
    left, right = _value(found), _value(expected)
    return left is not None and right is not None and abs(left - right) < 1e-9


def formula_of(text: str) -> str:
    """The answer in a text: its conclusion, or what it puts into the last box."""
    line = conclusion(text)
    return line if "\\boxed" in line or not _BOX.search(text) else _boxed(text)


def normal_formula(text: str) -> str:
    """A short LaTeX formula in canonical form, by the rules of the MATH benchmark.

    Of several formulas between dollar signs, all are kept, and so is the left side of an equation.
    """
    text = _boxed(text.strip()).replace("\\\\", "\\").replace("\\$", "")
    first, last = text.find("$"), text.rfind("$")
    text = text[first + 1 : last] if first < last else text
    text = re.sub(r"\\text\{ [^{}]*\}(?:\^\{?\d\}?)?[\s.]*$", "", text)  # units
    text = re.sub(r"\\(left|right|!|,|;|:|%)", "", text)
    text = re.sub(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*(\w)", r"\\frac{\1}", text)
    text = re.sub(r"\\frac(\{[^{}]*\})\s*(\w)", r"\\frac\1{\2}", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"\^(?:\{\\circ\}|\\circ)", "", text)
    text = re.sub(r"[\s$%]", "", text).rstrip(".。")
    text = re.sub(r"(?<!\d)\.(?=\d)", "0.", text)
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def _boxed(text: str) -> str:
    """The content of the last ``\\boxed{...}``, with its inner braces; the text without one."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return text
    start, depth = boxes[-1].end(), 1
    if not boxes[-1][0].endswith("{"):  # \boxed 5
        return text[start:].partition("$")[0]
    for at in range(start, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if not depth:
            return text[start:at]
    return text[start:]


def _value(formula: str) -> float | None:
    fraction = re.fullmatch(r"(-?)\\frac\{(-?[\d.]+)\}\{(-?[\d.]+)\}", formula)
    if fraction is None:
        fraction = re.fullmatch(r"(-?)([\d.]+)/([\d.]+)", formula)
    try:
        if fraction is None:
            return float(formula)
        return float(fraction[1] + "1") * float(fraction[2]) / float(fraction[3])
    except (ValueError, ZeroDivisionError):
        return None


MATCHERS: dict[str, Callable[[str, str], bool]] = {
    "yes_or_no": _yes_or_no,
    "letter": _letter,
    "letters": _letters,
    "number": _number,
    "first_line": _first_line,
    "conclusion": _conclusion,
    "formula": _formula,
}
