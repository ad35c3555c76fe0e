"""Grammars that an answer must follow: a JSON schema or a regular expression, by xgrammar.

    schema or expression --compile, once--> grammar --copy--> matcher of one sequence
                                                              mask: the tokens that may come next

The mask sets the logits of all other tokens to -inf before a token is chosen. When the grammar has
ended, an end token is the only one that may come.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import torch

from mindspeed.errors import ConfigError
from mindspeed.inference.sampling import Constraint


class Grammars:
    """Compiles grammars for the vocabulary of a model."""

    def __init__(self) -> None:
        self._compiler: Any = None

    def matcher(self, generator: Any, constraint: Constraint, eos: Collection[int]) -> Matcher:
        """The matcher of a new sequence.

        Args:
            generator: A :class:`~.text_generator.TextGenerator`, always the same.
            constraint: What the answer must be.
            eos: Ids that end a text.

        Raises:
            ConfigError: xgrammar is not installed, or the constraint is not valid.
        """
        try:
            import xgrammar
        except ImportError as error:
            raise ConfigError(
                "answers by a schema or an expression need the package xgrammar: "
                "pip install 'mindspeed[grammar]'"
            ) from error
        if not eos:
            raise ConfigError("a grammar needs an end token, and the model has none")
        size = generator.vocab_size
        if self._compiler is None:
            tokens = [generator.token_bytes(token) for token in range(size)]
            info = xgrammar.TokenizerInfo(
                tokens, vocab_size=size, stop_token_ids=sorted(generator.eos)
            )
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        try:
            found = self._compile(constraint)
        except RuntimeError as error:
            reason = str(error).strip().rpartition(": ")[2]
            raise ConfigError(f"{constraint.kind}: {reason}: {constraint.text:.80}") from error
        inner = xgrammar.GrammarMatcher(found, override_stop_tokens=sorted(eos))
        return Matcher(inner, xgrammar.allocate_token_bitmask(1, size))

    def _compile(self, constraint: Constraint) -> Any:
        if constraint.kind == "regex":
            return self._compiler.compile_regex(constraint.text)
        if constraint.kind == "json_object":
            schema = json.dumps({"type": "object"})
            return self._compiler.compile_json_schema(
                schema, any_whitespace=False, strict_mode=False
            )
        return self._compiler.compile_json_schema(constraint.text, any_whitespace=False)


class Matcher:
    """Where one sequence is in its grammar."""

    def __init__(self, matcher: Any, bits: torch.Tensor) -> None:
        self._matcher, self._bits = matcher, bits

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        """``scores`` ``[v]``, with -inf for tokens that may not come next."""
        self._matcher.fill_next_token_bitmask(self._bits)
        bits = self._bits[0, :, None] >> torch.arange(32, dtype=torch.int32) & 1
        allowed = bits.flatten()[: len(scores)].bool().to(scores.device)
        return scores.masked_fill(~allowed, float("-inf"))

    def accept(self, token: int) -> None:
        """The sequence goes on with this token."""
        self._matcher.accept_token(token)


def mask_all(scores: torch.Tensor, matchers: Any) -> torch.Tensor:
    """``scores`` ``[b, v]``, each by its matcher, if it has one."""
    rows = [
        row if matcher is None else matcher.mask(row)
        for row, matcher in zip(scores, matchers, strict=True)
    ]
    return torch.stack(rows)
