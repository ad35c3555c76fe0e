"""A plan and a model -> answers, scores, files. Collective: every rank of the job takes part."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from mindspeed import __version__
from mindspeed.evaluation import code_execution, report, run, samples
from mindspeed.evaluation.model_adapter import LanguageModel
from mindspeed.evaluation.prepared_tasks import PreparedTask
from mindspeed.evaluation.prompts import Question
from mindspeed.evaluation.samples import Outcome
from mindspeed.files import atomic_write_text

RESULTS, SUBMISSION = "results.json", "submission.json"
_SAMPLE = 1 << 16
_PATIENCE = timedelta(days=30)


def evaluate(
    planned: Sequence[PreparedTask],
    model: LanguageModel,
    *,
    identity: Mapping[str, Any],
    replica: run.Replica,
    leader: bool,
    output: Path | None = None,
    batch_size: int = 16,
    seed: int = 1234,
) -> dict[str, Any] | None:
    """Answer all questions; the results on rank 0, None on the others.

    Args:
        planned: The benchmarks.
        model: This rank's part of a copy of the model.
        identity: What the results belong to: model and settings.
        replica: Which copy of the model this is.
        leader: Whether this rank writes for its copy.
        output: Directory of the results; a run that was interrupted there is taken up.
        batch_size: Questions at once.
        seed: Of sampled answers.
    """
    asked = [question for item in planned for question in item.questions]
    group = _patient_group()
    done = _taken_up(identity, output, group)
    mine = len(asked[replica.index :: replica.size])
    known = sum(question.key in done for question in asked[replica.index :: replica.size])
    with (
        samples.SampleFile(output if leader else None, replica.index) as file,
        tqdm(total=mine, initial=known, unit="question", disable=_rank() != 0) as bar,
    ):

        def append(new: Sequence[Outcome]) -> None:
            file.append(new)
            bar.update(len(new))

        outcomes = run.answer_all(
            asked,
            model,
            replica=replica,
            done=done,
            batch_size=batch_size,
            seed=seed,
            append=append,
        )
    everything = _gathered(outcomes if leader else [], group)
    if everything is None:
        return None
    everything = run.in_order(everything, asked)
    if note := run.length_note(everything, asked):
        print(f"mindspeed evaluate: {note}", file=sys.stderr, flush=True)
    _run_programs(everything, asked)
    results = _results(planned, everything, identity)
    if output is not None:
        samples.finish(output, everything)
        _write_json(output / RESULTS, results)
        _write_submissions(output, everything)
    return results


def identity_of(
    planned: Sequence[PreparedTask], model: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What makes two runs the same: model, settings, questions."""
    tasks = {item.task.name: item.identity() for item in planned}
    return {"model": dict(model), "settings": dict(settings), "tasks": tasks}


def fingerprint_of_files(directory: Path) -> str:
    """SHA-256 over the names, sizes and both ends of all files of a checkpoint.

    Tells checkpoints apart without reading hundreds of gigabytes; two that differ in the middle of
    a large file only are taken for the same.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(directory)}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE))
            file.seek(max(0, size - _SAMPLE))
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def fingerprint_of_weights(load: str, step: int | None, adapter: str | None) -> dict[str, str]:
    """Which weights a model has: the directory and :func:`fingerprint_of_files` of it.

    Args:
        load: As ``--load``.
        step: As ``--ckpt-step``.
        adapter: As ``--lora-load``.
    """
    from mindspeed.checkpoint.load import latest
    from mindspeed.models.hf_load import folder_of, is_hf

    path = Path(folder_of(load)) if is_hf(load) else latest(load, step)
    model = {"path": str(path), "files_sha256": fingerprint_of_files(path)}
    if adapter is not None:
        model["adapter_sha256"] = fingerprint_of_files(Path(adapter))
    return model


def _patient_group() -> dist.ProcessGroup | None:
    """All ranks, waiting for each other for days: replicas end hours apart. None for one rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo", timeout=_PATIENCE)


def _taken_up(
    identity: Mapping[str, Any], output: Path | None, group: dist.ProcessGroup | None
) -> dict[str, Outcome]:
    """Outcomes of an interrupted run, as rank 0 finds them, on every rank."""
    box: list[Any] = [None]
    if _rank() == 0 and output is not None:
        box = [samples.begin(output, identity)]
    if group is not None:
        dist.broadcast_object_list(box, src=0, group=group)
    return box[0] or {}


def _gathered(outcomes: list[Outcome], group: dist.ProcessGroup | None) -> list[Outcome] | None:
    """The outcomes of all ranks on rank 0, None elsewhere."""
    if group is None:
        return outcomes
    parts: list[list[Outcome]] = [[] for _ in range(group.size())]
    dist.all_gather_object(parts, outcomes, group=group)
    return [outcome for part in parts for outcome in part] if _rank() == 0 else None


def _run_programs(outcomes: Sequence[Outcome], asked: Sequence[Question]) -> None:
    """Judge the answers that are programs."""
    programs = [
        (outcome, program_of(question, outcome["answer"]))
        for outcome, question in zip(outcomes, asked, strict=True)
        if question.score == "program" and "verdict" not in outcome
    ]
    if not programs:
        return
    with tqdm(total=len(programs), unit="program") as bar:
        verdicts = code_execution.run_programs([text for _, text in programs], progress=bar.update)
    for (outcome, _), verdict in zip(programs, verdicts, strict=True):
        outcome.update(correct=verdict.passed, verdict=verdict.reason)


def program_of(question: Question, answer: str) -> str:
    """The function as the model completed it, and its tests."""
    record = question.record
    return f"{record['prompt']}{answer}\n{record['test']}\ncheck({record['entry_point']})\n"


def _results(
    planned: Sequence[PreparedTask], outcomes: Sequence[Outcome], identity: Mapping[str, Any]
) -> dict[str, Any]:
    tasks = {}
    for item in planned:
        name = item.task.name
        own = [outcome for outcome in outcomes if outcome["task"] == name]
        tasks[name] = {**report.summary(item.task, own), **identity["tasks"][name]}
    programs = any(item.task.score == "program" for item in planned)
    return {
        "mindspeed": __version__,
        **({"code_execution": code_execution.isolation_record()} if programs else {}),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": identity["model"],
        "settings": identity["settings"],
        "tasks": tasks,
    }


def _write_submissions(output: Path, outcomes: Sequence[Outcome]) -> None:
    """Answers to questions whose labels are not public: subject -> number -> letter."""
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
