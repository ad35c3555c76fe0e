"""Requests that are answered together, on the ranks of a pool, and each alone for comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed.inference.generator import Generator
from mindspeed.inference.load import Source, load_model
from mindspeed.inference.sampling import SamplingOptions
from mindspeed.inference.together import Together
from tests.support.tiny import CASES

# Prompts of different lengths, longer than the sliding window; each joins before this turn.
REQUESTS: list[tuple[int, list[list[int]], SamplingOptions]] = [
    (0, [[5, 17, 8, 33, 61, 9, 70]], SamplingOptions(max_new_tokens=9, greedy=True)),
    (2, [[11, 2, 90], [4]], SamplingOptions(max_new_tokens=5, greedy=True, logprobs=2)),
    (3, [[8, 8]], SamplingOptions(max_new_tokens=6, num_return_sequences=3, seed=7, top_k=40)),
    (12, [[1, 2, 3, 4]], SamplingOptions(max_new_tokens=3, repetition_penalty=1.5, greedy=True)),
]


def generator_of(folder: str, layout: tuple[int, int]) -> Generator:
    """The tiny model of a directory on (TP, PP)."""
    tp, pp = layout
    return Generator.of(load_model(Source(f"hf:{folder}", tp=tp, pp=pp), tp * pp))


def compared(folder: str, layout: tuple[int, int] = (1, 1)) -> dict[str, Any]:
    """Tokens of every request, together and alone; how many passes either took; rows of a pass."""
    generator = generator_of(folder, layout)
    passes: list[int] = []
    hook = lambda module, args, kwargs: passes.append(len(args[0]))  # noqa: E731
    generator.stage.register_forward_pre_hook(hook, with_kwargs=True)
    alone = [
        [
            (c.tokens, c.finish, c.scores)
            for row in generator.generate(prompts, options)
            for c in row
        ]
        for _, prompts, options in REQUESTS
    ]
    before = len(passes)
    together, found = Together(generator), {}
    finish: dict[tuple[int, int], Any] = {}
    scores: dict[tuple[int, int], Any] = {}
    for turn in range(20):
        for key, (when, prompts, options) in enumerate(REQUESTS):
            if when == turn:
                assert together.join(key, prompts, options) == []
        for key, piece in together.turn():
            place = (key, piece.row)
            found.setdefault(place, [])
            if piece.token is not None:
                found[place].append(piece.token)
            if piece.scores is not None:
                scores.setdefault(place, []).append(piece.scores)
            finish[place] = piece.finish
    assert together.rows == 0
    ours = [
        [
            (found[key, row], finish[key, row], scores.get((key, row)))
            for row in range(len(prompts) * options.num_return_sequences)
        ]
        for key, (_, prompts, options) in enumerate(REQUESTS)
    ]
    return {"alone": alone, "together": ours, "passes": (before, len(passes) - before)}


def saved_family(name: str, folder: str) -> None:
    """Write the tiny model of a family."""
    case = CASES[name]
    case.save(case.model().eval(), Path(folder))


def leaving(folder: str) -> dict[str, Any]:
    """What a request gets beside others that leave, and beside one that cannot be answered."""
    from mindspeed.errors import DataError

    generator = generator_of(folder, (1, 1))
    (_, prompts, options) = REQUESTS[0]
    [[alone]] = generator.generate(prompts, options)
    together, tokens, error = Together(generator), [], ""
    for turn in range(9):
        if turn == 0:
            together.join("kept", prompts, options)
            together.join("gone", [[3, 4]], options)
        if turn == 3:
            together.leave("gone")
            together.leave("gone")
            try:
                together.join("wrong", [[10**6]], options)
            except DataError as problem:
                error = str(problem)
        for key, piece in together.turn():
            assert key == "kept" or turn < 3
            if key == "kept":
                tokens.append(piece.token)
    return {"same": tokens == alone.tokens, "error": error, "rows": together.rows}
