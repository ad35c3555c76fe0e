"""Fractions of data sets with weights, for ``--train-weighted-split-paths`` and related flags.

    --train-weighted-split-paths "TRAIN: 0.7 0:0.9 data/books, 0.3 0:1 data/code"
    --valid-weighted-split-paths "VALID: 1 0.9:1 data/books"

is BigScience's notation: 70 % of the training samples come from the first nine tenths of the
documents of ``data/books``, and validation uses the remaining tenth. Megatron Core blends data sets
with weights, but uses them completely or splits all at the same fractions (``--split``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed.errors import ConfigError

_PART = re.compile(r"(?P<weight>\S+)\s+(?P<start>[^\s:]+):(?P<end>[^\s:]+)\s+(?P<prefix>\S.*)")


@dataclass(frozen=True)
class WeightedSplit:
    """The documents of a data set from fraction ``start`` to ``end``, and their weight."""

    prefix: str
    weight: float
    start: float
    end: float


def parse(flag: str, groups: Sequence[str]) -> list[WeightedSplit]:
    """Parse the single group of a flag.

    Raises:
        ConfigError: the message names the flag and the invalid part.
    """
    form = f"{flag} {' '.join(map(repr, groups))}"
    if len(groups) != 1:
        raise ConfigError(
            f"{form}: one group is expected, in one pair of quotes; evaluate several validation "
            "sets in separate runs"
        )
    name, colon, rest = groups[0].partition(": ")
    parts = [_part(form, text.strip()) for text in (rest if colon else name).split(",")]
    prefixes = [part.prefix for part in parts]
    if len(set(prefixes)) != len(prefixes):
        raise ConfigError(f"{form}: a data set occurs twice; give it once, with one START:END")
    return parts


def _part(form: str, text: str) -> WeightedSplit:
    found = _PART.fullmatch(text)
    try:
        assert found is not None
        weight, start, end = (float(found[name]) for name in ("weight", "start", "end"))
    except (AssertionError, ValueError):
        raise ConfigError(
            f"{form}: {text!r} is not WEIGHT START:END PREFIX, such as 0.5 0:0.9 data/books"
        ) from None
    if weight <= 0 or not 0 <= start < end <= 1:
        raise ConfigError(
            f"{form}: {text!r} needs a weight above 0 and 0 <= START < END <= 1, fractions of the "
            "documents"
        )
    return WeightedSplit(found["prefix"].strip(), weight, start, end)
