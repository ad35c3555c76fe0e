"""Grammars that an answer must follow: a JSON schema or a regular expression, by llguidance.

    schema or expression --compile, once--> matcher --copy--> matcher of one sequence
                                                              mask: the tokens that may come next

The mask sets the logits of all other tokens to -inf before a token is chosen. When the grammar has
ended, an end token is the only one that may come.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from mindspeed.errors import ConfigError
from mindspeed.inference.sampling import Constraint
from mindspeed.parsing import parse_json

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Compiles grammars for the vocabulary of a model."""

    def __init__(self) -> None:
        self._tokenizer: Any = None
        self._compiled = functools.lru_cache(64)(self._compile)

    def matcher(self, generator: Any, constraint: Constraint, eos: Collection[int]) -> Matcher:
        """The matcher of a new sequence.

        Args:
            generator: A :class:`~.text_generator.TextGenerator`, always the same.
            constraint: What the answer must be.
            eos: Ids that end a text.

        Raises:
            ConfigError: llguidance is not installed, or the constraint is not valid.
        """
        try:
            import llguidance
        except ImportError as error:
            raise ConfigError(
                "answers by a schema or an expression need the package llguidance: "
                "pip install 'mindspeed[grammar]'"
            ) from error
        if not eos:
            raise ConfigError("a grammar needs an end token, and the model has none")
        if self._tokenizer is None:
            vocabulary = llguidance.TokenizerWrapper(_Vocabulary(generator, min(eos)))
            self._tokenizer = llguidance.LLTokenizer(vocabulary)
        return Matcher(self._compiled(constraint).deep_copy(), eos)

    def _compile(self, constraint: Constraint) -> Any:
        from llguidance import LLMatcher

        if constraint.kind == "regex":
            grammar = LLMatcher.grammar_from_regex(constraint.text)
        else:
            schema = {"type": "object"}
            if constraint.kind == "json_schema":
                schema = _closed(parse_json(constraint.text, constraint.kind))
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_LAYOUT)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            reason = " ".join(matcher.get_error().partition("\n1 |")[0].split())
            raise ConfigError(f"{constraint.kind}: {reason:.300}: {constraint.text:.80}")
        return matcher


class _Vocabulary:
    """What llguidance reads of a tokenizer: the bytes of every token; special ones have none."""

    def __init__(self, generator: Any, eos: int) -> None:
        self.eos_token_id, self.bos_token_id = eos, None
        self.tokens = [generator.token_bytes(token) for token in range(generator.vocab_size)]
        self.special_token_ids = [t for t, content in enumerate(self.tokens) if not content]
        self.tokens = [c or b"\xff<%d>" % t for t, c in enumerate(self.tokens)]
        self._tokenize = generator.tokenizer.tokenize

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text."""
        if not isinstance(text, str):
            raise TypeError("a text is expected")  # llguidance tries bytes first
        return list(self._tokenize(text))


def _closed(schema: Any) -> Any:
    """A schema whose objects have only the properties that it names, if it does not say more."""
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(name), dict):
            found[name] = {key: _closed(value) for key, value in schema[name].items()}
    for name in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(schema.get(name), list):
            found[name] = [_closed(part) for part in schema[name]]
    found |= {"items": _closed(schema["items"])} if "items" in schema else {}
    if "properties" in schema and "patternProperties" not in schema:
        found.setdefault("additionalProperties", False)
    return found


class Matcher:
    """The state of one sequence in its grammar."""

    def __init__(self, matcher: Any, eos: Collection[int]) -> None:
        self._matcher, self._eos = matcher, sorted(eos)

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        """``scores`` ``[v]``, with -inf for tokens that may not come next."""
        bits = np.unpackbits(
            np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little"
        )
        allowed = torch.from_numpy(bits[: len(scores)]).bool()
        allowed[self._eos] = self._matcher.is_accepting() or not allowed.any()
        return scores.masked_fill(~allowed.to(scores.device), float("-inf"))

    def accept(self, token: int) -> None:
        """The sequence goes on with this token."""
        self._matcher.consume_token(token)


def mask_all(scores: torch.Tensor, matchers: Any) -> torch.Tensor:
    """``scores`` ``[b, v]``, each by its matcher, if it has one."""
    rows = [
        row if matcher is None else matcher.mask(row)
        for row, matcher in zip(scores, matchers, strict=True)
    ]
    return torch.stack(rows)
