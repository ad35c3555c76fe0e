"""Requests in a continuous batch, on the ranks of a pool, and each one alone for comparison."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed.inference.sampling import SamplingOptions
from tests.support.lazy import Lazy
from tests.support.tiny import CASES

ContinuousBatcher = Lazy("mindspeed.inference.continuous_batching", "ContinuousBatcher")
Source = Lazy("mindspeed.inference.load", "Source")
load_model = Lazy("mindspeed.inference.load", "load_model")
PrefixCache = Lazy("mindspeed.inference.prefix_cache", "PrefixCache")
why_not_shared = Lazy("mindspeed.inference.prefix_cache", "why_not_shared")
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


GREEDY = SamplingOptions(max_new_tokens=6, greedy=True, logprobs=5)


def answered(batcher: Any, prompt: list[int], options: SamplingOptions) -> dict[str, Any]:
    """Tokens of one request, their scores, and what it found in the prefix cache."""
    cached = [event.tokens for event in batcher.add("one", [prompt], options)]
    tokens, scores = [], []
    while "one" in batcher:
        for _, chunk in batcher.step():
            scores.append(chunk.scores)
            tokens += [] if chunk.token is None else [chunk.token]
    return {"tokens": tokens, "scores": scores, "cached": sum(cached)}


def sharing(folder: str, layout: tuple[int, int], prompt: list[int]) -> dict[str, Any]:
    """Requests that begin alike, with a prefix cache and without.

    The first one, one that shares 35 tokens, the next turn of the first one, the first one again.
    """
    generator = replace(generator_of(folder, layout), eos=frozenset())
    reason = why_not_shared(generator.stage)
    [[alone]] = generator.generate([prompt], GREEDY)
    computed: list[int] = []
    hook = lambda module, args, kwargs: computed.append(args[0].shape[1])  # noqa: E731
    generator.stage.register_forward_pre_hook(hook, with_kwargs=True)
    found: dict[str, Any] = {"reason": reason, "alone": alone.tokens}
    for name in ("without", "with") if reason is None else ("without",):
        cache = PrefixCache(1 << 20) if name == "with" else None
        batcher = ContinuousBatcher(generator, cache)
        del computed[:]
        first = answered(batcher, prompt, GREEDY)
        answers = [
            first,
            answered(batcher, [*prompt[:35], 7, 3, 11, 90, 2], GREEDY),
            answered(batcher, [*prompt, *first["tokens"], 5, 6, 7], GREEDY),
            answered(batcher, prompt, GREEDY),
        ]
        found[name] = {"answers": answers, "computed": [n for n in computed if n > 1]}
    return found


def bounded(folder: str, prompts: list[list[int]], max_bytes: int) -> list[tuple[int, int]]:
    """Of each request what it found, and the bytes of the cache after it."""
    generator = replace(generator_of(folder, (1, 1)), eos=frozenset())
    cache = PrefixCache(max_bytes)
    batcher = ContinuousBatcher(generator, cache)
    return [(answered(batcher, prompt, GREEDY)["cached"], cache.bytes) for prompt in prompts]


def resumed(implementation: str, tokens: Any, cut: int) -> Any:
    """Logits after every token of a text: at once, and from ``cut`` on with kept states."""
    import torch

    from mindspeed.inference.decoder import Decoder
    from mindspeed.inference.parallel_groups import ModelParallelGroups
    from tests.inference import tiny_gpt

    model, groups = tiny_gpt.build(1, 1, implementation), ModelParallelGroups.of_megatron()
    with torch.inference_mode():
        whole = Decoder(model, groups, 1, 40)
        logits = whole.all_positions(tokens)
        part = Decoder(model, groups, 1, 50)
        middle = cut // 2
        part.resume([whole.keys_and_values(0, middle), whole.keys_and_values(middle, cut)], cut)
        return logits[:, cut:], part.all_positions(tokens[:, cut:])
