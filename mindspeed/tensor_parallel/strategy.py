"""How a product of a tensor-parallel linear layer and its collective run, by their shapes.

    choose(Overlap(parts=4), Product("matmul_scatter", 16384, 5120, 1920, ranks=8), None)
    -> Strategy("chunked", 4)

    plain      product, then collective (or the other way round)
    chunked    in parts of the rows: one is multiplied while another is sent
    fused      one kernel of an NPU, or of a GPU over symmetric memory

What was chosen may not fit: a fused kernel has limits, a part must be a whole number of rows. Then
the next best strategy comes with the reason.

Settings of CoC for single shapes and operators are a dictionary in Python, or a file:

============================== ======== ============================================================
name                           default  meaning
============================== ======== ============================================================
customized_coc                 {}       ``{"[m, k, n]": parts}``: products of this shape in another
                                        number of parts, 1 for not at all; never fused. m counts
                                        the rows after gathering and before scattering.
enable_coc_in_column_backward  False    Also the input gradient of a column-parallel layer, whose
                                        collective the weight gradient hides otherwise.
recompute_all_gather           True     A column-parallel layer gathers its input again in backward;
                                        False: it keeps the gathered input.
matmul_soc_friendly            True     On an NPU operands are laid out for its matrix unit.
k_min, k_max                   1024,    Inner lengths that may be padded for it.
                               4096
print_tensor_value_open        False    Only False: a debugging aid of the original.
measured                       {}       Device, dtype and ranks of ``mindspeed calibrate --coc``,
                                        for which alone the settings are.
============================== ======== ============================================================
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mindspeed.errors import ConfigError

Operation = Literal["gather_matmul", "matmul_scatter", "matmul_reduce"]
OPERATIONS: tuple[Operation, ...] = ("gather_matmul", "matmul_scatter", "matmul_reduce")
PART_COUNTS = (1, 2, 4, 8)
FALLBACK_PARTS = 4
"""Parts of a product whose fused kernel cannot run, where no number was chosen."""

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Product:
    """``[m, k] x [k, n]`` on every rank, and its collective.

    Attributes:
        operation: its name in :mod:`mindspeed.te.kernels`.
        m: rows ``s b``: after gathering, or before scattering.
        k: inner length.
        n: columns.
        ranks: tensor-parallel ranks.
    """

    operation: Operation
    m: int
    k: int
    n: int
    ranks: int

    @property
    def shape(self) -> Shape:
        """``(m, k, n)``."""
        return self.m, self.k, self.n

    @property
    def rows(self) -> int:
        """The rows that are divided into parts: those of one rank where the rows are sharded."""
        return self.m if self.operation == "matmul_reduce" else self.m // self.ranks

    def __str__(self) -> str:
        return f"{self.operation} [{self.m}, {self.k}, {self.n}] of {self.ranks} ranks"


@dataclass(frozen=True)
class Overlap:
    """Overlap as the user configured it.

    Attributes:
        parts: into how many the rows are divided.
        fused: fused kernels first.
        comm_mode: how fused kernels of an NPU communicate (``mindspeed.ops.fused_collectives``).
        parts_of: shapes with another number of parts; they are never fused.
        column_backward: also the input gradient of a column-parallel layer, whose collective is
            hidden by the weight gradient otherwise.
        row_forward: the output of a row-parallel layer.
        operations: the others stay plain.
        strict: a fused kernel that cannot run is an error.
        aligned: operands are laid out for the matrix unit of an NPU
            (:mod:`mindspeed.tensor_parallel.products`).
        k_min: shortest inner length that is padded for it.
        k_max: longest.
    """

    parts: int = 1
    fused: bool = False
    comm_mode: str | None = None
    parts_of: Mapping[Shape, int] = field(default_factory=dict)
    column_backward: bool = False
    row_forward: bool = True
    operations: tuple[Operation, ...] = OPERATIONS
    strict: bool = False
    aligned: bool = False
    k_min: int = 1024
    k_max: int = 4096


@dataclass(frozen=True)
class ProductStrategy:
    """Implementation of a product, and why it is not the configured one ("" where it is)."""

    kind: Literal["plain", "chunked", "fused"]
    parts: int = 1
    reason: str = ""


def choose(overlap: Overlap, product: Product, unfit: str | None) -> ProductStrategy:
    if product.operation not in overlap.operations:
        return ProductStrategy("plain")
    parts = overlap.parts_of.get(product.shape)
    if parts is None and overlap.fused:
        if unfit is None:
            return ProductStrategy("fused")
        fallback = overlap.parts if overlap.parts > 1 else FALLBACK_PARTS
        return _in_parts(most_parts(product.rows, fallback), unfit)
    wanted = overlap.parts if parts is None else parts
    found = most_parts(product.rows, wanted)
    reason = f"{product.rows} rows cannot be divided into {wanted} parts"
    return _in_parts(found, "" if found == wanted else reason)


def _in_parts(parts: int, reason: str) -> ProductStrategy:
    return ProductStrategy("chunked" if parts > 1 else "plain", parts, reason)


def most_parts(rows: int, wanted: int) -> int:
    """The largest number of parts up to ``wanted`` that divides the rows."""
    return next(parts for parts in range(wanted, 0, -1) if rows % parts == 0) if rows else 1


def valid_parts(rows: int) -> tuple[int, ...]:
    """The numbers of parts that a user can choose for this many rows."""
    return tuple(parts for parts in PART_COUNTS if rows % parts == 0)


coc_cfgs: dict[str, Any] = {
    "matmul_soc_friendly": True,
    "customized_coc": {},
    "enable_coc_in_column_backward": False,
    "recompute_all_gather": True,
    "k_min": 1024,
    "k_max": 4096,
    "print_tensor_value_open": False,
}
"""What a user changes from Python, under the original's name."""


