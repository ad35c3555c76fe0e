"""Logits of a model whose weights are stored in fewer bits, on the ranks."""

from __future__ import annotations

from typing import Any


def compared(folder: str, adapter: str | None, tp: int, form: str) -> dict[str, Any]:
    """Logits with stored weights and with their values, bytes of both, and a stored text."""
    import torch

    from mindspeed.inference.decoder import Decoder
    from mindspeed.inference.load import Source, load_model
    from mindspeed.inference.sampling import SamplingOptions
    from mindspeed.inference.text_generator import TextGenerator
    from mindspeed.te.quantized_weight import QuantizedWeight, replace

    loaded = load_model(Source(f"hf:{folder}", tp=tp, lora=adapter, base_weights=form), tp)
    generator = TextGenerator.of(loaded)
    tokens = torch.tensor([[5, 17, 8, 33, 61, 9, 70, 3]])
    options = SamplingOptions(max_new_tokens=6, greedy=True)

    def run() -> Any:
        with torch.inference_mode():
            logits = Decoder(generator.stage, generator.groups, 1, 16).all_positions(tokens)
        [[text]] = generator.generate([tokens[0].tolist()], options)
        return logits, text.tokens

    stored = run()
    owners = [
        (module, weight)
        for module in generator.stage.modules()
        for weight in module._parameters.values()
        if isinstance(weight, QuantizedWeight)
    ]
    held = sum(part.nbytes for _, weight in owners for part in weight.parts)
    numbers = sum(weight.numel() for _, weight in owners)
    for module, weight in owners:
        replace(module, weight, weight.dense(weight.dtype))
    return {"stored": stored, "plain": run(), "bits": 8 * held / numbers, "weights": len(owners)}
