"""Digests of tensors that do not depend on how ranks share them: those of shards add up.

A tensor is seen as ``[rows, columns]``, in :data:`BLOCKS` blocks of rows. Of each block:

    sketch   K numbers: sum of r_k(i) * c_k(j) * x_ij, r and c = +-1 from a hash of the GLOBAL
             indices. Linear, so ``sketch(a) - sketch(b)`` is that of ``a - b``, and its mean square
             estimates ``||a - b||^2``: the distance of two runs without the values
    others   sum, sum of squares, number of values that are not finite; largest magnitude

The signs of columns are ``c_k(j) = h(j div 127) g_k(j mod 127)``: on a CPU, groups of 127 columns
are added with the signs h first, in the time of reading them, and what is left is a product with
127 columns. So a sketch is four times cheaper than with 16 products for each value, and estimates
as well as 14 independent ones. 127, a prime: no two heads, shards or halves of a tensor lie a
multiple of it apart, whose exchange half of the signs would not see.

The exact digest is a sum modulo 2^64 of the values' bits, as many as fit into words of 64, times
odd numbers from hashes of the indices: a single changed bit always changes it. Both need numbers of
rows and of columns only, which are computed once for each place and kept.

A piece is read from memory once: by functions in C, or where these are missing by operators, of
some rows at a time while these are in the caches.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import torch

from mindspeed.compare import digest_rows
from mindspeed.compare.digest_rows import GROUP

SKETCHES = 16
BLOCKS = 8
SUM, SQUARES, LARGEST, NOT_FINITE = range(SKETCHES, SKETCHES + 4)
WIDTH = SKETCHES + 4
_AT_ONCE = 1 << 19  # elements
SAMPLES = 16
"""Elements whose values the level ``sample`` keeps."""
SMALL = 1 << 14
"""Elements of a piece whose sketch is computed in fp64."""
SKETCH_ERROR = 4 * 2.0**-24
"""Of the sketch of a larger fp32 tensor, relative to its norm, for any number of columns."""
_IN_C = 1 << 17  # elements that are worth building a library
_TERMS = 254  # added in fp32; more lose what rounding of fp32 values is compared with
_WORDS_AT_ONCE = 1 << 17
_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class Elements:
    """Elements of the whole tensor that a piece holds: all pairs of its rows and columns.

    Attributes:
        shape: Rows and columns of the whole tensor.
        rows: Global row of each row of the piece, int64 on the host.
        columns: Global column of each column.
        sparse: The whole tensor has some of its rows only, as the tokens of an expert.
        partial: Pieces at one place are no copies but terms of a sum.
    """

    shape: tuple[int, int]
    rows: torch.Tensor
    columns: torch.Tensor
    sparse: bool = False
    partial: bool = False

    @functools.cached_property
    def identity(self) -> str:
        """Equal for pieces that hold the same elements: copies."""
        text = hashlib.sha1(repr(self.shape).encode())
        for index in (self.rows, self.columns):
            text.update(index.numpy().tobytes())
        return text.hexdigest()[:16]

    @functools.cached_property
    def count(self) -> int:
        """Number of elements."""
        return len(self.rows) * len(self.columns)

    @functools.cached_property
    def sampled(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Elements of the sample in this piece ``[n]``: number in it, own row and column."""
        rows, columns = sample_of(self.shape)
        own = [
            (which, int(row[0]), int(column[0]))
            for which in range(SAMPLES)
            if len(row := (self.rows == rows[which]).nonzero())
            and len(column := (self.columns == columns[which]).nonzero())
        ]
        numbers = torch.tensor(own, dtype=torch.int64).view(-1, 3)
        return numbers[:, 0], numbers[:, 1], numbers[:, 2]

    def on(self, device: torch.device) -> _Signs:
        """The signs of its rows and columns, on a device."""
        found = self._signs.get(device)
        if found is None:
            found = self._signs[device] = self._signs_on(device)
        return found

    @functools.cached_property
    def _signs(self) -> dict[torch.device, _Signs]:
        return {}

    def _signs_on(self, device: torch.device) -> _Signs:
        wide = torch.float32 if device.type == "npu" else torch.float64
        blocks = (self.rows * BLOCKS).div(max(self.shape[0], 1), rounding_mode="floor")
        columns = _signs(self.columns % GROUP, 2) * _group_signs(self.columns // GROUP)[:, None]
        rows = torch.cat([_signs(self.rows, 1), torch.ones(len(self.rows), 2)], 1)
        members = torch.nn.functional.one_hot(blocks, BLOCKS).t().contiguous()
        return _Signs(
            columns.to(device),
            rows.to(device, wide),
            members.to(device, wide),
            wide,
            int(self.columns[0]) % GROUP if len(self.columns) else 0,
            self._groups,
        )

    @property
    def _groups(self) -> torch.Tensor | None:
        """The signs of the groups of columns; None if these are few or scattered."""
        if len(self.columns) < 3 * GROUP or not self._consecutive:
            return None
        first, last = int(self.columns[0]), int(self.columns[-1])
        return _group_signs(torch.arange(first // GROUP, last // GROUP + 1))

    @functools.cached_property
    def _consecutive(self) -> bool:
        count = len(self.columns)
        return count > 0 and torch.equal(self.columns, torch.arange(count) + self.columns[0])

    def factors(self, device: torch.device, size: int) -> _Factors:
        """The numbers of the exact digest of values of ``size`` bytes, on a device."""
        found = self._factors.get((device, size))
        if found is None:
            each = 8 // size
            whole = self._consecutive and not any(
                int(end) % each for end in (self.columns[0], len(self.columns))
            )
            rows = mixed(self.rows, 3) | 1
            columns = (mixed(self.columns // each, 4) | 1) << (self.columns % each * 8 * size)
            if whole:
                columns = columns[::each].contiguous()
            found = _Factors(rows.to(device), columns.to(device), whole)
            self._factors[device, size] = found
        return found

    @functools.cached_property
    def _factors(self) -> dict[tuple[torch.device, int], _Factors]:
        return {}


@dataclass(frozen=True)
class _Signs:
    columns: torch.Tensor  # [columns, K] fp32
    rows: torch.Tensor  # [rows, K + 2]; the last columns are ones, for sums and squares
    blocks: torch.Tensor  # [BLOCKS, rows]: 1 where a row is in a block
    wide: torch.dtype
    first: int  # place of the first column in its group
    groups: torch.Tensor | None  # [groups] fp32, on the host: of consecutive columns


@dataclass(frozen=True)
class _Factors:
    rows: torch.Tensor  # [rows] int64, odd
    columns: torch.Tensor  # [columns] int64: odd, times the place of a value in its word; [words]
    words: bool  # the columns are whole words, which are multiplied as such


def sample_of(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements that are sampled of a tensor of this shape in every layout.

    Returns:
        Rows and columns: ``[SAMPLES]`` int64 each; small tensors have some twice.
    """
    numbers = torch.arange(SAMPLES)
    return tuple(  # type: ignore[return-value]
        (mixed(numbers, seed) >> 1) % max(size, 1) for size, seed in zip(shape, (6, 7), strict=True)
    )


def whole(rows: int, columns: int = 1) -> Elements:
    """The place of a tensor that a rank holds whole."""
    return Elements((rows, columns), torch.arange(rows), torch.arange(columns))


def digest(x: torch.Tensor, place: Elements) -> torch.Tensor:
    """Digest of a piece.

    Args:
        x: ``[rows, columns]`` of the piece, any dtype.
        place: where they are in the whole tensor.

    Returns:
        ``[BLOCKS, WIDTH]`` fp64 (fp32 where a device has no fp64), on the device of ``x``. The
        largest magnitude is that of the piece, in the first block.
    """
    return _digests(x, place, None)[0]


def digest_and_exact(x: torch.Tensor, place: Elements) -> tuple[torch.Tensor, torch.Tensor]:
    """Digest of a piece as of :func:`digest`, and the exact one: int64 ``[]``; -0 counts as +0.

    Args:
        x: ``[rows, columns]`` of the piece, any dtype.
        place: where they are in the whole tensor.
    """
    found, exact = _digests(x, place, place.factors(x.device, x.element_size()))
    assert exact is not None
    return found, exact


def _digests(
    x: torch.Tensor, place: Elements, factors: _Factors | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The digest, and with factors the exact one."""
    x, signs = x.detach(), place.on(x.device)
    found = torch.zeros((BLOCKS, WIDTH), dtype=signs.wide, device=x.device)
    if x.numel() == 0:
        return found, None if factors is None else x.new_zeros((), dtype=torch.int64)
    on_host = x.device.type == "cpu"
    exactly = x.dtype is torch.float64 or not x.is_floating_point() or x.numel() <= SMALL
    large = not exactly and x.numel() >= _IN_C
    in_c = on_host and large and digest_rows.library() is not None
    single = in_c and x.dtype is torch.float32
    groups = signs.groups if in_c else None
    whole = not on_host or (single and groups is not None)
    each, words = [], []
    for part in (x,) if whole else x.split(max(1, _AT_ONCE // x.shape[1])):
        of_part = part.to(signs.wide if exactly else torch.float32)
        if groups is None:
            each.append(_of_rows(of_part, signs))
        else:
            each.append(digest_rows.sums(of_part, signs.first, groups, _place_signs()))
        if factors is not None and single and factors.words:
            words.append(digest_rows.exact(part, factors.columns))
        elif factors is not None:
            words.append(_bits_of_rows(part, factors))
    sums, largest = each[0] if whole else map(torch.cat, zip(*each, strict=True))
    found[:, : SQUARES + 1] = signs.blocks @ sums.mul_(signs.rows)
    found[0, LARGEST] = largest.amax()
    if not on_host or not torch.isfinite(found[0, LARGEST]):
        bad = (~torch.isfinite(x)).sum(1).to(signs.wide)
        found[:, NOT_FINITE] = signs.blocks @ bad
    return found, None if factors is None else (torch.cat(words) * factors.rows).sum()


def _of_rows(x: torch.Tensor, signs: _Signs) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of each row, of products with signs, of values and of squares; largest magnitudes."""
    total = x.sum(1)  # the first to read the values: it does so in the order of memory
    if x.dtype is torch.float64:
        products = x @ signs.columns.to(x.dtype)
    else:
        parts = zip(x.split(_TERMS, 1), signs.columns.split(_TERMS), strict=True)
        products = sum((part @ own).to(signs.wide) for part, own in parts)
    squares = torch.linalg.vector_norm(x, dim=1).to(signs.wide).square()
    sums = torch.cat([products.to(signs.wide), torch.stack([total, squares], 1)], 1)
    return sums, torch.maximum(x.amax(), -x.amin())[None]


@functools.cache
def _place_signs() -> torch.Tensor:
    return _signs(torch.arange(GROUP + 1), 2)


def _bits_of_rows(x: torch.Tensor, factors: _Factors) -> torch.Tensor:
    """``[rows]`` int64: the bits of each row's values times the numbers of their columns."""
    x = x + 0 if x.is_floating_point() else x.clone(memory_format=torch.contiguous_format)
    if factors.words:
        return x.view(torch.int64).mul_(factors.columns).sum(1)
    bits = x.view(_BITS[x.element_size()]).to(torch.int64)
    if x.element_size() < 8:
        bits &= (1 << 8 * x.element_size()) - 1
    return bits.mul_(factors.columns).sum(1)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Digest of the bits of a tensor that is compared on one rank, or with whole copies.

    Four to eight times cheaper than :func:`exact`, but no sum over shards: words of 64 bits times
    odd numbers, so a single changed bit always changes it. Here -0 is not +0.

    Args:
        x: ``[...]``, any dtype.

    Returns:
        An int64 scalar on its device.
    """
    flat = x.detach().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8 or flat.data_ptr() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8
    total = x.new_zeros((), dtype=torch.int64)
    factors = _word_factors(x.device)
    for index, words in enumerate(flat[: 8 * whole].view(torch.int64).split(_WORDS_AT_ONCE)):
        total += (words * factors[: len(words)]).sum() * (2 * index + 1)
    rest = flat[8 * whole :].long()
    if len(rest):
        total += (rest * factors[: len(rest)] * (2 * whole + 3)).sum()
    return total


@functools.lru_cache(maxsize=8)
def _word_factors(device: torch.device) -> torch.Tensor:
    return (mixed(torch.arange(_WORDS_AT_ONCE), 5) | 1).to(device)


def _signs(index: torch.Tensor, seed: int) -> torch.Tensor:
    bits = (mixed(index, seed)[:, None] >> torch.arange(1, SKETCHES + 1)) & 1
    return (1 - 2 * bits).float()


def _group_signs(groups: torch.Tensor) -> torch.Tensor:
    return (1 - 2 * ((mixed(groups, 8) >> 1) & 1)).float()


def mixed(index: torch.Tensor, seed: int) -> torch.Tensor:
    """64 bits from a hash of each index (splitmix64)."""
    state = index.to(torch.int64) * _MIX[0] + (seed * _MIX[2] + 2**63) % 2**64 - 2**63
    state = (state ^ _shifted(state, 30)) * _MIX[1]
    state = (state ^ _shifted(state, 27)) * _MIX[2]
    return state ^ _shifted(state, 31)


def _shifted(state: torch.Tensor, bits: int) -> torch.Tensor:
    return (state >> bits) & ((1 << (64 - bits)) - 1)
