"""A scripted chat on the ranks."""

from __future__ import annotations

import io
from typing import Any

from mindspeed.inference.sampling import SamplingOptions


def talk(
    folder: str, layout: tuple[int, int], lines: list[str], turns: int | None = None, new: int = 12
) -> Any:
    """What is printed, the messages, and the prompts the model saw."""
    from mindspeed.inference.chat import Chat
    from mindspeed.inference.control import Control
    from mindspeed.inference.conversation import Conversation, template_of, with_stops
    from mindspeed.inference.generator import Generator
    from mindspeed.inference.load import Source, load_model

    tp, pp = layout
    generator = Generator.of(load_model(Source(f"hf:{folder}", tp=tp, pp=pp), tp * pp))
    template = template_of(generator, None)
    conversation = Conversation(generator, template, "be brief", turns)
    prompts: list[str] = []
    ask = conversation.ask

    def recorded(*arguments: Any) -> list[int]:
        tokens = ask(*arguments)
        prompts.append(generator.tokenizer.detokenize(tokens))
        return tokens

    conversation.ask = recorded  # type: ignore[method-assign]
    out = io.StringIO()
    options = with_stops(SamplingOptions(max_new_tokens=new, greedy=True), template)
    control = Control()
    given = iter(lines if control.leads else ["other ranks read nothing"])
    Chat(generator, conversation, options, control, given, out).run()
    return out.getvalue(), conversation.messages, prompts
