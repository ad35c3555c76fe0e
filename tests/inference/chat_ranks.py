"""A scripted chat on the ranks."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from mindspeed.inference.sampling import SamplingOptions
from tests.support import commands_job


def talk(
    folder: str, layout: tuple[int, int], lines: list[str], turns: int | None = None, new: int = 12
) -> Any:
    """Printed text, messages, and the prompts given to the model."""
    from mindspeed.inference.chat import Chat
    from mindspeed.inference.conversation import Conversation, template_of
    from mindspeed.inference.load import Source, load_model
    from mindspeed.inference.parallel_groups import Rank0Broadcast
    from mindspeed.inference.text_generator import TextGenerator

    tp, pp = layout
    generator = TextGenerator.of(load_model(Source(f"hf:{folder}", tp=tp, pp=pp), tp * pp))
    template = template_of(generator, None)
    conversation = Conversation(generator, template, "be brief", turns)
    prompts: list[str] = []
    add_user_message = conversation.add_user_message

    def recorded(*arguments: Any) -> Any:
        tokens, question = add_user_message(*arguments)
        prompts.append(generator.tokenizer.detokenize(tokens))
        return tokens, question

    conversation.add_user_message = recorded  # type: ignore[method-assign]
    out = io.StringIO()
    options = SamplingOptions(max_new_tokens=new, greedy=True)
    control = Rank0Broadcast()
    given = iter(lines if control.is_source else ["other ranks read nothing"])
    Chat(generator, conversation, options, control, given, out).run()
    return out.getvalue(), conversation.messages, prompts


def piped(words: Sequence[str], text: str) -> tuple[int, str, str]:
    """:func:`tests.support.commands_job.run` of a command that reads a text from a pipe."""
    read, write = os.pipe()
    os.write(write, text.encode())
    os.close(write)
    os.dup2(read, 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (lives as long as the process)
    return commands_job.run(words)
