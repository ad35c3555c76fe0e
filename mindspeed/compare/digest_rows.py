"""The sums of :mod:`mindspeed.compare.digest` in one pass over the memory of a CPU.

Operators of torch read a tensor five times. ``digest_rows.c`` is built with the C compiler of the
machine when it is needed first; where there is none, the operators are used.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

GROUP = 127  # as in the library
_PER_THREAD = 1 << 18  # elements
_SOURCE = Path(__file__).with_suffix(".c")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The functions of ``digest_rows.c``; None on a machine that cannot build or load them."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, "digest_rows.so")
        for tuned in (["-march=native"], []):  # unknown to some compilers of some processors
            command = [compiler, "-O3", *tuned, "-shared", "-fPIC", str(_SOURCE), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, check=False)
            if done.returncode == 0:
                with suppress(OSError):  # temporary files may not be executed here
                    return ctypes.CDLL(str(built))
    return None


def sums(
    x: torch.Tensor, first: int, groups: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of each row: of products with the signs of its columns, of values, of squares.

    Args:
        x: fp32 ``[rows, columns]`` on the host.
        first: Place of the first column in its group of :data:`GROUP`.
        groups: fp32, signs of the groups that the columns are of.
        places: fp32 ``[GROUP + 1, 16]``, signs of the places in a group.

    Returns:
        fp64 ``[rows, 18]``, and the largest magnitude (NaN if there is one), fp32 ``[rows]``.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    found = torch.empty(len(x), places.shape[1] + 2, dtype=torch.float64)
    largest = torch.empty(len(x))

    def rows(of: slice) -> None:
        _call("sum_rows", x[of], first, groups, places, found[of], largest[of])

    _in_threads(rows, x)
    return found, largest


def exact(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """``[rows]`` int64: pairs of fp32 values, as words of 64 bits, times their factors.

    Args:
        x: fp32 ``[rows, columns]`` on the host.
        factors: int64 ``[columns / 2]``.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    sums = torch.empty(len(x), dtype=torch.int64)
    _in_threads(lambda of: _call("exact_rows", x[of], factors, sums[of]), x)
    return sums


def _call(name: str, x: torch.Tensor, *arguments: torch.Tensor | int) -> None:
    numbers = [*x.shape, x.stride(0), *arguments]
    getattr(library(), name)(
        ctypes.c_void_p(x.data_ptr()),
        *(
            ctypes.c_int64(one) if isinstance(one, int) else ctypes.c_void_p(one.data_ptr())
            for one in numbers
        ),
    )


def _in_threads(work: Callable[[slice], None], x: torch.Tensor) -> None:
    """Share rows among as many threads as operators of torch have; the library holds no lock."""
    threads = min(torch.get_num_threads(), x.numel() // _PER_THREAD)
    if threads < 2:
        return work(slice(None))
    cuts = [len(x) * part // threads for part in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, itertools.starmap(slice, itertools.pairwise(cuts))))
    return None
