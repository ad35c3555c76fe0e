"""Do something around or right after the import of a module, without importing it.

The adaptor must not import Megatron itself (3 s, and it would freeze the import order), yet its
patches need Megatron's modules. So each pending patch names a module, and this meta path finder
calls back when somebody imports it.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import ModuleType

from mindspeed.errors import VersionError

Callback = Callable[[ModuleType], None]
Context = Callable[[], AbstractContextManager[object]]
ContextOfModule = Callable[[importlib.machinery.ModuleSpec], AbstractContextManager[object]]


class PostImportHooks:
    """A ``sys.meta_path`` finder that only watches; the ordinary finders do the finding."""

    def __init__(self) -> None:
        self._callbacks: dict[str, list[Callback]] = {}
        self._contexts: dict[str, list[Context]] = {}
        self._of_packages: list[tuple[str, ContextOfModule]] = []
        self._searching: set[str] = set()

    def install(self) -> None:
        """Start watching (idempotent)."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def uninstall(self) -> None:
        """Stop watching and forget all callbacks."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._callbacks.clear()
        self._contexts.clear()
        self._of_packages.clear()

    def around_import(self, module_name: str, context: Context) -> None:
        """Execute the module's body inside ``context()``, if it is not loaded already."""
        self._contexts.setdefault(module_name, []).append(context)

    def around_modules_of(self, package: str, context: ContextOfModule) -> None:
        """Execute the body of each module below ``package`` inside ``context(its spec)``."""
        self._of_packages.append((f"{package}.", context))

    def when_imported(self, module_name: str, callback: Callback) -> None:
        """Call ``callback(module)`` once, now if the module is loaded, else after its import."""
        module = sys.modules.get(module_name)
        if module is not None and not is_initializing(module):
            callback(module)
        else:
            self._callbacks.setdefault(module_name, []).append(callback)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module with the other finders and make its loader call us."""
        watched = name in self._callbacks or name in self._contexts
        if (
            not (watched or any(name.startswith(prefix) for prefix, _ in self._of_packages))
            or name in self._searching
        ):
            return None
        self._searching.add(name)
        try:
            spec = _find_with_the_others(self, name, path, target)
        finally:
            self._searching.discard(name)
        if spec is None or spec.loader is None:
            return None
        self._watch_exec(spec)
        return spec

    def _watch_exec(self, spec: importlib.machinery.ModuleSpec) -> None:
        loader = spec.loader
        original = loader.exec_module  # type: ignore[union-attr]

        def exec_module(module: ModuleType) -> None:
            # One module, one call. Watchers of the same module stand on one loader: the outer one
            # has removed the inner one's.
            vars(loader).pop("exec_module", None)
            with ExitStack() as stack:
                for prefix, of_module in self._of_packages:
                    if spec.name.startswith(prefix):
                        stack.enter_context(of_module(spec))
                for context in self._contexts.pop(spec.name, []):
                    stack.enter_context(context())
                original(module)
            for callback in self._callbacks.pop(spec.name, []):
                callback(module)

        loader.exec_module = exec_module  # type: ignore[union-attr,method-assign]


def refuse_late_import() -> None:
    """Refuse a Megatron that was imported before the Transformer Engine substitute is installed.

    Raises:
        VersionError: its module of Transformer Engine wrappers found no engine.
    """
    extension = sys.modules.get("megatron.core.extensions.transformer_engine")
    if extension is not None and not extension.HAVE_TE:
        raise VersionError(
            "import mindspeed.megatron_adaptor before megatron.core: "
            "megatron.core.extensions.transformer_engine is loaded already, without an engine"
        )


def model_parallel_is_initialized() -> bool:
    """Whether Megatron's parallel groups exist; False where Megatron is not imported."""
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    return parallel_state is not None and parallel_state.model_parallel_is_initialized()


def is_initializing(module: ModuleType) -> bool:
    """Whether the body of ``module`` has not run to its end."""
    # Not getattr(module, "__spec__"): packages that import lazily would start to import.
    spec = getattr(module, "__dict__", {}).get("__spec__")
    return bool(getattr(spec, "_initializing", False))


def _find_with_the_others(
    hooks: PostImportHooks,
    name: str,
    path: Sequence[str] | None,
    target: ModuleType | None,
) -> importlib.machinery.ModuleSpec | None:
    for finder in list(sys.meta_path):
        if finder is hooks or not hasattr(finder, "find_spec"):
            continue
        spec = finder.find_spec(name, path, target)
        if spec is not None:
            return spec
    return None
