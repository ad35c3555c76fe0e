"""Converts a user-defined mask to a :class:`Mask`, so that no ``[s, s]`` tensor is kept or sent.

    as_mask(mask, size)      accepted forms                                         memory
    ------------------       --------------------------------------------------------------
    regions                  rectangles with a diagonal band, disjoint              theirs
    intervals of keys        ints ``[size, m, 2]``: query i sees ``start <= j < stop``  O(size)
    hidden                   bool ``[size, size]``, True is masked (Megatron's way)  size^2, given
    rule                     ``rule(q, k) -> bool``, True is visible                one strip

Queries with equal intervals, or with intervals that shift along the diagonal, become one region, so
a causal mask, a window or documents are recognised as a few regions.

    set_attention_mask(lambda q, k: (k <= q) & ((q // 4096 == k // 4096) | (k < 64)))

is one mask for all layers and micro-batches of the process, converted once. Set it before training,
the same on all ranks. It must not change between micro-batches, because a recomputed layer would
then use a later mask than its forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from mindspeed.attention.mask import INF, Mask, Region
from mindspeed.device.host_tensors import with_values
from mindspeed.errors import ConfigError
from mindspeed.ops.visibility import causal_mask

Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
UserMask = Mask | Sequence[Region] | torch.Tensor | Rule

MAX_INTERVALS, LONG = 4, 32768
"""Largest number of key intervals of a query in a mask of more than ``LONG`` positions."""

_STRIP, _TILE = 1 << 24, 4096
"""Pairs converted at a time, and keys in one call of a rule."""


@with_values
def as_mask(given: UserMask, size: int, sample: int = 0) -> Mask:
    """Convert the mask of one sample.

    Args:
        given: One of the forms above (tensors: bool ``[s, s]`` or integer ``[s, m, 2]``); a
            mask is returned unchanged.
        size: Positions of the sample.
        sample: Its index in the batch, for messages.

    Raises:
        ConfigError: Wrong size, overlapping regions, a query without a key, or an unknown form.
    """
    if isinstance(given, Mask):
        mask = given
    elif isinstance(given, torch.Tensor):
        mask = _of_intervals(given) if _is_intervals(given) else _of_hidden(given)
    elif callable(given):
        mask = _of_rule(given, size)
    elif isinstance(given, Sequence) and all(len(region) in (4, 6) for region in given):
        return _complete(Mask.of_regions(size, [Region(*region) for region in given]), sample)
    else:
        raise ConfigError(f"attention mask: {type(given).__name__} is not one of {ACCEPTED}")
    if mask.size != size:
        raise ConfigError(f"attention mask is of {mask.size} positions, a sample has {size}")
    return _complete(mask, sample)


ACCEPTED = (
    "regions (q0, q1, k0, k1, lo, hi), a bool tensor [s, s] (True is masked), an int tensor of "
    "intervals of visible keys [s, m, 2], a callable (q, k) -> bool tensor (True is visible)"
)


def _complete(mask: Mask, sample: int) -> Mask:
    if (row := mask.row_without_keys()) is not None:
        raise ConfigError(f"mask row {row} of sample {sample} has no visible key")
    return mask


def _is_intervals(given: torch.Tensor) -> bool:
    return given.dim() == 3 and given.shape[-1] == 2 and not given.dtype.is_floating_point


def _of_intervals(given: torch.Tensor) -> Mask:
    size, most, _ = given.shape
    starts, stops = np.moveaxis(given.cpu().numpy().astype(np.int64), -1, 0)
    rows = np.broadcast_to(np.arange(size)[:, None], (size, most))
    real = stops > starts
    found = np.stack([rows[real], starts[real], stops[real]])
    found = found[:, np.lexsort(found[1::-1])]
    if ((found[1] < 0) | (found[2] > size)).any():
        raise ConfigError(f"attention mask: an interval leaves the keys 0 to {size}")
    overlap = (found[0, 1:] == found[0, :-1]) & (found[1, 1:] < found[2, :-1])
    if overlap.any():
        row = found[0, 1:][overlap][0]
        raise ConfigError(f"mask row {row}: its intervals of keys overlap")
    return Mask(size, _regions(found, size))


def _of_hidden(given: torch.Tensor) -> Mask:
    if given.dtype != torch.bool or given.dim() != 2 or given.shape[0] != given.shape[1]:
        raise ConfigError(
            "attention mask: expected a bool tensor [s, s], True is masked, got "
            f"{str(given.dtype).removeprefix('torch.')} of shape {tuple(given.shape)}"
        )
    size = given.shape[0]
    rows = max(_STRIP // max(size, 1), 1)
    strips = (~given[first : first + rows] for first in range(0, size, rows))
    return _of_strips(strips, size, "a callable (q, k) -> bool tensor has no such limit")


def _of_rule(rule: Rule, size: int) -> Mask:
    def strips() -> Iterator[torch.Tensor]:
        rows = max(_STRIP // max(size, 1), 1)
        for first in range(0, size, rows):
            queries = torch.arange(first, min(first + rows, size))[:, None]
            yield torch.cat([part(queries, first_key) for first_key in range(0, size, _TILE)], 1)

    def part(queries: torch.Tensor, first: int) -> torch.Tensor:
        keys = torch.arange(first, min(first + _TILE, size))[None]
        seen = rule(queries, keys)
        if not isinstance(seen, torch.Tensor) or seen.dtype != torch.bool:
            raise ConfigError("attention mask: the callable must return a bool tensor")
        return seen.expand(queries.shape[0], keys.shape[1])

    return _of_strips(strips(), size, None)


def _of_strips(strips: Iterable[torch.Tensor], size: int, hint: str | None) -> Mask:
    """Mask from the visibility of consecutive queries ``[rows, size]``; ``hint`` sets the limit."""
    found, first = [np.zeros((3, 0), np.int64)], 0
    for seen in strips:
        padded = F.pad(seen.cpu(), (1, 1))
        edges = (padded[:, 1:] != padded[:, :-1]).nonzero().numpy()
        rows, starts, stops = edges[::2, 0], edges[::2, 1], edges[1::2, 1]
        most = np.bincount(rows, minlength=1)
        if hint is not None and size > LONG and most.max() > MAX_INTERVALS:
            raise ConfigError(
                f"mask row {first + most.argmax()} has {most.max()} intervals of visible keys; a "
                f"mask of more than {LONG} positions may have {MAX_INTERVALS}: {hint}"
            )
        found.append(np.stack([rows + first, starts, stops]))
        first += seen.shape[0]
    return Mask(size, _regions(np.concatenate(found, 1), size))


_MOVES = ((0, 1), (1, 1), (0, 0), (1, 0))
"""Shifts of start and stop of an interval from one query of a region to the next."""


def _regions(found: np.ndarray, size: int) -> tuple[Region, ...]:
    """Regions of sorted disjoint intervals ``[3, m]``: query, start, stop."""
    chains = [_chains(found, *move) for move in _MOVES]
    lengths = np.stack([np.bincount(chain)[chain] for chain in chains]) if found.size else None
    if lengths is None:
        return ()
    best = lengths.argmax(0)
    regions: list[Region] = []
    for number, (start, stop) in enumerate(_MOVES):
        mine = found[:, best == number]
        chain = _chains(mine, start, stop)
        order = np.lexsort((mine[0], chain))
        firsts = np.flatnonzero(np.diff(chain[order], prepend=-1))
        lasts = np.flatnonzero(np.diff(chain[order], append=-1))
        for first, last in zip(firsts, lasts, strict=True):
            row, k0, stop_first = (int(x) for x in mine[:, order[first]])
            end, _, k1 = (int(x) for x in mine[:, order[last]])
            lo, hi = k0 - row if start else -INF, stop_first - 1 - row if stop else INF
            region = Region(row, end + 1, k0, k1, lo, hi).crop(0, size, 0, size)
            assert region is not None
            regions.append(region)
    return tuple(_joined(sorted(regions)))


def _chains(found: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Number of each interval's chain: consecutive queries whose ends shift like this."""
    rows = found[0]
    line = np.stack([rows, found[2] - stop * rows, found[1] - start * rows])
    order = np.lexsort(line)
    step = np.diff(line[:, order], axis=1, prepend=-2)
    chain = np.empty(len(rows), np.int64)
    chain[order] = np.cumsum((step[0] != 1) | (step[1] != 0) | (step[2] != 0)) - 1
    return chain


