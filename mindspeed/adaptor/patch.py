"""Patches with a contract.

A :class:`Patch` says which name it changes (``"module:qualified.name"``), how (``wrap`` what is
there, ``replace`` it, or ``define`` a new name), which signature it was written for, and whose it
is. The :class:`PatchEngine` applies it as soon as the module is imported, replaces every alias that
other Megatron modules took with ``from x import y``, and can take everything back. A target that is
missing or looks different is an error with the owner, the target and the installed version in it;
nothing is ever patched silently.

Several wraps of one target stack in the order in which they were added, innermost first; two
replacements of one target are a conflict.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mindspeed.adaptor.aliases import AliasSearch
from mindspeed.adaptor.importing import PostImportHooks
from mindspeed.adaptor.signatures import check_signature
from mindspeed.errors import PatchConflict, PatchTargetMissing

Kind = Literal["wrap", "replace", "define"]
_ABSENT = object()


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
    expects: str | Mapping[str, str] | None = None
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
            if version is None or SpecifierSet(versions, prereleases=True).contains(version):
                return signature
        return None

    def applies_to(self, version: Version | None) -> bool:
        """Whether the target is claimed to exist in this megatron-core version."""
        return version is None or SpecifierSet(self.versions, prereleases=True).contains(version)


@dataclass
class _Target:
    """What is known of one patched name: where it lives, the original, and the stack on it."""

    leaf: str
    patches: list[Patch] = field(default_factory=list)
    holder: Any = None  # the module or class, once loaded
    original: Any = _ABSENT  # the raw entry of vars(holder): a descriptor for static methods
    current: Any = _ABSENT


class PatchEngine:
    """Applies patches when their modules appear, and takes them back.

    Args:
        hooks: told which modules to wait for.
        version: the installed megatron-core.
        holds_aliases: which loaded modules are searched for ``from x import y`` copies.
    """

    def __init__(
        self,
        hooks: PostImportHooks,
        version: Version | None,
        holds_aliases: Callable[[ModuleType], bool],
    ) -> None:
        self._hooks = hooks
        self._version = version
        self._aliases = AliasSearch(holds_aliases)
        self._targets: dict[str, _Target] = {}
        # id of an object that was taken from its target -> the object, its module and name there.
        self._taken: dict[int, tuple[Any, ModuleType, str]] = {}
        self._batches = 0

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Replace the aliases of all patches added and removed inside in one search at the end.

        The search looks at every name of hundreds of modules. Until then only the names in the
        modules that define the targets are patched.
        """
        self._batches += 1
        try:
            yield
        finally:
            self._batches -= 1
            if not self._batches:
                self._replace_aliases()

    def add(self, patch: Patch) -> None:
        """Apply ``patch`` now, or as soon as its module is imported; once, however often added.

        Raises:
            PatchConflict: another owner replaces the same target.
            PatchTargetMissing, PatchTargetChanged: the module is loaded and does not fit.
        """
        if not patch.applies_to(self._version):
            return
        leaf = patch.qualname.rpartition(".")[2]
        target = self._targets.setdefault(patch.target, _Target(leaf))
        if patch in target.patches:
            return
        _check_conflict(patch, target.patches)
        target.patches.append(patch)
        try:
            if target.holder is not None:
                self._rebuild(target)
            elif len(target.patches) == 1:
                self._hooks.when_imported(patch.module, functools.partial(self._attach, target))
        except Exception:
            target.patches.remove(patch)
            raise

    def remove(self, owner: str) -> None:
        """Take back all patches of ``owner``; those of others on the same targets stay."""
        with self.batch():
            for name, target in list(self._targets.items()):
                kept = [patch for patch in target.patches if patch.owner != owner]
                if len(kept) == len(target.patches):
                    continue
                target.patches = kept
                if target.holder is not None:
                    self._rebuild(target)
                if not kept:
                    del self._targets[name]

    def undo(self) -> None:
        """Take back everything."""
        with self.batch():
            for target in self._targets.values():
                target.patches = []
                if target.holder is not None:
                    self._rebuild(target)
        self._targets.clear()

    def index_aliases(self) -> None:
        """Search once for all processes forked from now on (:mod:`mindspeed.adaptor.aliases`)."""
        self._aliases.index()

    def stacks(self) -> dict[str, tuple[list[Patch], bool]]:
        """Target name -> (its patches, innermost first; whether its module is loaded)."""
        return {
            name: (list(target.patches), target.holder is not None)
            for name, target in sorted(self._targets.items())
        }

    def _attach(self, target: _Target, module: ModuleType) -> None:
        if not target.patches:  # undone before the module was imported
            return
        target.holder = self._find_holder(target.patches[0], module)
        target.original = target.current = vars(target.holder).get(target.leaf, _ABSENT)
        self._rebuild(target)

    def _find_holder(self, patch: Patch, module: ModuleType) -> Any:
        holder: Any = module
        for part in patch.qualname.split(".")[:-1]:
            if part not in vars(holder):
                raise self._missing(patch, holder, part)
            holder = vars(holder)[part]
        return holder

    def _rebuild(self, target: _Target) -> None:
        """Compose the stack anew on the original; put the result wherever the old one was."""
        value = target.original
        for patch in target.patches:
            value = self._make(patch, target, value)
        old, target.current = target.current, value
        if value is old:
            return
        if value is _ABSENT:
            delattr(target.holder, target.leaf)
        else:
            setattr(target.holder, target.leaf, value)
        if isinstance(target.holder, ModuleType) and callable(old) and value is not _ABSENT:
            self._taken[id(old)] = (old, target.holder, target.leaf)
            if not self._batches:
                self._replace_aliases()

    def _replace_aliases(self) -> None:
        """Put what a target holds now wherever a module holds what it held before."""
        current = {
            key: vars(module)[leaf]
            for key, (old, module, leaf) in self._taken.items()
            if vars(module).get(leaf, old) is not old
        }
        if current:
            self._aliases.replace(current)
        self._taken.clear()

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


def _check_conflict(patch: Patch, others: Iterable[Patch]) -> None:
    if patch.kind == "wrap":
        return
    for other in others:
        if other.kind != "wrap":
            raise PatchConflict(
                f"{patch.target} is already replaced by '{other.owner}'; "
                f"'{patch.owner}' cannot replace it too: switch one of them off"
            )
