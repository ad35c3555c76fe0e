"""The patch engine: contracts, stacking, dispatchers, waiting for imports, exact undo."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
import weakref

import pytest
from packaging.version import Version

from mindspeed.adaptor.importing import PostImportHooks, is_initializing
from mindspeed.adaptor.patch import Patch, PatchEngine
from mindspeed.adaptor.signatures import bind, fits, parameter_names
from mindspeed.errors import (
    PatchConflict,
    PatchTargetChanged,
    PatchTargetMissing,
    PatchTooLate,
)

SOURCE = """
def scale(x, factor=2):
    return x * factor

def rank():
    return 0

class Layer:
    def forward(self, x, mask=None):
        return x + 1

    @staticmethod
    def size(x):
        return len(x)
"""


@pytest.fixture
def library(monkeypatch):
    """Modules ``lib`` and ``user``; ``user`` took ``scale`` by value, under another name."""
    lib, user = types.ModuleType("lib"), types.ModuleType("user")
    exec(SOURCE, vars(lib))
    user.times = lib.scale
    monkeypatch.setitem(sys.modules, "lib", lib)
    monkeypatch.setitem(sys.modules, "user", user)
    return lib, user


@pytest.fixture
def engine():
    hooks = PostImportHooks()
    hooks.install()
    yield PatchEngine(hooks, Version("0.16.1"))
    hooks.uninstall()


def plus(amount):
    def make(original):
        def patched(*args, **kwargs):
            return original(*args, **kwargs) + amount

        return patched

    return make


def test_two_watchers_of_a_module_are_called_once_each(tmp_path, monkeypatch):
    (tmp_path / "watched_twice.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    called, watchers = [], [PostImportHooks(), PostImportHooks()]
    try:
        for watcher in watchers:
            watcher.install()
            watcher.when_imported("watched_twice", called.append)
        module = importlib.import_module("watched_twice")
        importlib.reload(module)
        assert called == [module, module]
    finally:
        for watcher in watchers:
            watcher.uninstall()
        sys.modules.pop("watched_twice", None)


def test_wrap_reaches_aliases_and_undo_restores_the_same_object(library, engine):
    lib, user = library
    original = lib.scale
    engine.add(Patch("lib:scale", plus(1), "f", expects="(x, factor)"))
    assert lib.scale(3) == user.times(3) == 7
    late = lib.scale  # taken after the patch
    engine.undo()
    assert lib.scale is user.times is original
    assert late(3) == 6


def test_a_function_taken_before_its_patch_is_patched(tmp_path, monkeypatch, engine):
    """As frameworks do: names bound at the head of a module, features chosen later."""
    (tmp_path / "prepared_library.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    engine.prepare(["prepared_library:scale", "prepared_library:absent", "not_imported:name"])
    import prepared_library

    held = {"closure": (lambda f: lambda x: f(x))(prepared_library.scale)}
    held["default"] = lambda x, f=prepared_library.scale: f(x)
    engine.add(Patch("prepared_library:scale", plus(1), "f", expects="(x, factor)"))
    assert [function(3) for function in held.values()] == [7, 7]
    engine.remove("f")
    assert [function(3) for function in held.values()] == [6, 6]
    engine.add(Patch("prepared_library:scale", lambda _: lambda x: 0, "g", kind="replace"))
    assert [function(3) for function in held.values()] == [0, 0]
    engine.undo()
    del sys.modules["prepared_library"]


@pytest.mark.slow
def test_another_engine_reaches_those_who_hold_the_dispatcher_of_the_first(library, engine):
    lib, _ = library
    engine.prepare(["lib:scale"])
    taken = lib.scale
    engine.undo()
    other = PatchEngine(engine._hooks, None)
    other.add(Patch("lib:scale", plus(1), "f"))
    assert taken(3) == lib.scale(3) == 7
    other.undo()


class _Holder:
    """Takes a function as a framework's class may."""


@pytest.mark.slow
def test_a_function_held_where_no_name_can_be_changed_is_refused_with_the_holder(library, engine):
    lib, user = library
    user.call = (lambda f: lambda x: f(x))(lib.scale)
    _Holder.scale = staticmethod(lib.scale)
    try:
        engine.prepare(["lib:scale", "lib:rank"])
        engine.add(Patch("lib:rank", plus(1), "f"))
        with pytest.raises(
            PatchTooLate, match=r"'f' wraps lib:scale, which .*\._Holder, .*lambda.* took"
        ):
            engine.add(Patch("lib:scale", plus(1), "f"))
        assert lib.scale(3) == 6
    finally:
        del _Holder.scale


def test_wraps_stack_in_the_order_of_addition_innermost_first(library, engine):
    lib, _ = library
    engine.add(Patch("lib:scale", plus(1), "inner"))
    engine.add(Patch("lib:scale", lambda f: lambda *a: f(*a) * 10, "outer"))
    assert lib.scale(3) == 70
    assert [patch.owner for patch in engine.stacks()["lib:scale"][0]] == ["inner", "outer"]
    engine.remove("inner")
    assert lib.scale(3) == 60
    engine.remove("outer")
    assert lib.scale(3) == 6
    assert engine.stacks() == {}