@dataclass(frozen=True)
class MeasuredOn:
    """Device, dtype and number of tensor-parallel ranks of measured settings."""

    device: str
    dtype: str
    ranks: int


@dataclass(frozen=True)
class CocSettings:
    """The settings, checked; the fields as in the table above."""

    customized_coc: Mapping[Shape, int] = field(default_factory=dict)
    enable_coc_in_column_backward: bool = False
    recompute_all_gather: bool = True
    matmul_soc_friendly: bool = True
    k_min: int = 1024
    k_max: int = 4096
    measured: MeasuredOn | None = None


def read_settings(given: Mapping[str, Any], where: str) -> CocSettings:
    """Check settings by name.

    Raises:
        ConfigError: names the entry, what it is and what it may be.
    """
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name == "measured":
            values[name] = _measured_on(value, where)
            continue
        if name not in coc_cfgs:
            raise ConfigError(f"{where}: {name!r} is not one of {', '.join(coc_cfgs)}")
        if name == "customized_coc":
            values[name] = _parts_of_shapes(value, where)
        elif name in ("k_min", "k_max"):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{where}: {name} is a whole number from 1, not {value!r}")
            values[name] = value
        elif not isinstance(value, bool):
            raise ConfigError(f"{where}: {name} is True or False, not {value!r}")
        elif name != "print_tensor_value_open":
            values[name] = value
        elif value:
            raise ConfigError(f"{where}: print_tensor_value_open prints nothing here; leave it out")
    return CocSettings(**values)


def _measured_on(given: Any, where: str) -> MeasuredOn:
    match given:
        case {"device": str(device), "dtype": str(dtype), "ranks": int(ranks)}:
            return MeasuredOn(device, dtype, ranks)
    raise ConfigError(
        f"{where}: measured has no device, dtype and ranks; mindspeed calibrate --coc writes it"
    )


def _parts_of_shapes(given: Any, where: str) -> dict[Shape, int]:
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{where}: customized_coc maps shapes to numbers of parts, as in "
            f'{{"[16384, 5120, 1920]": 8}}; this is {given!r}'
        )
    found: dict[Shape, int] = {}
    for key, parts in given.items():
        shape = _shape(key)
        if shape is None:
            raise ConfigError(
                f'{where}: customized_coc: {key!r} is no shape of three numbers "[m, k, n]"'
            )
        if parts not in PART_COUNTS or isinstance(parts, bool):
            allowed = ", ".join(map(str, PART_COUNTS))
            raise ConfigError(
                f"{where}: customized_coc: {key!r} has {parts!r} parts; choose one of {allowed}"
            )
        if shape in found:
            raise ConfigError(f"{where}: customized_coc: {key!r} is given twice")
        found[shape] = parts
    return found


def _shape(key: Any) -> Shape | None:
    try:
        values = ast.literal_eval(key) if isinstance(key, str) else key
        m, k, n = values
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    whole = all(isinstance(x, int) and not isinstance(x, bool) and x > 0 for x in (m, k, n))
    return (m, k, n) if whole else None
