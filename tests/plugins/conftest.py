"""``packages(name, modules, entry_points)`` installs a package for one test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.packages import forget, install


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """``packages(name, modules, entry_points, version="1.0")``; its modules are importable."""
    site = tmp_path / "site-packages"
    monkeypatch.syspath_prepend(str(site))
    before = set(sys.modules)

    def package(name: str, modules: Mapping[str, str], *args: Any, **kwargs: Any) -> None:
        for module in modules:  # the examples of the documentation have one of the same name
            monkeypatch.delitem(sys.modules, module, raising=False)
        install(site, name, modules, *args, **kwargs)
        forget()

    yield package
    forget()
    for name in set(sys.modules) - before:
        if str(site) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]
