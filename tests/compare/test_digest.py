"""Digests: parts add up, one bit changes the exact one, sketches estimate distances."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed.compare import digest_rows
from mindspeed.compare.digest import (
    LARGEST,
    NOT_FINITE,
    SKETCH_ERROR,
    SKETCHES,
    SQUARES,
    Elements,
    digest,
    digest_and_exact,
)
from mindspeed.compare.digest import whole as whole_place
from mindspeed.compare.megatron_places import MicroBatchRows, RankColumns, Ranks, rectangles

ROWS, COLUMNS = 24, 20
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def exact(x: torch.Tensor, place: Elements) -> int:
    return int(digest_and_exact(x, place)[1])


def values(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return (10 * torch.randn(ROWS, COLUMNS, generator=generator)).to(dtype)


def split(x: torch.Tensor) -> list[tuple[torch.Tensor, Elements]]:
    """Four parts: even and odd rows, columns in two unequal ranges."""
    parts = []
    for rows in (torch.arange(0, ROWS, 2), torch.arange(1, ROWS, 2)):
        for columns in (torch.arange(7), torch.arange(7, COLUMNS)):
            place = Elements((ROWS, COLUMNS), rows, columns)
            parts.append((x[rows][:, columns], place))
    return parts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_add_up_to_the_whole(dtype):
    x = values(dtype)
    full = digest(x, whole_place(ROWS, COLUMNS))
    total = torch.zeros_like(full)
    largest = []
    for part, place in split(x):
        own = digest(part, place)
        largest.append(own[:, LARGEST])
        total += own
    total[:, LARGEST] = torch.stack(largest).amax(0)
    torch.testing.assert_close(total, full, rtol=1e-5, atol=1e-4)
    norms = x.double().view(8, 3, COLUMNS).square().sum((1, 2))
    torch.testing.assert_close(full[:, SQUARES], norms, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_digest_adds_up_and_sees_one_bit(dtype):
    x = values(dtype)
    full = exact(x, whole_place(ROWS, COLUMNS))
    total = sum(exact(part, place) for part, place in split(x))
    assert (total - full) % 2**64 == 0
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()]
    for bit in (0, 8 * x.element_size() - 1):
        y = x.clone()
        y.view(kind)[5, 6] ^= -1 << bit if bit % 8 == 7 else 1 << bit
        assert exact(y, whole_place(ROWS, COLUMNS)) != full


def test_minus_zero_counts_as_zero():
    zero = torch.zeros(2, 2)
    assert exact(zero, whole_place(2, 2)) == exact(-zero, whole_place(2, 2))


@pytest.mark.parametrize("rows", [256, 2048], ids=["one product", "products of columns"])
def test_sketches_estimate_the_distance(rows):
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(rows, 300, generator=generator)
    b = a + 1e-3 * torch.randn(rows, 300, generator=generator)
    place = whole_place(rows, 300)
    apart = (digest(a, place) - digest(b, place))[:, :SKETCHES].square().mean(1)
    true = (a - b).double().view(8, -1).square().sum(1)
    assert 0.6 < float((apart.sum() / true.sum()).sqrt()) < 1.6


def test_an_exchange_of_rows_in_a_block_is_seen():
    x = values(torch.float32)
    y = x.clone()
    y[[0, 1]] = x[[1, 0]]
    place = whole_place(ROWS, COLUMNS)
    apart = digest(x, place) - digest(y, place)
    assert apart[0, :SKETCHES].abs().max() > 1 and apart[1:].abs().max() == 0


def test_values_that_are_not_finite_are_counted_by_block():
    x = values(torch.float32)
    x[0, 0], x[23, 1], x[23, 2] = float("nan"), float("inf"), float("-inf")
    assert digest(x, whole_place(ROWS, COLUMNS))[:, NOT_FINITE].tolist() == [1.0, *[0.0] * 6, 2.0]


def test_a_flat_range_is_rectangles():
    x = torch.arange(35).view(5, 7)
    place = whole_place(5, 7)
    for start, end in ((0, 35), (3, 5), (3, 33), (7, 21), (5, 9), (4, 4)):
        found = torch.cat(
            [
                x[p.rows][:, p.columns].reshape(-1)
                for a, b, p in rectangles(place, start, end)
                if p.count == b - a
            ]
            or [torch.arange(0)]
        )
        assert found.tolist() == list(range(start, end))


def ranks(**given: int) -> Ranks:
    one = dict(tp=0, tp_size=1, cp=0, cp_size=1, dp=0, dp_size=1, pp=0, pp_size=1, sequence=False)
    return Ranks(**{**one, **given})  # type: ignore[arg-type]


def test_gate_and_up_are_halves_of_the_columns():
    assert RankColumns(12, 1, 3, 2).index().tolist() == [2, 3, 8, 9]
    assert RankColumns(12, 1, 3).index().tolist() == [4, 5, 6, 7]


def test_sequence_parallelism_takes_a_chunk_of_zigzag_rows():
    place = MicroBatchRows(
        ranks(tp=1, tp_size=2, cp=1, cp_size=2, sequence=True), samples=2, length=8
    ).place(4, RankColumns(3))
    # Tokens of context rank 1 of 2: 4..11; tensor rank 1 has the last four of them.
    assert place.rows.tolist() == [2 * t + b for t in (8, 9, 10, 11) for b in (0, 1)]
    assert place.shape == (32, 3)


@pytest.mark.parametrize("columns", [64, 1000])
def test_the_error_of_a_large_sketch_is_known(columns):
    x = torch.randn(1024, columns, generator=torch.Generator().manual_seed(2))
    place = whole_place(1024, columns)
    apart = (digest(x, place) - digest(x.double(), place))[:, :SKETCHES].square().mean(1).sum()
    assert 0 < float(apart.sqrt() / x.double().norm()) < SKETCH_ERROR


@pytest.mark.parametrize("distance", [1, 16, 64, 128, 256, 1024])
def test_an_exchange_of_two_columns_is_seen(distance):
    """Groups of columns are added before they are multiplied; none hides such a pair."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(64, 2048, generator=generator)
    place = whole_place(64, 2048)
    for first in range(0, 900, 37):
        y = x.clone()
        y[:, [first, first + distance]] = x[:, [first + distance, first]]
        apart = (digest(x, place) - digest(y, place))[:, :SKETCHES].square().mean(1).sum()
        assert 0.4 < float(apart.sqrt() / (x - y).norm()) < 1.8


