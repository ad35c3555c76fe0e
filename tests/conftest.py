"""Fixtures of the whole test run: ``ranks(4, function, *args)`` runs a function on 4 gloo ranks."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from mindspeed.adaptor.importing import PostImportHooks
from mindspeed.testing import RankPool
from tests.support.lazy import HEAVY

SERVERS = "MINDSPEED_TEST_SERVERS"
"""Variable with the directory of the servers that all workers share."""

# How long an example takes depends on who else uses the machine.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """Refuse files of tests that import heavy packages when they are collected."""
    if found := [name for name in HEAVY if name in sys.modules]:
        raise pytest.UsageError(
            f"collecting the tests imported {', '.join(found)}: take tests.support.lazy.Lazy, or "
            "import in the test; `python -X importtime -m pytest -s --collect-only` shows who"
        )


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs, except from ``-m cuda``: what all other tests state holds on the CPU.

    All workers share their servers of ranks, each of which has imported for seconds.
    """
    if config.option.markexpr != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not hasattr(config, "workerinput"):
        os.environ[SERVERS] = tempfile.mkdtemp(prefix="ranks-", dir="/tmp")  # sockets: short paths


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the servers of ranks."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(SERVERS), ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--weekly``: the tests of this mark instead of all others."""
    parser.addoption("--weekly", action="store_true", help="the tests that are marked weekly")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose weekly tests or the others, mark slow cases, and put files with slow tests first.

    ``quick_cases`` and ``weekly_cases`` say which cases are slow or weekly. A weekly test that is
    named on the command line runs without ``--weekly``. Files with slow tests first: none of them
    then keeps one worker busy alone at the end, as pytest-xdist hands out files in this order with
    ``--no-loadscope-reorder``.
    """
    cases: Counter[str] = Counter()
    for item in items:
        limit = item.get_closest_marker("quick_cases")
        if limit is not None and item.get_closest_marker("slow") is None:
            test = item.nodeid.partition("[")[0]
            cases[test] += 1
            if cases[test] > limit.args[0]:
                item.add_marker(pytest.mark.slow)
    named = any("::" in argument for argument in config.args)
    _mark_weekly_cases(items, all_cases=not named)
    if not named:
        weekly = config.getoption("weekly")
        other = [item for item in items if bool(item.get_closest_marker("weekly")) != weekly]
        config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if bool(item.get_closest_marker("weekly")) == weekly]
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def _mark_weekly_cases(items: list[pytest.Item], *, all_cases: bool) -> None:
    """Mark the cases that ``weekly_cases`` names; one that names no case has been renamed."""
    patterns: dict[tuple[str, str], bool] = {}
    for item in items:
        limit = item.get_closest_marker("weekly_cases")
        test, _, case = item.nodeid.partition("[")
        for pattern in limit.args if limit else ():
            found = fnmatch.fnmatchcase(case.removesuffix("]"), pattern)
            patterns[test, pattern] = patterns.get((test, pattern), False) or found
            if found:
                item.add_marker(pytest.mark.weekly)
    lost = [f"{test}: {pattern!r}" for (test, pattern), found in patterns.items() if not found]
    if lost and all_cases:
        raise pytest.UsageError("weekly_cases without such a case: " + "; ".join(lost))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """``-n auto``: one worker more than cores, as ranks and launchers wait a fifth of the time."""
    return (os.cpu_count() or 1) + 1


@pytest.fixture(autouse=True, scope="session")
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory for temporary files of the tests and of all processes they start.

    Every process with Megatron imports wandb, which makes two directories that a rank that ends
    by ``os._exit`` leaves behind. pytest removes the directory with its base, of which it keeps
    three: here it would be too early, multiprocessing removes its own directory in it at exit.
    """
    folder = tmp_path_factory.mktemp("tmp")
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        yield folder
    tempfile.tempdir = before


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tensors here are tiny: a second thread only waits, the longer the busier the machine is."""
    torch.set_num_threads(1)


@contextlib.contextmanager
def _after_the_adaptor() -> Iterator[None]:
    import mindspeed.megatron_adaptor  # noqa: F401

    yield


@pytest.fixture(autouse=True, scope="session")
def adaptor_first() -> Iterator[None]:
    """Import Megatron after the adaptor in this process too, as every command does.

    Tests share the process: imported before it, Megatron has no Transformer Engine for any later
    test.
    """
    hooks = PostImportHooks()
    hooks.around_import("megatron.core", _after_the_adaptor)
    hooks.install()
    yield
    hooks.uninstall()


@pytest.fixture(scope="session")
def rank_pool(temporary_files: Path) -> Iterator[RankPool]:
    """One pool for the session; its servers start when a test first needs them."""
    with RankPool(shared=Path(os.environ[SERVERS])) as pool:
        yield pool


@pytest.fixture
def ranks(rank_pool: RankPool) -> Callable[..., list[Any]]:
    """``ranks(world_size, function, *args, setup="", timeout=60, env=None)``."""
    return rank_pool.run


@pytest.fixture(scope="session")
def npu_pool(temporary_files: Path) -> Iterator[RankPool]:
    """Like `rank_pool`, with device npu: skips when the torch_npu wheel is not available."""
    from tests.npu_emulator import fixtures

    with fixtures.npu_pool(Path(os.environ[SERVERS])) as pool:
        yield pool


@pytest.fixture
def npu_ranks(npu_pool: RankPool) -> Callable[..., list[Any]]:
    """``npu_ranks(world_size, function, *args)``: ranks whose tensors can be on device npu."""
    return functools.partial(npu_pool.run, setup="tests.npu_emulator.preload")


@pytest.fixture
def npu(npu_ranks: Callable[..., list[Any]]) -> Callable[..., Any]:
    """``npu(function, *args)``: one process with an emulated NPU and no process group."""

    def run(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return npu_ranks(1, function, *args, **{"backend": None, **options})[0]

    return run


@pytest.fixture(scope="session")
def megatron_lm() -> Path:
    """Root of a Megatron-LM checkout, named by MEGATRON_LM_PATH."""
    path = os.environ.get("MEGATRON_LM_PATH")
    if not path:
        pytest.skip("set MEGATRON_LM_PATH to a Megatron-LM checkout to run this test")
    return Path(path)