def test_method_and_static_method_patches_keep_their_kind(library, engine):
    lib, _ = library
    raw = vars(lib.Layer)["size"]
    engine.add(Patch("lib:Layer.forward", plus(1), "f", expects="(self, x, ...)"))
    engine.add(Patch("lib:Layer.size", plus(1), "f", expects="(x)"))
    assert lib.Layer().forward(1) == 3
    assert lib.Layer.size("ab") == lib.Layer().size("ab") == 3
    engine.undo()
    assert vars(lib.Layer)["size"] is raw


def test_missing_target_names_owner_version_and_the_closest_name(library, engine):
    with pytest.raises(
        PatchTargetMissing, match=r"'f' wraps lib:Layer.forwards.*0\.16\.1.*forward"
    ):
        engine.add(Patch("lib:Layer.forwards", plus(1), "f"))
    assert engine.stacks() == {}


def test_changed_signature_is_refused_and_nothing_is_patched(library, engine):
    lib, _ = library
    with pytest.raises(PatchTargetChanged, match=r"lib:scale\(x, amount\).*lib:scale\(x, factor\)"):
        engine.add(Patch("lib:scale", plus(1), "f", expects="(x, amount)"))
    assert lib.scale(3) == 6


def test_second_replacement_of_a_target_is_a_conflict(library, engine):
    engine.add(Patch("lib:scale", lambda _: lambda x: 0, "ring", kind="replace"))
    with pytest.raises(PatchConflict, match=r"already replaced by 'ring'.*'adaptive'"):
        engine.add(Patch("lib:scale", lambda _: lambda x: 1, "adaptive", kind="replace"))


def test_define_refuses_an_existing_name_and_is_removed_by_undo(library, engine):
    lib, _ = library
    with pytest.raises(PatchConflict, match="exists already"):
        engine.add(Patch("lib:scale", lambda _: 1, "f", kind="define"))
    engine.add(Patch("lib:extra", lambda _: 5, "f", kind="define"))
    assert lib.extra == 5
    engine.undo()
    assert not hasattr(lib, "extra")


def test_patch_outside_its_version_range_is_left_out(library, engine):
    lib, _ = library
    engine.add(Patch("lib:scale", plus(1), "f", versions=">=0.17"))
    assert lib.scale(3) == 6
    assert engine.stacks() == {}


def test_patch_waits_for_the_import_of_its_module(tmp_path, monkeypatch, engine):
    (tmp_path / "later_module.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    engine.add(Patch("later_module:scale", plus(1), "f", expects="(x, ...)"))
    assert "later_module" not in sys.modules
    import later_module

    assert later_module.scale(3) == 7
    engine.undo()
    assert later_module.scale(3) == 6
    del sys.modules["later_module"]


def test_patch_taken_back_before_the_import_never_applies(tmp_path, monkeypatch, engine):
    (tmp_path / "never_patched.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    engine.add(Patch("never_patched:scale", plus(1), "f"))
    engine.remove("f")
    import never_patched

    assert never_patched.scale(3) == 6
    del sys.modules["never_patched"]


@pytest.mark.parametrize(
    ("expected", "good"),
    [("(a, b)", True), ("(a, ...)", True), ("(...)", True), ("(a)", False), ("(b, ...)", False)],
)
def test_signature_contract(expected, good):
    assert fits(expected, ["a", "b"]) is good


def test_arguments_are_bound_by_name_with_defaults():
    def function(a, b=2, *, c=3):
        return a, b, c

    assert parameter_names(function) == ["a", "b", "c"]
    assert bind(function, (1,), {"c": 4}) == {"a": 1, "b": 2, "c": 4}


def test_a_signature_is_read_once_and_keeps_nothing_alive(monkeypatch):
    class Layer:
        def forward(self, x):
            return x

    read, signature = [], inspect.signature
    monkeypatch.setattr(inspect, "signature", lambda one: (read.append(one), signature(one))[1])
    layer = Layer()
    for x in (1, 2):
        assert bind(Layer.forward, (layer, x), {}) == {"self": layer, "x": x}
        assert bind(layer.forward, (x,), {}) == {"x": x}
    assert read.count(Layer.forward) == 1
    del read[:]
    kept = weakref.ref(layer)
    del layer
    assert kept() is None


def test_asking_whether_a_module_is_initialising_imports_nothing():
    """As torch_npu's packages, which import what is asked of them."""

    class Lazy(types.ModuleType):
        def __getattribute__(self, name):
            if name == "__spec__":
                raise ImportError("a library that is not there")
            return super().__getattribute__(name)

    assert not is_initializing(Lazy("lazy_package"))
    module = types.ModuleType("at_work")
    module.__spec__ = types.SimpleNamespace(_initializing=True)
    assert is_initializing(module)
