"""Runs prepared tasks on a model: answers, scores, result files. Collective over all ranks.

Scores are per subject, per group and in total, with standard errors. The score of a question is
between 0 and 1; a question with several attempts (programs) scores the unbiased estimate of pass@k,
``1 - C(n - c, k) / C(n, k)`` for ``c`` correct of ``n`` attempts [1]. The standard error is that of
the mean: sample standard deviation / sqrt(number of questions). ``score`` is the mean over
questions (micro), ``macro`` the mean over subjects.

[1] Chen et al., Evaluating large language models trained on code, 2021.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from mindspeed import __version__
from mindspeed.evaluation import code_execution, run, samples
from mindspeed.evaluation.model_adapter import LanguageModel
from mindspeed.evaluation.prepared_tasks import PreparedTask
from mindspeed.evaluation.prompts import BenchmarkQuestion
from mindspeed.evaluation.samples import Outcome
from mindspeed.evaluation.task import Task
from mindspeed.files import atomic_write_text

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


RESULTS, SUBMISSION = "results.json", "submission.json"
_HASHED_BYTES = 1 << 16  # at either end of a file
_TIMEOUT = timedelta(days=30)


def evaluate(
    tasks: Sequence[PreparedTask],
    model: LanguageModel,
    *,
    identity: Mapping[str, Any],
    replica: run.Replica,
    is_writer: bool,
    output: Path | None = None,
    batch_size: int = 16,
    seed: int = 1234,
) -> dict[str, Any] | None:
    """Answer all questions; results on rank 0, None on the others.

    Args:
        tasks: The benchmarks.
        model: This rank's part of a replica of the model.
        identity: Identifies model, settings and questions.
        replica: The data-parallel replica that this rank belongs to.
        is_writer: Whether this rank writes for its replica.
        output: Directory of the results; an interrupted run in it is continued.
        batch_size: Questions per batch.
        seed: Random seed of sampled answers.
    """
    questions = [question for item in tasks for question in item.questions]
    group = _long_timeout_group()
    done = _earlier_outcomes(identity, output, group)
    mine = len(questions[replica.index :: replica.size])
    known = sum(question.key in done for question in questions[replica.index :: replica.size])
    with (
        samples.SampleFile(output if is_writer else None, replica.index) as file,
        tqdm(total=mine, initial=known, unit="question", disable=_rank() != 0) as bar,
    ):

        def append(new: Sequence[Outcome]) -> None:
            file.append(new)
            bar.update(len(new))

        outcomes = run.answer_all(
            questions,
            model,
            replica=replica,
            done=done,
            batch_size=batch_size,
            seed=seed,
            append=append,
        )
    all_outcomes = _gather(outcomes if is_writer else [], group)
    if all_outcomes is None:
        return None
    all_outcomes = run.in_order(all_outcomes, questions)
    if note := run.length_note(all_outcomes, questions):
        print(f"mindspeed evaluate: {note}", file=sys.stderr, flush=True)
    _run_programs(all_outcomes, questions)
    results = _results(tasks, all_outcomes, identity)
    if output is not None:
        samples.finish(output, all_outcomes)
        _write_json(output / RESULTS, results)
        _write_submissions(output, all_outcomes)
    return results


def identity_of(
    tasks: Sequence[PreparedTask], model: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Identity of a run: model, settings, questions."""
    identities = {item.task.name: item.identity() for item in tasks}
    return {"model": dict(model), "settings": dict(settings), "tasks": identities}


def fingerprint_of_files(directory: Path) -> str:
    """SHA-256 over the names, sizes and both ends of all files of a checkpoint.

    Distinguishes checkpoints without reading hundreds of gigabytes; a difference only in the middle
    of a large file is not detected.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(directory)}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HASHED_BYTES))
            file.seek(max(0, size - _HASHED_BYTES))
            digest.update(file.read(_HASHED_BYTES))
    return digest.hexdigest()


def fingerprint_of_weights(load: str, step: int | None, adapter: str | None) -> dict[str, str]:
    """Identity of a model's weights: the directory and its :func:`fingerprint_of_files`.

    Args:
        load: As ``--load``.
        step: As ``--ckpt-step``.
        adapter: As ``--lora-load``.
    """
    from mindspeed.checkpoint.find import model_path

    path = model_path(load, step)
    model = {"path": str(path), "files_sha256": fingerprint_of_files(path)}
    if adapter is not None:
        model["adapter_sha256"] = fingerprint_of_files(Path(adapter))
    return model


def _long_timeout_group() -> dist.ProcessGroup | None:
    """All ranks, with a timeout of days because replicas end hours apart. None for one rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo", timeout=_TIMEOUT)


def _earlier_outcomes(
    identity: Mapping[str, Any], output: Path | None, group: dist.ProcessGroup | None
) -> dict[str, Outcome]:
    """Outcomes of an interrupted run, read by rank 0 and broadcast."""
    box: list[Any] = [None]
    if _rank() == 0 and output is not None:
        box = [samples.begin(output, identity)]
    if group is not None:
        dist.broadcast_object_list(box, src=0, group=group)
    return box[0] or {}


def _gather(outcomes: list[Outcome], group: dist.ProcessGroup | None) -> list[Outcome] | None:
    """The outcomes of all ranks on rank 0, None elsewhere."""
    if group is None:
        return outcomes
    parts: list[list[Outcome]] = [[] for _ in range(group.size())]
    dist.all_gather_object(parts, outcomes, group=group)
    return [outcome for part in parts for outcome in part] if _rank() == 0 else None


def _run_programs(outcomes: Sequence[Outcome], questions: Sequence[BenchmarkQuestion]) -> None:
    programs = [
        (outcome, program_of(question, outcome["answer"]))
        for outcome, question in zip(outcomes, questions, strict=True)
        if question.score == "program" and "verdict" not in outcome
    ]
    if not programs:
        return
    with tqdm(total=len(programs), unit="program") as bar:
        verdicts = code_execution.run_programs([text for _, text in programs], progress=bar.update)
    for (outcome, _), verdict in zip(programs, verdicts, strict=True):
        outcome.update(correct=verdict.passed, verdict=verdict.reason)


def program_of(question: BenchmarkQuestion, answer: str) -> str:
    """The function that the model completed, followed by its tests."""
    record = question.record
    return f"{record['prompt']}{answer}\n{record['test']}\ncheck({record['entry_point']})\n"


def _results(
    tasks: Sequence[PreparedTask], outcomes: Sequence[Outcome], identity: Mapping[str, Any]
) -> dict[str, Any]:
    summaries = {}
    for item in tasks:
        name = item.task.name
        own = [outcome for outcome in outcomes if outcome["task"] == name]
        summaries[name] = {**summary(item.task, own), **identity["tasks"][name]}
    programs = any(item.task.score == "program" for item in tasks)
    return {
        "mindspeed": __version__,
        **({"code_execution": code_execution.isolation_record()} if programs else {}),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": identity["model"],
        "settings": identity["settings"],
        "tasks": summaries,
    }


def _write_submissions(output: Path, outcomes: Sequence[Outcome]) -> None:
    """Answers to questions without public labels: subject -> index -> letter."""
    answers: dict[str, dict[str, str]] = {}
    for outcome in outcomes:
        if outcome["correct"] is None and outcome["target"] is None:
            part = answers.setdefault(outcome["subject"], {})
            part[str(outcome["index"])] = outcome["answer"]
    if answers:
        _write_json(output / SUBMISSION, answers)


def _write_json(path: Path, content: Any) -> None:
    atomic_write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
