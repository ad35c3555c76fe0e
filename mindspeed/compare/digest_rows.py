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

GROUP, _GROUPS_AT_ONCE = 127, 64  # as in the library
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


def fold(
    x: torch.Tensor, first: int, groups: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add the groups of columns of each row, each with its sign.

    Args:
        x: fp32 ``[rows, columns]`` on the host.
        first: Place of the first column in its group of :data:`GROUP`.
        groups: fp32, signs of the groups that the columns are of.

    Returns:
        Folded rows ``[rows, parts, 127]``, a part for each 64 groups; sums, sums of squares and
        largest magnitudes (NaN if there is one), ``[rows, parts]``.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    parts = -(-len(groups) // _GROUPS_AT_ONCE)
    folded = torch.zeros(len(x), parts, GROUP)
    sums, squares, largest = (torch.empty(len(x), parts) for _ in range(3))

    def rows(of: slice) -> None:
        to = (one[of] for one in (folded, sums, squares, largest))
        _call("fold_rows", x[of], first, groups, *to)

    _in_threads(rows, x)
    return folded, sums, squares, largest


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
