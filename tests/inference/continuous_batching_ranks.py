"""Requests in a continuous batch, on the ranks of a pool, and each one alone for comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed.inference.sampling import SamplingOptions
from tests.support.lazy import Lazy
from tests.support.tiny import CASES

ContinuousBatcher = Lazy("mindspeed.inference.continuous_batching", "ContinuousBatcher")
Source = Lazy("mindspeed.inference.load", "Source")
load_model = Lazy("mindspeed.inference.load", "load_model")
TextGenerator = Lazy("mindspeed.inference.text_generator", "TextGenerator")


# Prompts of different lengths, longer than the sliding window; each is added before this step.
REQUESTS: list[tuple[int, list[list[int]], SamplingOptions]] = [
    (0, [[5, 17, 8, 33, 61, 9, 70]], SamplingOptions(max_new_tokens=9, greedy=True)),
    (2, [[11, 2, 90], [4]], SamplingOptions(max_new_tokens=5, greedy=True, logprobs=2)),
    (3, [[8, 8]], SamplingOptions(max_new_tokens=6, num_return_sequences=3, seed=7, top_k=40)),
    (12, [[1, 2, 3, 4]], SamplingOptions(max_new_tokens=3, repetition_penalty=1.5, greedy=True)),
]


def generator_of(folder: str, layout: tuple[int, int]) -> TextGenerator:
    """The tiny model of a directory on (TP, PP)."""
    tp, pp = layout
    return TextGenerator.of(load_model(Source(f"hf:{folder}", tp=tp, pp=pp), tp * pp))


def compared(folder: str, layout: tuple[int, int] = (1, 1)) -> dict[str, Any]:
    """Tokens of every request, batched and alone, and the number of forward passes of either."""
    generator = generator_of(folder, layout)
    passes: list[int] = []
    hook = lambda module, args, kwargs: passes.append(len(args[0]))  # noqa: E731
    generator.stage.register_forward_pre_hook(hook, with_kwargs=True)
    alone = [
        [
            (c.tokens, c.finish, c.scores)
            for completions in generator.generate(prompts, options)
            for c in completions
        ]
        for _, prompts, options in REQUESTS
    ]
    before = len(passes)
    batcher, found = ContinuousBatcher(generator), {}
    finish: dict[tuple[int, int], Any] = {}
    scores: dict[tuple[int, int], Any] = {}
    for step in range(20):
        for key, (when, prompts, options) in enumerate(REQUESTS):
            if when == step:
                assert batcher.add(key, prompts, options) == []
        for key, chunk in batcher.step():
            sequence = (key, chunk.index)
            found.setdefault(sequence, [])
            if chunk.token is not None:
                found[sequence].append(chunk.token)
            if chunk.scores is not None:
                scores.setdefault(sequence, []).append(chunk.scores)
            finish[sequence] = chunk.finish
    assert batcher.batch_size == 0
    batched = [
        [
            (found[key, index], finish[key, index], scores.get((key, index)))
            for index in range(len(prompts) * options.num_return_sequences)
        ]
        for key, (_, prompts, options) in enumerate(REQUESTS)
    ]
    return {"alone": alone, "batched": batched, "passes": (before, len(passes) - before)}


def saved_family(name: str, folder: str) -> None:
    """Write the tiny model of a family."""
    case = CASES[name]
    case.save(case.model().eval(), Path(folder))


def removing(folder: str) -> dict[str, Any]:
    """A request next to one that is removed and one that is refused."""
    from mindspeed.errors import DataError

    generator = generator_of(folder, (1, 1))
    (_, prompts, options) = REQUESTS[0]
    [[alone]] = generator.generate(prompts, options)
    batcher, tokens, error = ContinuousBatcher(generator), [], ""
    for step in range(9):
        if step == 0:
            batcher.add("kept", prompts, options)
            batcher.add("removed", [[3, 4]], options)
        if step == 3:
            batcher.remove("removed")
            batcher.remove("removed")
            try:
                batcher.add("invalid", [[10**6]], options)
            except DataError as problem:
                error = str(problem)
        for key, chunk in batcher.step():
            assert key == "kept" or step < 3
            if key == "kept":
                tokens.append(chunk.token)
    return {"same": tokens == alone.tokens, "error": error, "batch size": batcher.batch_size}
