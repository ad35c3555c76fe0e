"""Settings of CoC for single shapes and operators: a dictionary in Python, or a file.

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
from typing import Any

from mindspeed.errors import ConfigError
from mindspeed.tensor_parallel.strategy import PART_COUNTS, Shape

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
