"""Patches with a contract.

A :class:`Patch` says which name it changes (``"module:qualified.name"``), how (``wrap`` what is
there, ``replace`` it, or ``define`` a new name), which signature it was written for, and whose it
is. The :class:`PatchEngine` applies it as soon as the module is imported and can take everything
back. A target that is missing or looks different is an error with the owner, the target and the
installed version in it; nothing is ever patched silently.

A function of a module gets a dispatcher when its module is imported, before anybody can take it
with ``from x import y``: patches that come later reach every holder. Of modules that were imported
earlier the holders are searched by the garbage collector, and one that cannot be changed is an
error.

Several wraps of one target stack in the order in which they were added, innermost first; two
replacements of one target are a conflict.
"""

from __future__ import annotations

import difflib
import functools
import gc
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any, Literal

from packaging.version import Version

from mindspeed.adaptor.importing import PostImportHooks
from mindspeed.adaptor.signatures import check_signature
from mindspeed.adaptor.versions import in_range
from mindspeed.errors import PatchConflict, PatchTargetMissing, PatchTooLate

Kind = Literal["wrap", "replace", "define"]
_ABSENT = object()
_DISPATCHER = "_mindspeed_dispatcher"  # attribute of an original


@dataclass(frozen=True)
class Patch:
    """One change of one name in somebody else's module.

    Attributes:
        target: ``"package.module:Class.method"`` or ``"package.module:function"``.
        make: gets the original object (None for ``define``) and returns the new one.
        owner: name of the feature or repair it belongs to.
        why: one line for ``mindspeed patches``.
        kind: ``wrap`` keeps calling the original, ``replace`` does not, ``define`` adds a name.
        expects: the signature the patch was written for, ``"(self, tokens, ...)"`` where ``...``
            allows more parameters; or a table from version ranges to signatures. None skips the
            check (classes, values).
        versions: the megatron-core range in which the target exists; outside it the patch is not
            needed and is left out.
    """

    target: str
    make: Callable[[Any], Any]
    owner: str
    why: str = ""
    kind: Kind = "wrap"
    expects: str | Mapping[str, str] | None = field(default=None, hash=False)
    versions: str = ""

    @property
    def module(self) -> str:
        """Name of the module that defines the target."""
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        """Dotted name of the target inside its module."""
        return self.target.partition(":")[2]

    def expected_signature(self, version: Version | None) -> str | None:
        """The signature promised for this megatron-core version, or None if none is promised."""
        if self.expects is None or isinstance(self.expects, str):
            return self.expects
        for versions, signature in self.expects.items():
            if version is None or in_range(version, versions):
                return signature
        return None

    def applies_to(self, version: Version | None) -> bool:
        """Whether the target is claimed to exist in this megatron-core version."""
        return version is None or in_range(version, self.versions)


def repair(target: str, make: Callable[[Any], Any], why: str, **options: Any) -> Patch:
    """A patch of the repair in whose module ``make`` is: ``repair:`` and the module's name.

    Args:
        target: as in :class:`Patch`, like ``make`` and ``why``.
        **options: further fields of :class:`Patch`.
    """
    name = make.__module__.rpartition(".")[2].replace("_", "-")
    return Patch(target, make, f"repair:{name}", why, **options)