def _joined(regions: Iterable[Region]) -> Iterator[Region]:
    """Join consecutive regions that together are one band, such as the two ends of a window."""
    last: Region | None = None
    for region in regions:
        both = None if last is None else _together(last, region)
        if last is not None and both is None:
            yield last
        last = both or region
    if last is not None:
        yield last


def _together(above: Region, below: Region) -> Region | None:
    if above.q1 != below.q0:
        return None
    rectangle = Region(
        above.q0, below.q1, min(above.k0, below.k0), max(above.k1, below.k1)
    )  # fmt: skip
    for lo in {above.lo, below.lo}:
        for hi in {above.hi, below.hi}:
            both = rectangle._replace(lo=lo, hi=hi)
            if _covers(both, above) and _covers(both, below):
                return both.crop(both.q0, both.q1, both.k0, both.k1)
    return None


def _covers(band: Region, part: Region) -> bool:
    """Whether ``part`` is exactly ``band`` restricted to the queries of ``part``."""
    rows = band._replace(q0=part.q0, q1=part.q1)
    both = rows._replace(lo=max(band.lo, part.lo), hi=min(band.hi, part.hi)).crop(*part[:4])
    return both is not None and both.area() == part.area() == rows.area()


_given: UserMask | None = None
_of_samples: tuple[UserMask, ...] = ()  # one, or one for each sample


def set_attention_mask(mask: UserMask | None) -> None:
    """Set the mask of all layers; None removes it.

    Needs ``--attention-mask-type general``.

    Args:
        mask: Any form of :func:`~mindspeed.attention.user_mask.as_mask`, or a bool tensor
            ``[b, 1, s, s]`` (True is masked), a mask for each sample of a micro-batch.

    Raises:
        ConfigError: A tensor is not a mask, or a query sees no key.
    """
    global _given, _of_samples
    samples: list[UserMask] = [] if mask is None else [mask]
    if isinstance(mask, torch.Tensor):
        each = mask.flatten(0, 1) if mask.dim() == 4 and mask.shape[1] == 1 else [mask]
        samples = [as_mask(one, len(one), number) for number, one in enumerate(each)]
    _given, _of_samples = mask, tuple(samples)
    mask_of_batch.cache_clear()


def get_attention_mask(device: torch.device | str = "cpu") -> UserMask:
    """The mask that was set, else the compressed causal mask on ``device``."""
    return causal_mask(device) if _given is None else _given


@functools.lru_cache(maxsize=8)
def mask_of_batch(length: int, samples: int) -> Mask | None:
    """The mask that was set, for the concatenated samples of a micro-batch; None if none was.

    Raises:
        ConfigError: It has another length or another number of samples.
    """
    if not _of_samples:
        return None
    if len(_of_samples) not in (1, samples):
        raise ConfigError(
            f"attention mask is of {len(_of_samples)} samples, the micro-batch has {samples}"
        )
    masks = [as_mask(one, length, number) for number, one in enumerate(_of_samples)]
    return Mask.batch(masks * samples if len(masks) == 1 else masks)
