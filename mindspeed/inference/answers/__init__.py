"""Answers of a chat model, read while they are written; ``chat``, ``generate`` and ``serve`` do.

question      a conversation -> the prompt, what ends its answer and what reads it
call_formats  how models write reasoning and calls of tools, as data
parser        text -> parts: reasoning, content, calls (call_readers, harmony)
parts         the parts, and the message that they add up to
"""
