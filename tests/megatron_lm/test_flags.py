"""The share of Megatron-LM's command line that ``mindspeed pretrain`` accepts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.megatron_lm
ROOT = Path(__file__).resolve().parents[2]


def test_four_of_five_flags_of_training_are_accepted(megatron_lm):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "megatron_flags.py")],
        env=os.environ | {"MEGATRON_LM_PATH": str(megatron_lm), "MINDSPEED_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    found = re.search(r"training of GPT-style models: (\d+) of (\d+) flags", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) / int(found[2]) >= 0.8
