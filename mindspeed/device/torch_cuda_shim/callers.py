"""Modules that see a CUDA device on the CPU: Megatron's do, all others do not.

Megatron refuses to run unless ``torch.cuda.is_available()``, ``Tensor.is_cuda`` and the like are
true. Other libraries in the same process (transformers, peft, accelerate, safetensors, torch
itself) use the same names to decide where to put their tensors, and must see that there is no GPU.
So the result depends on the calling module: the ``__name__`` in the global namespace of the calling
frame.

A module is Megatron's when

* the root package of its name is registered: ``megatron``, and what :func:`treat_as_megatron` adds
  (an embedding framework, a test-suite);
* it holds something imported from a registered package: a script, or a framework's module on
  megatron-core, as soon as its imports have run. This library's modules are excepted: they ask the
  device layer;
* it is a top-level file in the root of a Megatron-LM checkout (``pretrain_gpt.py``,
  ``gpt_builders.py``), recognised by ``megatron/core`` and ``pretrain_gpt.py`` next to it.

The result is cached per module name, so a call costs a dictionary look-up.
"""

from __future__ import annotations

from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

_roots: set[str] = {"megatron"}
_known: dict[str, bool] = {}


def treat_as_megatron(*packages: str) -> None:
    """Treat modules of these root packages as Megatron's.

    Args:
        packages: names of top-level packages, for example ``"tests"``, or ``"__main__"``.
    """
    _roots.update(package.partition(".")[0] for package in packages)
    _known.clear()


def called_by_megatron(namespace: dict[str, Any]) -> bool:
    """Whether ``namespace``, the globals of the calling frame, is a Megatron-like module's."""
    name = namespace.get("__name__")
    answer = _known.get(name)  # type: ignore[arg-type]
    return _classify(name, namespace) if answer is None else answer


def _classify(name: Any, namespace: dict[str, Any]) -> bool:
    if not isinstance(name, str):
        return False
    root = name.partition(".")[0]
    answer = root in _roots
    if not answer and root == name:
        answer = _in_checkout_root(namespace.get("__file__"))
    if not answer and root != "mindspeed":
        answer = _uses_megatron(namespace)
        if not answer and _may_still_import(name, namespace):
            return False  # not cached
    _known[name] = answer
    return answer


def _may_still_import(name: str, namespace: dict[str, Any]) -> bool:
    spec = namespace.get("__spec__")
    return name == "__main__" or getattr(spec, "_initializing", False)


def _in_checkout_root(file: Any) -> bool:
    if not isinstance(file, str):
        return False
    folder = Path(file).absolute().parent
    return (folder / "pretrain_gpt.py").is_file() and (folder / "megatron" / "core").is_dir()


def _uses_megatron(namespace: dict[str, Any]) -> bool:
    for value in list(namespace.values()):
        kind = type(value)  # isinstance would ask the object, which may warn
        if issubclass(kind, ModuleType):
            origin = value.__dict__.get("__name__")
        elif issubclass(kind, (type, FunctionType)):
            origin = value.__module__
        else:
            continue
        if isinstance(origin, str) and origin.partition(".")[0] in _roots:
            return True
    return False
