"""Pytest plugin that lives in every rank of a Megatron-LM test file and reports to the nursery.

It leaves out the tests that are already done or mean nothing here, says when each test starts and
ends, and keeps the tests from reaching for the network.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import time
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

TRACEBACK_TAIL = 6000
CUDA_WHEELS = {  # package: where Megatron keeps its version
    "flash_attn": "_fa_version",
    "mamba_ssm": "_mamba_ssm_version",
    "causal_conv1d": "_causal_conv1d_version",
}
Send = Callable[..., None]


class RankReporter:
    """One rank's side of the protocol: ("collected" | "start" | "result" | "end", ...)."""

    def __init__(
        self,
        send: Send,
        skip: Collection[str],
        only: Collection[str],
        excluded: Sequence[tuple[str, str]],
    ):
        self._send = send
        self._skip = set(skip)
        self._only = set(only)
        self._excluded = [(re.compile(pattern), reason) for pattern, reason in excluded]
        self._outcome: dict[str, Any] = {}
        self._started = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        meaningless, wanted = [], []
        for item in items:
            reason = self._reason_to_exclude(item.nodeid)
            if reason is not None:
                meaningless.append((item.nodeid, reason))
            elif item.nodeid not in self._skip and (not self._only or item.nodeid in self._only):
                wanted.append(item)
        items[:] = wanted
        self._send("collected", [item.nodeid for item in wanted], meaningless)

    def _reason_to_exclude(self, nodeid: str) -> str | None:
        for pattern, reason in self._excluded:
            if pattern.search(nodeid):
                return reason
        return None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._send("result", report.nodeid + "::<import>", _summary(report, 0.0))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: Any) -> None:
        # Megatron's CI runs tests marked experimental in a second pass with --experimental.
        item.config.option.experimental = item.get_closest_marker("experimental") is not None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._outcome = {"outcome": "passed"}
        self._started = time.monotonic()
        self._send("start", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed" and self._outcome["outcome"] != "failed":
            self._outcome = _summary(report, 0.0)
            if report.outcome == "failed":
                self._send("failing", report.nodeid, self._outcome)

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._outcome["seconds"] = round(time.monotonic() - self._started, 2)
        self._send("result", nodeid, self._outcome)

    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        self._send("end")


def _summary(report: Any, seconds: float) -> dict[str, Any]:
    """Outcome, last error line, where it was raised, and the tail of the traceback."""
    if report.outcome == "skipped":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        return {"outcome": "skipped", "error": _first_line(reason), "seconds": seconds}
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr)
    return {
        "outcome": "failed",
        "phase": getattr(report, "when", None) or "import",
        "error": _first_line(crash.message if crash else _last_error(text)),
        "where": _where(report.longrepr),
        "traceback": text[-TRACEBACK_TAIL:],
        "seconds": seconds,
    }


def _where(longrepr: Any) -> str:
    """File and line of the innermost frame outside installed packages."""
    entries = getattr(getattr(longrepr, "reprtraceback", None), "reprentries", [])
    places = [entry.reprfileloc for entry in entries if getattr(entry, "reprfileloc", None)]
    own = [place for place in places if "site-packages" not in str(place.path)]
    return f"{(own or places)[-1].path}:{(own or places)[-1].lineno}" if places else ""


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:400] if lines else "(no message)"


def _last_error(text: str) -> str:
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return lines[-1] if lines else text.strip().splitlines()[-1] if text.strip() else ""


def without_cuda_wheels() -> None:
    """Tells Megatron that a CUDA-only package that is not installed is too old.

    Test files ask for its version while they are collected, in the condition of a ``skipif``; the
    import error would take every other test of the file along.
    """
    utils: Any = sys.modules.get("megatron.core.utils")
    for package, cached in CUDA_WHEELS.items():
        if hasattr(utils, cached) and importlib.util.find_spec(package) is None:
            setattr(utils, cached, utils.PkgVersion("0"))


def offline() -> None:
    """Replaces the download of test assets by a refusal that the tests' conftest expects."""
    name = "tests.test_utils.python_scripts.download_unit_tests_dataset"

    def download_and_extract_asset(assets_dir: Any) -> bool:
        raise RuntimeError("this run has no network")

    module = types.ModuleType(name)
    module.download_and_extract_asset = download_and_extract_asset  # type: ignore[attr-defined]
    sys.modules[name] = module
