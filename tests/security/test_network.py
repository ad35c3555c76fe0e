"""A single-node run cannot be reached from outside the machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mindspeed.training.launch import run_ranks
from tests.security import listening_rank

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the sockets from /proc")
def test_ranks_and_launcher_listen_on_the_loopback_interface_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, listening_rank.__file__, str(tmp_path)]
    assert run_ranks(command, 2) == 0
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["launcher"] and found["rank"], "nothing listens: the test looks at nothing"
        assert set(found["launcher"] + found["rank"]) <= LOOPBACK
