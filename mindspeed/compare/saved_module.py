"""Describes a module and its arguments as JSON and tensors, and builds them again from these.

A module is its class, its attributes and its parameters: no constructor runs, so that whatever a
job has changed in an instance is there again. Attributes are described one by one: numbers, names,
enumerations, data classes, functions and classes by import path, process groups by their ranks,
modules. What has no description (a lambda, a closure) is absent, and says so where it is used.
"""

from __future__ import annotations

import enum
import functools
import pkgutil
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.errors import DataError

_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}
_PLAIN = (bool, int, float, str, type(None))


class Describer:
    """Describes values; equal objects once.

    Attributes:
        tensors: Those of the values, by name, on the host.
        parameters: Names of those that are weights.
        absent: What has no description, by path.
    """

    def __init__(self) -> None:
        self.parameters: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.absent: dict[str, str] = {}
        self._known: dict[int, tuple[int, Any]] = {}

    def describe(self, value: Any, path: str) -> Any:
        """JSON of a value.

        Args:
            value: Any.
            path: Where it is, for what has no description.
        """
        if type(value) in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, torch.dtype):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": None}
        if isinstance(value, enum.Enum):
            return {"enum": _path_of(type(value)), "name": value.name}
        if isinstance(value, dist.ProcessGroup):
            return {"group": dist.get_process_group_ranks(value)}
        if isinstance(value, functools.partial):
            given = self.describe([value.func, list(value.args), value.keywords], path)
            return {"partial": given}
        if callable(value) and hasattr(value, "__qualname__"):
            found = _path_of(value)
            return self._absent(value, path) if found is None else {"import": found}
        if id(value) in self._known:
            return {"same": self._known[id(value)][0]}
        number = len(self._known)
        self._known[id(value)] = number, value
        return {"number": number, **self._object(value, path)}

    def _object(self, value: Any, path: str) -> dict[str, Any]:
        if isinstance(value, list | tuple | set):
            kind = "list" if isinstance(value, list) else "tuple"
            items = [self.describe(one, f"{path}[{n}]") for n, one in enumerate(value)]
            return {kind: items}
        if type(value) is dict:
            pairs = [
                [self.describe(k, path), self.describe(v, f"{path}[{k!r}]")]
                for k, v in value.items()
            ]
            return {"dict": pairs}
        name = _path_of(type(value))
        if name is None or not hasattr(value, "__dict__"):
            return self._absent(value, path)
        if not isinstance(value, torch.nn.Module):
            return {"object": name, "attributes": self._attributes(vars(value), path)}
        own = {k: v for k, v in vars(value).items() if k not in _OF_EVERY_MODULE}
        return {
            "module": name,
            "attributes": self._attributes(own, path),
            "parameters": {
                k: None if v is None else self._parameter(v, f"{path}.{k}")
                for k, v in value._parameters.items()
            },
            "buffers": self._attributes(value._buffers, path),
            "modules": self._attributes(value._modules, path),
        }

    def _attributes(self, values: Any, path: str) -> dict[str, Any]:
        return {k: self.describe(v, f"{path}.{k}") for k, v in values.items()}

    def _parameter(self, value: torch.Tensor, path: str) -> dict[str, Any]:
        plain = {k: v for k, v in vars(value).items() if type(v) in _PLAIN}
        self.parameters.append(path)
        return {
            **self._tensor(value, path),
            "attributes": plain,
            "main_grad": hasattr(value, "main_grad"),
        }

    def _tensor(self, value: torch.Tensor, path: str) -> dict[str, Any]:
        self.tensors[path] = value.detach().cpu().clone().contiguous()
        return {"tensor": path, "gradient": value.requires_grad}

    def _absent(self, value: Any, path: str) -> dict[str, Any]:
        self.absent[path] = getattr(value, "__qualname__", type(value).__qualname__)
        return {"absent": self.absent[path], "path": path}


