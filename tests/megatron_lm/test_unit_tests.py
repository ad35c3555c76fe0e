"""Megatron-LM's own unit tests of tensor parallelism pass with every feature of it switched on.

Features attach before Megatron's process groups exist, as they do in training; the tests then make
groups of 1 to 8 ranks and linear layers of many kinds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron_lm.launch import megatron_checkout

pytestmark = [pytest.mark.slow, pytest.mark.megatron_lm]

TOOL = Path(__file__).parents[2] / "tools" / "megatron_tests.py"
SEQUENCE = {"tensor_model_parallel_size": 8, "sequence_parallel": True, "seq_length": 64}
LEVEL_2 = {
    "optimize_recomp_communication_level": 2,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
FEATURES = {
    "coc-mlp-fusion": {
        "use_ascend_coc": True,
        "coc_parallel_num": 2,
        "mlp_layer_fusion": True,
        "disable_gloo_group": True,
        "swiglu": True,
    },
    "mc2-recompute-communication": {"use_ascend_mc2": True, **LEVEL_2},
    "2d": {
        "tp_2d": True,
        "tp_x": 4,
        "tp_y": 2,
        "sequence_parallel": False,
        "num_attention_heads": 8,
        "ffn_hidden_size": 64,
        "hidden_size": 64,
    },
    "unaligned": {
        "unaligned_linear": True,
        "num_attention_heads": 25,
        "ffn_hidden_size": 99,
        "seq_length": 1025,
    },
}
OTHER_SIZES = {"2d": 20}
"""Tests that make groups of another tensor-parallel size, which a grid of 4 x 2 ranks refuses."""
ADAPTOR = """
import mindspeed.megatron_adaptor
from mindspeed import session

session.install().configure({!r})
"""


@pytest.mark.parametrize("name", FEATURES)
def test_tensor_parallel_tests_pass(name, tmp_path):
    """27 tests; with failures the table of the tool names them."""
    (tmp_path / "with_features.py").write_text(ADAPTOR.format({**SEQUENCE, **FEATURES[name]}))
    paths = (str(TOOL.parents[1]), str(tmp_path), os.environ.get("PYTHONPATH"))
    results = tmp_path / "results.jsonl"
    command = [sys.executable, str(TOOL), "--megatron", str(megatron_checkout())]
    command += ["--world-size", "8", "--select", "tensor_parallel", "--json", str(results)]
    done = subprocess.run(
        [*command, "--adaptor", "with_features"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in results.read_text().splitlines()]
    found = [result for result in found if "outcome" in result]
    failed = [result for result in found if result["outcome"] != "passed"]
    assert len(found) == 27 and len(failed) == OTHER_SIZES.get(name, 0), done.stdout
    for result in failed:
        assert "--tp-x 4 * --tp-y 2 = 8 must be the tensor-parallel size" in result["error"]