@pytest.mark.parametrize("width", [381, 400, 1000])
@pytest.mark.parametrize("start", [0, 1, 126, 127, 300])
def test_a_shard_of_columns_has_the_signs_of_the_whole(start, width):
    x = torch.randn(512, 2048, generator=torch.Generator().manual_seed(5))
    x[:, :start], x[:, start + width :] = 0, 0
    columns = torch.arange(start, start + width)
    place = Elements((512, 2048), torch.arange(512), columns)
    torch.testing.assert_close(
        digest(x[:, columns], place), digest(x, whole_place(512, 2048)), rtol=1e-5, atol=1e-3
    )


class Reads(TorchDispatchMode):
    """Counts the elements that operators read of a tensor, and the largest tensor they make."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self._storage = x.untyped_storage().data_ptr()
        self.elements, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not self._is(result):
            tensors = [one for one in args if isinstance(one, torch.Tensor)]
            self.elements += sum(one.numel() for one in tensors if self._is(one))
            self.largest = max(self.largest, result.numel())
        return result

    def _is(self, x: torch.Tensor) -> bool:
        return x.untyped_storage().data_ptr() == self._storage


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setattr(digest_rows, "library", lambda: None)


@pytest.mark.parametrize(("exactly", "reads"), [(False, 5), (True, 6)])
def test_operators_read_a_tensor_from_memory_once(without_compiler, exactly, reads):
    """Five sums of each chunk, which is in the caches then; none makes a tensor of the whole."""
    counted = reads_of(digest_and_exact if exactly else digest)
    assert counted.elements == reads * 2048 * 1016
    assert counted.largest <= 2**19


@pytest.mark.parametrize("compiler", ["no-such-compiler", "true"])
def test_a_library_that_cannot_be_built_or_loaded_is_none(monkeypatch, compiler):
    """``true`` ends well and writes nothing to load, as where files may not be executed."""
    monkeypatch.setenv("CC", compiler)
    assert digest_rows.library.__wrapped__() is None


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("function", [digest, digest_and_exact])
def test_no_operator_reads_a_tensor_that_c_reads(function):
    counted = reads_of(function)
    assert counted.elements == 0
    assert counted.largest <= 2048 * 18  # sums of rows


def reads_of(function) -> Reads:
    x, place = torch.randn(2048, 1016), whole_place(2048, 1016)
    function(x, place)  # signs are made once
    with Reads(x) as counted:
        function(x, place)
    return counted


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 126, 300])
@pytest.mark.parametrize("width", [381, 1000, 8130, 9000], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_c_and_operators_agree(monkeypatch, dtype, start, width, threads):
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(515, start + width + 2, generator=generator).to(dtype)[:, start : start + width]
    x[3, 1], x[4, 2] = -0.0, -9.5  # strided rows; the largest magnitude is negative
    place = Elements((600, 10000), torch.arange(40, 555), torch.arange(start, start + width))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    got, bits = digest_and_exact(x, place)
    monkeypatch.setattr(digest_rows, "library", lambda: None)
    expected, expected_bits = digest_and_exact(x, place)
    assert bits == expected_bits
    assert got[0, LARGEST] == 9.5
    norm = x.double().norm()
    squares, expected_squares = got[:, SQUARES], expected[:, SQUARES]
    torch.testing.assert_close(squares, expected_squares, rtol=3e-6, atol=0)
    got[:, SQUARES] = expected[:, SQUARES]
    torch.testing.assert_close(got / norm, expected / norm, rtol=0, atol=2e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_of_many_that_is_not_finite_is_counted(value):
    x, place = torch.randn(64, 1000), whole_place(64, 1000)
    x[63, 999] = value
    assert digest(x, place)[:, NOT_FINITE].tolist() == [*[0.0] * 7, 1.0]
