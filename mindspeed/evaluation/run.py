"""Every question once: batches, data-parallel replicas, resuming.

Each replica of the model takes every ``size``-th question and writes its outcomes to a separate
file; nothing is communicated until rank 0 gathers all outcomes at the end. So replicas never wait
for each other's longest answer, and a killed run loses at most one batch per replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from mindspeed.evaluation import answer_matching
from mindspeed.evaluation.model_adapter import LanguageModel
from mindspeed.evaluation.prompts import BenchmarkQuestion
from mindspeed.evaluation.samples import Outcome
from mindspeed.inference.text_stream import truncate_at_stop

Append = Callable[[Sequence[Outcome]], object]


@dataclass(frozen=True)
class Replica:
    """One data-parallel replica of the model among ``size``."""

    index: int = 0
    size: int = 1


def answer_all(
    questions: Sequence[BenchmarkQuestion],
    model: LanguageModel,
    *,
    replica: Replica = Replica(),
    done: Mapping[str, Outcome] | None = None,
    batch_size: int = 16,
    seed: int = 1234,
    append: Append | None = None,
) -> list[Outcome]:
    """Outcomes of this replica's share, including those in ``done``. The same on all its ranks.

    Args:
        questions: All questions of the run.
        model: Answers the questions.
        replica: Takes every ``size``-th question.
        done: Outcomes of an interrupted run, by key.
        batch_size: Questions per batch.
        seed: Random seed of sampled answers.
        append: Called with the outcomes of every batch.
    """
    done = done or {}
    share = questions[replica.index :: replica.size]
    outcomes = [done[question.key] for question in share if question.key in done]
    for batch in _batches([q for q in share if q.key not in done], batch_size):
        prompts, notes = zip(*(fitting(question, model) for question in batch), strict=True)
        answer = _compare if batch[0].choices else _generate
        new = [
            {**_description(question), **note, **found}
            for question, note, found in zip(
                batch, notes, answer(batch, prompts, model, seed), strict=True
            )
        ]
        outcomes += new
        if append is not None:
            append(new)
    return outcomes


def fitting(question: BenchmarkQuestion, model: LanguageModel) -> tuple[str, Outcome]:
    """The prompt with as many examples as the context length allows, and how it was shortened.

    A prompt that is too long without any example is truncated on the left by the model.
    """
    if question.choices:
        room = model.max_length + 1 - max(map(model.count, question.choices))
    else:
        room = model.max_length - question.max_new_tokens
    shots = len(question.shots)
    while True:
        prompt = question.prompt(shots)
        fits = model.count(prompt) <= room
        if fits or not shots:
            return prompt, {"shots": shots, "truncated": not fits}
        shots -= 1


def length_note(outcomes: Sequence[Outcome], questions: Sequence[BenchmarkQuestion]) -> str | None:
    """A note on prompts that were too long for the model; None if there were none."""
    wanted = {question.key: len(question.shots) for question in questions}
    fewer = sum(outcome["shots"] < wanted[outcome["key"]] for outcome in outcomes)
    truncated = sum(outcome["truncated"] for outcome in outcomes)
    if not fewer and not truncated:
        return None
    return (
        f"of {len(outcomes)} prompts {fewer} have fewer examples than requested, {truncated} are "
        "truncated on the left, because they exceed the model's context length"
    )


def _batches(
    questions: Sequence[BenchmarkQuestion], size: int
) -> Iterator[list[BenchmarkQuestion]]:
    """Batches of one kind: the same task, all compared or all generated, longest first.

    Prompts of a batch have similar length, which keeps padding small.
    """

    def kind(question: BenchmarkQuestion) -> tuple[str, bool, int, tuple[str, ...]]:
        compares = bool(question.choices)
        return question.task, compares, question.max_new_tokens, question.stop

    for _, group in groupby(sorted(questions, key=kind), key=kind):
        ordered = sorted(group, key=lambda question: -len(question.prompt()))
        for start in range(0, len(ordered), size):
            yield ordered[start : start + size]


def _compare(
    batch: Sequence[BenchmarkQuestion], prompts: Sequence[str], model: LanguageModel, seed: int
) -> list[Outcome]:
    """The most likely choice of each question; one scoring call for the batch."""
    pairs = [
        (prompt, choice)
        for question, prompt in zip(batch, prompts, strict=True)
        for choice in question.choices
    ]
    logprobs = iter([logprob for logprob, _ in model.score(pairs)])
    outcomes = []
    for question in batch:
        values = [next(logprobs) for _ in question.choices]
        best = question.choices[values.index(max(values))].strip()
        correct = None if question.target is None else best == question.target
        outcomes.append({"answer": best, "correct": correct, "logprobs": values})
    return outcomes


def _generate(
    batch: Sequence[BenchmarkQuestion], prompts: Sequence[str], model: LanguageModel, seed: int
) -> list[Outcome]:
    """Generated text, matched with the target; programs are run later, on rank 0."""
    first = batch[0]
    texts = model.generate(prompts, first.stop, first.max_new_tokens, _seed(seed, first))
    outcomes = []
    for question, raw in zip(batch, texts, strict=True):
        text, correct = truncate_at_stop(raw, question.stop), None
        if question.target is not None and question.score != "program":
            correct = answer_matching.is_correct(question.score, text, question.target)
        outcomes.append({"answer": text, "correct": correct})
    return outcomes


def _seed(seed: int, first: BenchmarkQuestion) -> int:
    """A seed that differs between batches and is the same when a run is repeated."""
    return (seed + 1_000_003 * first.index + 7919 * first.sample) % 2**31


def _description(question: BenchmarkQuestion) -> Outcome:
    return {
        "key": question.key,
        "task": question.task,
        "subject": question.subject,
        "index": question.index,
        "sample": question.sample,
        "target": question.target,
    }


def in_order(outcomes: Sequence[Outcome], questions: Sequence[BenchmarkQuestion]) -> list[Outcome]:
    """Outcomes in the order of their questions."""
    found = {outcome["key"]: outcome for outcome in outcomes}
    return [found[question.key] for question in questions]
