"""Scaled rotary embeddings: the frequencies of ``--rope-parameters``.

The flag holds what Hugging Face writes as ``rope_parameters`` (base and rotated part apart, which
have flags of their own), for scalings that Megatron Core does not have:

=========  =========================================================================================
linear     every frequency divided by ``factor`` (Megatron has whole factors)
dynamic    the base grows with the sequence beyond ``original_max_position_embeddings``, or by
           ``alpha`` whatever the sequence (Hunyuan)
yarn       high frequencies kept, low ones divided, a ramp between; sine and cosine times
           ``attention_factor`` (arXiv 2309.00071)
longrope   a divisor for each frequency, other ones beyond ``original_max_position_embeddings``;
           sine and cosine times ``attention_factor`` (arXiv 2402.13753)
llama3     as yarn with another ramp (Megatron has Llama 3.1's numbers)
=========  =========================================================================================
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed.errors import ConfigError
from mindspeed.parsing import parse_json

_NEEDS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
_MORE: Mapping[str, tuple[str, ...]] = {
    # Hunyuan's files have YaRN's numbers, too, which its class passes over.
    "dynamic": ("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "yarn": (
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("factor", "attention_factor"),
}


@dataclass(frozen=True)
class RopeParameters:
    """One scaling; fields as Hugging Face names them, None where its kind has no such number."""

    rope_type: str
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    alpha: float | None = None

    @classmethod
    def read(cls, scaling: Mapping[str, Any], longest: int | None, where: str) -> RopeParameters:
        """Read the keys of a file.

        Args:
            scaling: ``rope_type`` and its numbers.
            longest: ``max_position_embeddings`` of the file, for numbers that follow from it.
            where: Names the keys in messages.

        Raises:
            ConfigError: An unknown kind, a number is missing, or does not belong to the kind.
        """
        kind = str(scaling.get("rope_type"))
        if kind not in _NEEDS:
            raise ConfigError(
                f"{where}.rope_type is {kind!r}; allowed are {', '.join(sorted(_NEEDS))}"
            )
        values = {key: value for key, value in scaling.items() if key not in ("rope_type", "type")}
        original = values.get("original_max_position_embeddings")
        if kind == "dynamic":  # counts from the length that the file calls the longest
            values["original_max_position_embeddings"] = longest
        elif kind == "longrope" and "factor" not in values and longest and original:
            values["factor"] = longest / original
        if missing := [key for key in _NEEDS[kind] if values.get(key) is None]:
            raise ConfigError(f"{where}: {kind} has no {' and no '.join(missing)}")
        allowed = {*_NEEDS[kind], *_MORE.get(kind, ()), "original_max_position_embeddings"}
        if foreign := sorted(values.keys() - allowed):
            raise ConfigError(
                f"{where}.{foreign[0]} is {values[foreign[0]]}; {kind} has no such number"
            )
        if kind == "linear":
            values.pop("original_max_position_embeddings", None)
        if kind == "dynamic":
            values = {k: v for k, v in values.items() if k == "alpha" or k in _NEEDS[kind]}
        for key in ("short_factor", "long_factor"):
            if key in values:
                values[key] = tuple(float(value) for value in values[key])
        return cls(kind, **values)

    @classmethod
    @functools.lru_cache(maxsize=8)
    def of(cls, text: str) -> RopeParameters:
        """Read the value of ``--rope-parameters``.

        Raises:
            ConfigError: It is not JSON, or not a scaling.
        """
        values = parse_json(text, "--rope-parameters")
        if not isinstance(values, dict):
            raise ConfigError(f"--rope-parameters {text}: allowed is a JSON object")
        longest = values.get("original_max_position_embeddings")
        return cls.read(values, longest, "--rope-parameters")

    def keys(self) -> dict[str, Any]:
        """The keys of a file, without those that its kind does not have."""
        values = {
            key: value for key, value in dataclasses.asdict(self).items() if value is not None
        }
        if self.rope_type == "dynamic":  # the file's max_position_embeddings says it
            del values["original_max_position_embeddings"]
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def text(self) -> str:
        """The value of ``--rope-parameters``."""
        length = self.original_max_position_embeddings
        given = {} if length is None else {"original_max_position_embeddings": length}
        return json.dumps({**self.keys(), **given})

    @property
    def scale(self) -> float:
        """Factor on sine and cosine."""
        if self.rope_type not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        factor = self.factor or 1.0
        if self.rope_type == "longrope":
            length = self.original_max_position_embeddings or 1
            return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
        if self.mscale and self.mscale_all_dim:
            return _yarn_scale(factor, self.mscale) / _yarn_scale(factor, self.mscale_all_dim)
        return _yarn_scale(factor, 1.0)

    @property
    def depends_on_length(self) -> bool:
        """Whether the angle of a position depends on the length of the whole text."""
        return self.rope_type == "longrope" or (self.rope_type == "dynamic" and not self.alpha)

    def frequencies(self, base: float, channels: int, length: int) -> torch.Tensor:
        """Radians per position of each pair of channels.

        Args:
            base: ``--rotary-base``.
            channels: Rotated channels of a head.
            length: Tokens of the sequence, of all ranks.

        Returns:
            fp32 ``[channels / 2]``, on the CPU.

        Raises:
            ConfigError: longrope has another number of divisors.
        """
        exponents = torch.arange(0, channels, 2, dtype=torch.float32) / channels
        factor, original = self.factor or 1.0, self.original_max_position_embeddings or 1
        if self.rope_type == "dynamic":
            grown = self.alpha or factor * max(length, original) / original - (factor - 1)
            base = base * grown ** (channels / (channels - 2))
        plain = 1.0 / base**exponents
        if self.rope_type == "linear":
            return plain / factor
        if self.rope_type == "longrope":
            divisors = (self.long_factor if length > original else self.short_factor) or ()
            if len(divisors) != len(plain):
                raise ConfigError(
                    f"longrope has {len(divisors)} divisors for {len(plain)} pairs of rotated "
                    "channels"
                )
            return 1.0 / (torch.tensor(divisors) * base**exponents)
        if self.rope_type == "yarn":
            return self._yarn(plain, base, channels)
        return self._llama3(plain) if self.rope_type == "llama3" else plain

    def _yarn(self, plain: torch.Tensor, base: float, channels: int) -> torch.Tensor:
        """Divided by ``factor`` from ``beta_slow`` turns in the original length downwards."""
        assert self.factor is not None and self.original_max_position_embeddings is not None

        def pair(turns: float) -> float:
            length = self.original_max_position_embeddings or 1
            return channels * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

        first, last = pair(self.beta_fast or 32), pair(self.beta_slow or 1)
        if self.truncate is None or self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, channels - 1)
        if first == last:
            last += 0.001
        ramp = ((torch.arange(channels // 2, dtype=torch.float32) - first) / (last - first)).clamp(
            0, 1
        )
        return plain / self.factor * ramp + plain * (1 - ramp)

    def _llama3(self, plain: torch.Tensor) -> torch.Tensor:
        """Divided by ``factor`` where a turn takes longer than the original length allows."""
        assert self.factor and self.low_freq_factor is not None and self.high_freq_factor
        length = self.original_max_position_embeddings or 1
        turns = length * plain / (2 * math.pi)  # within the original length
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * plain / self.factor + kept * plain


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 1.0 + 0.1 * mscale * math.log(factor)
