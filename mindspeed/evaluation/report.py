"""Outcomes -> scores: per subject, per group and in total, with standard errors.

The score of a question is between 0 and 1; a question with several attempts (programs) scores the
unbiased estimate of pass@k, ``1 - C(n - c, k) / C(n, k)`` for ``c`` correct of ``n`` attempts [1].
The standard error is that of the mean: sample standard deviation / sqrt(number of questions).
``score`` is the mean over questions (micro), ``macro`` the mean over subjects.

[1] Chen et al., Evaluating large language models trained on code, 2021.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mindspeed.evaluation.samples import Outcome
from mindspeed.evaluation.task import Task

_UNGROUPED = "ungrouped"
_PASS_AT = (1, 10, 100)


def pass_at_k(attempts: int, right: int, k: int) -> float:
    """Unbiased estimate of pass@k from ``attempts``, of which ``right`` are correct."""
    return 1.0 - math.comb(attempts - right, k) / math.comb(attempts, k)


def summary(task: Task, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The scores of one task.

    Questions without a target in the data are counted, not scored.
    """
    attempts: dict[tuple[str, int], list[bool]] = defaultdict(list)
    for outcome in outcomes:
        if outcome["correct"] is not None:
            attempts[outcome["subject"], outcome["index"]].append(outcome["correct"])
    metric = "pass@1" if task.score == "program" else "accuracy"
    values = {key: pass_at_k(len(a), sum(a), 1) for key, a in attempts.items()}
    result: dict[str, Any] = {"metric": metric, **_statistics(values.values())}
    result["unscored"] = sum(outcome["correct"] is None for outcome in outcomes)
    for k in _PASS_AT[1:]:
        if task.score == "program" and attempts and k <= min(map(len, attempts.values())):
            more = [pass_at_k(len(a), sum(a), k) for a in attempts.values()]
            result[f"pass@{k}"] = sum(more) / len(more)
    subjects: dict[str, list[float]] = defaultdict(list)
    for (subject, _), value in values.items():
        subjects[subject].append(value)
    if set(subjects) - {""}:
        result["macro"] = _mean([_mean(part) for part in subjects.values()])
        result["subjects"] = {name: _statistics(part) for name, part in sorted(subjects.items())}
        result["groups"] = _groups(task.groups, subjects)
    return result


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A text table of all tasks, with groups and subjects indented below their task."""
    rows: list[tuple[str, ...]] = [("task", "questions", "score", "stderr", "macro")]
    for name, result in results.items():
        rows.append(_row(f"{name} ({result['metric']})", result))
        rows += [
            (f"  {key}", "", f"{100 * result[key]:.2f}", "", "")
            for key in (f"pass@{k}" for k in _PASS_AT[1:])
            if key in result
        ]
        groups = result.get("groups", {})
        shown: set[str] = set()
        for group, part in groups.items():
            rows.append(_row(f"  {group}", part))
            for subject in part["subjects"]:
                rows.append(_row(f"    {subject}", result["subjects"][subject]))
                shown.add(subject)
        for subject, part in result.get("subjects", {}).items():
            if subject not in shown:
                rows.append(_row(f"  {subject}", part))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def _groups(
    groups: Mapping[str, Sequence[str]], subjects: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    if not groups:
        return {}
    known = {subject for names in groups.values() for subject in names}
    named = dict(groups)
    if rest := sorted(set(subjects) - known):
        named[_UNGROUPED] = rest
    result = {}
    for group, names in named.items():
        present = [name for name in names if name in subjects]
        if present:
            values = [value for name in present for value in subjects[name]]
            macro = _mean([_mean(subjects[name]) for name in present])
            result[group] = {**_statistics(values), "macro": macro, "subjects": present}
    return result


def _statistics(values: Iterable[float]) -> dict[str, Any]:
    values = list(values)
    if not values:
        return {"questions": 0, "score": None, "stderr": None}
    mean, stderr = _mean(values), None
    if len(values) > 1:
        variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
        stderr = math.sqrt(variance / len(values))
    return {"questions": len(values), "score": mean, "stderr": stderr}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _row(name: str, part: Mapping[str, Any]) -> tuple[str, ...]:
    numbers = (part.get("score"), part.get("stderr"), part.get("macro"))
    cells = ("" if number is None else f"{100 * number:.2f}" for number in numbers)
    return (name, str(part["questions"]), *cells)