@dataclass
class _Target:
    """What is known of one patched name: where it lives, the original, and the stack on it."""

    name: str
    patches: list[Patch] = field(default_factory=list)
    watched: bool = False
    holder: Any = None  # the module or class, once loaded
    missing: tuple[Any, str] | None = None  # what has no such class
    original: Any = _ABSENT  # the raw entry of vars(holder): a descriptor for static methods
    dispatcher: Any = None  # of a function of a module
    replaced: list[Place] = field(default_factory=list)  # where modules held the original
    held_by: str = ""  # who holds the original for good

    @property
    def leaf(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(":")[2].rpartition(".")[2]


class PatchEngine:
    """Applies patches when their modules appear, and takes them back.

    Args:
        hooks: told which modules to wait for.
        version: the installed megatron-core.
    """

    def __init__(self, hooks: PostImportHooks, version: Version | None) -> None:
        self._hooks = hooks
        self._version = version
        self._targets: dict[str, _Target] = {}

    def prepare(self, names: Iterable[str]) -> None:
        """Give the functions of modules among these targets dispatchers, from their import on.

        Args:
            names: targets of patches that may be added later.
        """
        targets = [self._target(name) for name in names if "." not in name.partition(":")[2]]
        for target in targets:
            self._watch(target)
        self._reach_holders(targets)

    def add(self, patch: Patch) -> None:
        """Apply ``patch`` now, or as soon as its module is imported; once, however often added.

        Raises:
            PatchConflict: another owner replaces the same target.
            PatchTargetMissing, PatchTargetChanged: the module is loaded and does not fit.
            PatchTooLate: the target was taken before the dispatcher was there.
        """
        if not patch.applies_to(self._version):
            return
        target = self._target(patch.target)
        if patch in target.patches:
            return
        _check_conflict(patch, target.patches)
        if not target.watched:
            self._watch(target)
            self._reach_holders([target])
        if target.held_by:
            raise PatchTooLate(
                f"'{patch.owner}' {patch.kind}s {patch.target}, which {target.held_by} took "
                "earlier: import mindspeed.megatron_adaptor before"
            )
        target.patches.append(patch)
        try:
            self._compose(target)
        except Exception:
            target.patches.remove(patch)
            raise

    def remove(self, owner: str) -> None:
        """Take back all patches of ``owner``; those of others on the same targets stay."""
        for target in self._targets.values():
            kept = [patch for patch in target.patches if patch.owner != owner]
            if len(kept) < len(target.patches):
                target.patches = kept
                self._compose(target)

    def undo(self) -> None:
        """Take back everything."""
        for target in self._targets.values():
            target.patches = []
            self._compose(target)
            if target.dispatcher is not None:
                for module, name in target.replaced:
                    if vars(module).get(name) is target.dispatcher:
                        setattr(module, name, target.original)
                setattr(target.holder, target.leaf, target.original)
        self._targets.clear()

    def original(self, name: str) -> Any:
        """What the target ``name`` was before its patches; None for a new name."""
        value = self._targets[name].original
        return None if value is _ABSENT else getattr(value, "__func__", value)

    def stacks(self) -> dict[str, tuple[list[Patch], bool]]:
        """Target name -> (its patches, innermost first; whether its module is loaded)."""
        return {
            name: (list(target.patches), target.holder is not None)
            for name, target in sorted(self._targets.items())
            if target.patches
        }

    def _target(self, name: str) -> _Target:
        return self._targets.setdefault(name, _Target(name))

    def _watch(self, target: _Target) -> None:
        """Attach the target when its module is imported, now if it is loaded."""
        if not target.watched:
            target.watched = True
            self._hooks.when_imported(
                target.name.partition(":")[0], functools.partial(self._attach, target)
            )

    def _attach(self, target: _Target, module: ModuleType) -> None:
        """The module is there: find the original, put its dispatcher in place, compose."""
        holder: Any = module
        for part in target.name.partition(":")[2].split(".")[:-1]:
            if part not in vars(holder):
                target.missing = holder, part
                break
            holder = vars(holder)[part]
        else:
            target.holder = holder
            target.original = vars(holder).get(target.leaf, _ABSENT)
        if target.holder is module and inspect.isfunction(target.original):
            target.dispatcher = _dispatcher(target.original)
            setattr(module, target.leaf, target.dispatcher)
        self._compose(target)

    def _reach_holders(self, targets: Iterable[_Target]) -> None:
        """Put the dispatchers wherever functions of modules loaded before us are held."""
        late = {id(one.original): one for one in targets if one.dispatcher is not None}
        if not late:
            return
        replaced = replace_in_modules({key: one.dispatcher for key, one in late.items()})
        ours = [part for one in late.values() for part in (one, one.dispatcher)]
        others = other_holders({key: one.original for key, one in late.items()}, ours)
        for key, target in late.items():
            target.replaced = replaced.get(key, [])
            target.held_by = others.get(key, "")

    def _compose(self, target: _Target) -> None:
        """Compose the stack anew on the original and put it in place."""
        if target.missing and target.patches:
            raise self._missing(target.patches[-1], *target.missing)
        if target.holder is None:
            return
        value = target.original
        for patch in target.patches:
            value = self._make(patch, target, value)
        if target.dispatcher is not None:
            target.dispatcher.calls = value
        elif value is not _ABSENT:
            setattr(target.holder, target.leaf, value)
        elif target.leaf in vars(target.holder):
            delattr(target.holder, target.leaf)

    def _make(self, patch: Patch, target: _Target, value: Any) -> Any:
        if patch.kind == "define":
            if value is not _ABSENT:
                raise PatchConflict(f"'{patch.owner}' defines {patch.target}, which exists already")
            return patch.make(None)
        if value is _ABSENT:
            raise self._missing(patch, target.holder, target.leaf)
        descriptor = type(value) if isinstance(value, staticmethod | classmethod) else None
        original = value.__func__ if descriptor else value
        signature = patch.expected_signature(self._version)
        if signature is not None:
            check_signature(patch.owner, patch.target, signature, original, self._version)
        new = patch.make(original)
        if patch.kind == "wrap" and inspect.isfunction(new) and inspect.isfunction(original):
            functools.update_wrapper(new, original)
        return descriptor(new) if descriptor else new

    def _missing(self, patch: Patch, holder: Any, name: str) -> PatchTargetMissing:
        near = difflib.get_close_matches(name, list(vars(holder)), n=1, cutoff=0.5)
        closest = f"; closest: {near[0]}" if near else ""
        return PatchTargetMissing(
            f"feature '{patch.owner}' {patch.kind}s {patch.target}, absent in megatron-core "
            f"{self._version}{closest}"
        )


def _dispatcher(original: FunctionType) -> Any:
    """The function that calls what is composed on ``original``; always the same one.

    Those who took it keep it, also when an adaptor is taken back and another is installed.
    """
    known = vars(original).get(_DISPATCHER)
    if known is not None and known.__wrapped__ is original:
        return known

    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        return dispatch.calls(*args, **kwargs)  # type: ignore[attr-defined]

    dispatch.calls = original  # type: ignore[attr-defined]
    setattr(original, _DISPATCHER, dispatch)
    return dispatch


def _check_conflict(patch: Patch, others: Iterable[Patch]) -> None:
    if patch.kind == "wrap":
        return
    for other in others:
        if other.kind != "wrap":
            raise PatchConflict(
                f"{patch.target} is already replaced by '{other.owner}'; "
                f"'{patch.owner}' cannot replace it too: switch one of them off"
            )


Place = tuple[ModuleType, str]


def replace_in_modules(new: Mapping[int, Any]) -> dict[int, list[Place]]:
    """Put ``new[id(value)]`` wherever a loaded module holds such a ``value`` by a name.

    Returns:
        The places of each key, those in the module that defines the value excepted.
    """
    found: dict[int, list[Place]] = {}
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in new:
                setattr(module, name, new[id(value)])
                found.setdefault(id(value), []).append((module, name))
    return found


def other_holders(functions: Mapping[int, Any], ignore: Iterable[Any]) -> dict[int, str]:
    """Name those who hold functions otherwise: attributes of classes, closures, containers.

    Args:
        functions: by id, what was replaced in all modules.
        ignore: objects that may hold them, themselves or by an attribute.

    Returns:
        The names for each function that is held.
    """
    known = {id(one) for one in (functions, *ignore)} | {id(vars(one)) for one in ignore}

    def holders(*of: Any) -> list[Any]:
        return [
            one
            for one in gc.get_referrers(*of)
            if not isinstance(one, FrameType) and one is not of and id(one) not in known
        ]

    if not holders(*functions.values()):
        return {}
    gc.collect()  # wrappers that were taken back are cycles
    names = {key: sorted(set(map(_name, holders(functions[key])))) for key in functions}
    return {key: ", ".join(found) for key, found in names.items() if found}


def _name(holder: Any, depth: int = 3) -> str:
    """The class, function or module that ``holder`` belongs to, found by who refers to it."""
    if isinstance(holder, ModuleType):
        return holder.__name__
    if isinstance(holder, type | FunctionType):
        return f"{holder.__module__}.{holder.__qualname__}"
    for owner in gc.get_referrers(holder) if depth else ():
        if isinstance(owner, ModuleType | type | FunctionType | dict | tuple | CellType):
            return _name(owner, depth - 1)
    return f"a {type(holder).__name__}"
