"""Texts by a schema or an expression on every rank."""

from __future__ import annotations

from typing import Any


def texts(folder: str, tp: int, prompts: list[str], options: list[dict[str, Any]]) -> Any:
    """Of each options the texts of all prompts, together, and of the first alone."""
    from mindspeed.inference.load import Source, load_model
    from mindspeed.inference.sampling import Constraint, SamplingOptions
    from mindspeed.inference.text_generator import TextGenerator

    generator = TextGenerator.of(load_model(Source(f"hf:{folder}", tp=tp), tp))
    found: list[Any] = []
    for given in options:
        try:
            made = SamplingOptions(**{**given, "constraint": Constraint(*given["constraint"])})
            together = generator.generate(prompts, made)
            alone = generator.generate(prompts[:1], made)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
            continue
        found.append([[c.text for c in one] for one in (*together, *alone)])
    return found
