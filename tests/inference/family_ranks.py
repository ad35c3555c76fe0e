"""Generation on the ranks with the tiny models of every family."""

from __future__ import annotations

from typing import Any

from mindspeed.inference.sampling import SamplingOptions
from tests.support.lazy import Lazy
from tests.support.tiny import VOCAB

beam_search = Lazy("mindspeed.inference.beam_search", "beam_search")
Decoder = Lazy("mindspeed.inference.decoder", "Decoder")
ModelParallelGroups = Lazy("mindspeed.inference.generate", "ModelParallelGroups")
decode_steps = Lazy("mindspeed.inference.generate", "decode_steps")
generate = Lazy("mindspeed.inference.generate", "generate")
Source = Lazy("mindspeed.inference.load", "Source")
load_model = Lazy("mindspeed.inference.load", "load_model")


def generated(folder: str, layout: tuple[int, int], prompts: Any, jobs: Any) -> list[Any]:
    """The results of several ``(options, eos)`` with one model on (TP, PP)."""
    stage, groups = _stage(folder, *layout)
    common = {"groups": groups, "vocab_size": VOCAB}
    results: list[Any] = []
    for options, eos in jobs:
        if options.num_return_sequences > 1 == options.num_beams:
            rows: list[list[int]] = [[] for _ in range(len(prompts) * options.num_return_sequences)]
            for step in decode_steps(stage, prompts, options, eos=eos or (), **common):
                for row, token in step.tokens.items():
                    rows[row].append(token)
            results.append(rows)
            continue
        if options.num_beams == 1:
            results.append(generate(stage, prompts, options, eod=eos, **common))
            continue
        found = beam_search(stage, prompts, options, eos=eos, **common)
        results.append([[(list(h.tokens), h.score) for h in row] for row in found])
    return results


def logits_both_ways(folder: str, tokens: Any, prompt: int) -> Any:
    """Logits after every position from ``prompt`` on: with the KV cache, and without."""
    import torch

    stage, groups = _stage(folder)
    both = []
    with torch.inference_mode():
        for recompute in (False, True):
            decoder = Decoder(stage, groups, *tokens.shape, recompute=recompute)
            steps = [tokens[:, :prompt], *tokens[:, prompt:].split(1, dim=1)]
            both.append([decoder(step) for step in steps])
    return None if both[0][0] is None else [torch.stack(found)[..., :VOCAB] for found in both]


def _stage(folder: str, tp: int = 1, pp: int = 1) -> Any:
    loaded = load_model(Source(f"hf:{folder}", tp=tp, pp=pp), tp * pp)
    return loaded.stage, ModelParallelGroups.of_megatron()


GREEDY = SamplingOptions(max_new_tokens=8, greedy=True)
