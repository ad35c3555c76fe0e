"""The original's patch manager: other code's patches by dotted names, on our patch engine.

    from mindspeed.patch_utils import MindSpeedPatchesManager
    MindSpeedPatchesManager.register_patch("megatron.core.utils.divide", divide_wrapper)
    MindSpeedPatchesManager.apply_patches()

A function whose name ends with ``wrapper`` or ``decorator`` gets the original and returns the new
one; anything else takes its place. What differs from the original: a target that does not exist is
an error, and so is one that a feature of this library replaces, whatever ``force_patch`` says.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar, Literal

from mindspeed.adaptor.patch import Patch, Place, replace_in_modules
from mindspeed.errors import PatchConflict, PatchTargetMissing
from mindspeed.session.session import Session, current, install

_WRAPPERS = ("wrapper", "decorator")


class RegisteredPatch:
    """What is registered for one name.

    Args:
        orig_func_name: ``package.module.function`` or ``package.module.Class.method``.
        new_func: The function or class in its place, or a wrapper; None changes nothing.
        create_dummy: Where the name does not exist, define it; without a ``new_func`` as a function
            that raises when it is called.

    Attributes:
        orig_module_name: What holds the name, a module or a class.
        orig_func_name: The last part of the name.
        orig_func: The original, once the patch has been applied; None before and for a new name.
        patch_func: The replacement, or None.
        wrappers: Innermost first.
    """

    def __init__(
        self, orig_func_name: str, new_func: Any = None, create_dummy: bool = False
    ) -> None:
        self.name = orig_func_name
        self.orig_module_name, _, self.orig_func_name = orig_func_name.rpartition(".")
        self.orig_func: Any = None
        self.patch_func: Any = None
        self.wrappers: list[Callable[[Any], Any]] = []
        self._create = create_dummy
        self._applied: tuple[Session, Any, list[Any]] | None = None
        self._held: tuple[Any, list[Place]] | None = None  # what modules hold instead of orig_func
        self.set_patch_func(new_func)

    @property
    def owner(self) -> str:
        """Who changes the target, for ``mindspeed patches`` and messages."""
        return f"register_patch {self.name}"

    def set_patch_func(self, new_func: Any = None, force_patch: bool = False) -> None:
        """Add a wrapper, or set the replacement.

        Raises:
            PatchConflict: Another replacement is registered, without ``force_patch``.
        """
        if new_func is None:
            return
        if getattr(new_func, "__name__", "").endswith(_WRAPPERS):
            if new_func not in self.wrappers:
                self.wrappers.append(new_func)
            return
        if self.patch_func not in (None, new_func) and not force_patch:
            raise PatchConflict(
                f"register_patch: {self.name} is already replaced by {self.patch_func!r}; "
                "register with force_patch=True to replace it anyway"
            )
        self.patch_func = new_func

    def is_applied(self) -> bool:
        """Whether the patch is in force; not after ``mindspeed.undo()``."""
        return self._applied is not None and self._applied[0] is current()

    def apply_patch(self) -> None:
        """Put what is registered in force; its module is imported.

        Raises:
            PatchTargetMissing: The name does not exist, without ``create_dummy``.
            PatchConflict: A feature or a repair of this library replaces it.
            PatchTooLate: Who took the function before cannot be reached.
        """
        session = install()
        if self._applied == (session, self.patch_func, self.wrappers):
            return
        self.remove_patch()
        holder, target = _find(self.name, session, self._create)
        if self.patch_func is None and not self.wrappers and hasattr(holder, self.orig_func_name):
            return
        kind: Literal["wrap", "replace", "define"] = "replace" if self.patch_func else "wrap"
        if not hasattr(holder, self.orig_func_name):
            kind = "define"
        session.engine.add(Patch(target, self._make, self.owner, self.name, kind))
        self._applied = session, self.patch_func, list(self.wrappers)
        self.orig_func = session.engine.original(target)
        if isinstance(holder, ModuleType) and isinstance(self.orig_func, type):
            # A function has a dispatcher, which all holders call; a class has none.
            new = getattr(holder, self.orig_func_name)
            places = replace_in_modules({id(self.orig_func): new}).get(id(self.orig_func), [])
            self._held = new, places

    def remove_patch(self) -> None:
        """Take it back, if it is in force; it stays registered."""
        if self._applied is not None:
            self._applied[0].engine.remove(self.owner)
        if self._held is not None:
            new, places = self._held
            for module, name in places:
                if vars(module).get(name) is new:
                    setattr(module, name, self.orig_func)
        self._applied = self._held = None

    def _make(self, original: Any) -> Any:
        value = original if self.patch_func is None else self.patch_func
        if value is None:
            value = functools.partial(_absent, self.name)
        for wrapper in self.wrappers:
            value = wrapper(value)
        return value


class MindSpeedPatchesManager:
    """All patches that other code registers in this process.

    Attributes:
        patches_info: By name, those of this library's features and repairs not included
            (``mindspeed patches`` lists them).
    """

    patches_info: ClassVar[dict[str, RegisteredPatch]] = {}

    @staticmethod
    def register_patch(
        orig_func_name: str,
        new_func: Any = None,
        force_patch: bool = False,
        create_dummy: bool = False,
    ) -> None:
        """Register a patch, which :meth:`apply_patches` puts in force.

        Args:
            orig_func_name: As in :class:`RegisteredPatch`, like the next and the last.
            new_func: A wrapper is added to those there are.
            force_patch: Drop another replacement that is registered.
            create_dummy: Of the first registration of a name.

        Raises:
            PatchConflict: Another replacement is registered.
        """
        patches = MindSpeedPatchesManager.patches_info
        if orig_func_name in patches:
            patches[orig_func_name].set_patch_func(new_func, force_patch)
        else:
            patches[orig_func_name] = RegisteredPatch(orig_func_name, new_func, create_dummy)

    @staticmethod
    def apply_patches() -> None:
        """Put all that is registered in force; errors are those of a single patch."""
        for patch in MindSpeedPatchesManager.patches_info.values():
            patch.apply_patch()

    @staticmethod
    def remove_patches() -> None:
        """Take all back and forget them."""
        for patch in MindSpeedPatchesManager.patches_info.values():
            patch.remove_patch()
        MindSpeedPatchesManager.patches_info.clear()


def _absent(name: str, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(f"{name} does not exist here; register_patch made the name only")


def _find(name: str, session: Session, create: bool) -> tuple[Any, str]:
    """What holds the name, and the target of the engine; imports the module."""
    parts = name.split(".")
    ends = range(len(parts) - 1, 0, -1)
    module = next((one for end in ends if (one := _imported(".".join(parts[:end])))), None)
    inside = parts[len(module.__name__.split(".")) if module else 0 :]
    while create and len(inside) > 1 and not hasattr(module, inside[0]):
        module, inside = _new_module(module, inside[0], session), inside[1:]
    holder: Any = module
    for part in inside[:-1]:
        holder = getattr(holder, part, None)
    if module is None or holder is None or not (create or hasattr(holder, inside[-1])):
        where = f"module {module.__name__} has no" if module else "there is no package"
        raise PatchTargetMissing(f"register_patch: {name}: {where} {'.'.join(inside)}")
    return holder, f"{module.__name__}:{'.'.join(inside)}"


def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise  # it is there, and imports what is not


def _new_module(parent: ModuleType | None, name: str, session: Session) -> ModuleType:
    """An empty module, which ``mindspeed.undo()`` takes away."""
    module = ModuleType(f"{parent.__name__}.{name}" if parent else name)
    module.__path__ = []
    session.journal.set_module(module.__name__, module, owner="register_patch")
    if parent is not None:
        session.journal.set(parent, name, module, owner="register_patch")
    return module