def _path_of(value: Any) -> str | None:
    """Import path of a function or class; None where there is none."""
    path = f"{getattr(value, '__module__', None)}:{getattr(value, '__qualname__', '')}"
    try:
        return path if pkgutil.resolve_name(path) is value else None
    except (ImportError, AttributeError, ValueError):
        return None


class Builder:
    """Builds values from their descriptions.

    Args:
        tensors: By name.
        device: Of all tensors.
        group: Process group of ranks.
    """

    def __init__(
        self, tensors: dict[str, torch.Tensor], device: str, group: Callable[[list[int]], Any]
    ) -> None:
        self._tensors, self._device, self._group = tensors, device, group
        self._known: dict[int, Any] = {}

    def build(self, given: Any) -> Any:
        """The value that a description is of."""
        if not isinstance(given, dict):
            return given
        kind = next(key for key in given if key != "number")
        known = {
            "tensor": self._tensor,
            "torch": lambda one: getattr(torch, one["torch"]),
            "device": lambda one: torch.device(self._device),
            "enum": lambda one: pkgutil.resolve_name(one["enum"])[one["name"]],
            "group": lambda one: self._group(one["group"]),
            "import": lambda one: pkgutil.resolve_name(one["import"]),
            "partial": self._partial,
            "same": lambda one: self._known[one["same"]],
            "tuple": lambda one: tuple(map(self.build, one["tuple"])),
            "list": self._list,
            "dict": self._dict,
            "object": self._instance,
            "module": self._module,
            "absent": lambda one: Absent(one["path"], one["absent"]),
        }
        value = known[kind](given)
        if "number" in given:
            self._known[given["number"]] = value
        return value

    def _tensor(self, given: dict[str, Any]) -> torch.Tensor:
        value = self._tensors[given["tensor"]].to(self._device)
        return value.clone().requires_grad_(given["gradient"])

    def _partial(self, given: dict[str, Any]) -> Any:
        function, args, kwargs = self.build(given["partial"])
        return functools.partial(function, *args, **kwargs)

    def _list(self, given: dict[str, Any]) -> list[Any]:
        value: list[Any] = []
        self._known[given["number"]] = value
        value += map(self.build, given["list"])
        return value

    def _dict(self, given: dict[str, Any]) -> dict[Any, Any]:
        value: dict[Any, Any] = {}
        self._known[given["number"]] = value
        value.update((self.build(k), self.build(v)) for k, v in given["dict"])
        return value

    def _instance(self, given: dict[str, Any]) -> Any:
        kind = pkgutil.resolve_name(given["object"])
        value = self._known[given["number"]] = kind.__new__(kind)
        vars(value).update(self._all(given["attributes"]))
        return value

    def _module(self, given: dict[str, Any]) -> torch.nn.Module:
        kind = pkgutil.resolve_name(given["module"])
        value = self._known[given["number"]] = kind.__new__(kind)
        torch.nn.Module.__init__(value)
        vars(value).update(self._all(given["attributes"]))
        for name, one in given["parameters"].items():
            value._parameters[name] = None if one is None else self._parameter(one)
        value._buffers.update(self._all(given["buffers"]))
        value._modules.update(self._all(given["modules"]))
        return value

    def _all(self, given: dict[str, Any]) -> dict[str, Any]:
        return {name: self.build(one) for name, one in given.items()}

    def _parameter(self, given: dict[str, Any]) -> torch.nn.Parameter:
        data = self._tensors[given["tensor"]].to(self._device).clone()
        value = torch.nn.Parameter(data, given["gradient"])
        vars(value).update(given["attributes"])
        if given["main_grad"]:
            value.main_grad = torch.zeros_like(data, dtype=torch.float32)  # type: ignore[attr-defined]
        return value


class Absent:
    """Stands for what could not be described; an error where it is used."""

    def __init__(self, path: str, what: str) -> None:
        vars(self).update(_path=path, _what=what)

    def __getattr__(self, name: str) -> Any:
        raise DataError(f"{self._path} ({self._what}) has no description, and the module needs it")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call
