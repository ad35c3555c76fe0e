"""What the prefix cache of ``mindspeed serve`` saves: tokens computed, seconds to the first one.

    python benchmarks/prefix_cache.py --load hf:models/qwen3-8b --system 2000 --requests 8
    python benchmarks/prefix_cache.py            # a small LLaMA with random weights

Requests with one system prompt and different questions, one after the other, with the cache and
without; then turns of one conversation, each with all earlier ones in its prompt.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("MINDSPEED_DEVICE", "cpu")

SMALL = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", help="hf:DIR or checkpoints (default: random weights)")
    parser.add_argument("--system", type=int, default=1000, help="tokens of the system prompt")
    parser.add_argument("--question", type=int, default=50, help="tokens of each question")
    parser.add_argument("--answer", type=int, default=30, help="new tokens of each answer")
    parser.add_argument("--requests", type=int, default=6, help="requests, and turns")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        generator = _generator(options.load or _small(Path(folder)))
    numbers = random.Random(1)
    texts = [
        [numbers.randrange(1, generator.vocab_size) for _ in range(size)]
        for size in (options.system, *[options.question] * options.requests)
    ]
    print(f"{'':34}{'tokens computed':>16}{'seconds to first tokens':>26}")
    for name, turns in (("one system prompt", False), ("one conversation", True)):
        for cached in (False, True):
            tokens, seconds = measured(generator, texts, options.answer, turns, cached)
            label = f"{name}, {'with' if cached else 'without'} cache"
            print(f"{label:34}{tokens:16,}{seconds:26.2f}")


def measured(
    generator: Any, texts: list[list[int]], answer: int, turns: bool, cached: bool
) -> tuple[int, float]:
    """Prompt tokens that went through the model, and the seconds of all prefills."""
    from mindspeed.inference.continuous_batching import CachedPrompt, ContinuousBatcher
    from mindspeed.inference.prefix_cache import GIB, PrefixCache
    from mindspeed.inference.sampling import SamplingOptions

    batcher = ContinuousBatcher(generator, PrefixCache(4 * GIB) if cached else None)
    options = SamplingOptions(max_new_tokens=answer, min_new_tokens=answer, greedy=True)
    system, *questions = texts
    history, tokens, seconds = system, 0, 0.0
    for question in questions:
        prompt = [*history, *question]
        start = time.perf_counter()
        events = batcher.add("one", [prompt], options)
        seconds += time.perf_counter() - start
        tokens += len(prompt) - sum(e.tokens for e in events if isinstance(e, CachedPrompt))
        new: list[int] = []
        while "one" in batcher:
            new += [chunk.token for _, chunk in batcher.step() if chunk.token is not None]
        if turns:
            history = [*prompt, *new]
    return tokens, seconds


def _generator(source: str) -> Any:
    import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
    from mindspeed.inference.load import Source, load_model
    from mindspeed.inference.text_generator import TextGenerator

    return TextGenerator.of(load_model(Source(source), 1))


def _small(folder: Path) -> str:
    """Write a LLaMA with random weights."""
    import torch
    import transformers

    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    model.save_pretrained(folder)
    return f"hf:{folder}"


if __name__ == "__main__":
    main()
