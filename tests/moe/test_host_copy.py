"""Counts go to the host on a stream of their own, and the host waits right before it reads them."""

from __future__ import annotations

import contextlib

import pytest
import torch

from mindspeed.moe import host_copy
from mindspeed.moe.host_copy import HostCopy, ToHost


class Recorder:
    """A device with streams, and a collective, that say what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def has(self, capability: str) -> bool:
        return capability == "streams"

    def stream(self) -> Recorder:
        return self

    current_stream = stream

    @contextlib.contextmanager
    def use_stream(self, stream: Recorder):
        self.calls.append("side stream")
        yield
        self.calls.append("main stream")

    def wait_stream(self, other: Recorder) -> None:
        self.calls.append("wait for main stream")

    def event(self) -> Recorder:
        return self

    def record(self, stream: Recorder) -> None:
        self.calls.append("record")

    def synchronize(self) -> None:
        self.calls.append("host waits")

    def launch(self, x: torch.Tensor) -> tuple[torch.Tensor, Recorder]:
        self.calls.append("launch")
        return x * 2, self

    def wait(self) -> None:
        self.calls.append("wait for the collective")


@pytest.fixture
def recorder(monkeypatch):
    found = Recorder()
    monkeypatch.setattr(host_copy.device, "current", lambda: found)
    monkeypatch.setattr(host_copy, "_on_host", lambda x: False)
    monkeypatch.setattr(host_copy, "_pinned", lambda x: torch.empty_like(x))
    return found


def test_the_side_stream_waits_for_the_collective_and_the_host_for_the_copy(recorder):
    copy = HostCopy()
    _, work = ToHost(recorder, copy).launch(torch.arange(3))
    recorder.calls.append("permute")
    work.wait()
    recorder.calls.append("something")
    assert copy.get().tolist() == [0, 2, 4]
    assert recorder.calls == [
        "launch", "permute", "side stream", "wait for the collective", "record", "main stream",
        "something", "host waits",
    ]  # fmt: skip
    copy.get()  # a second reader does not wait
    assert recorder.calls[-1] == "host waits"
    assert recorder.calls.count("host waits") == 1


def test_without_a_collective_it_waits_for_what_computes_the_tensor(recorder):
    copy = HostCopy()
    copy.start(torch.arange(2))
    assert recorder.calls == ["side stream", "wait for main stream", "record", "main stream"]
    assert copy.get().tolist() == [0, 1]


def test_on_the_host_there_is_nothing_to_copy():
    copy = HostCopy()
    x = torch.arange(2)
    copy.start(x)
    assert copy.get() is x
