"""The one import line in a script for GPUs that nobody has changed: it trains here, as on a GPU.

The script (:mod:`tests.megatron_lm.core_script`) needs the wheel of megatron.core only. Its model,
data and seeds are those of ``pretrain_gpt.py`` with the flags of :data:`trainer_job.TINY`, so its
losses are those that Megatron-LM printed; our trainer prints the same digits on the same machine
(``tests/training/test_parity.py``).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mindspeed.testing import RankError
from tests.megatron_lm import core_job
from tests.support import trainer_job
from tests.support.lazy import needs
from tests.support.megatron_lm_reference import LAYOUTS, as_printed, assert_losses, assert_norms

needs("megatron.core")

SCRIPT = Path(__file__).with_name("core_script.py")
ADAPTOR_LINE = "import mindspeed.megatron_adaptor\n"
FLAGS = {
    "tensor-2-sequence-parallel-transformer-engine": "--tensor-model-parallel-size=2",
    "pipeline-2": "--pipeline-model-parallel-size=2",
    "data-2-distributed-optimizer": "--use-distributed-optimizer",
}
SLOW = {"pipeline-2", "data-2-distributed-optimizer"}


@pytest.mark.weekly_cases("pipeline-2")
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FLAGS]
)
def test_with_the_import_line_it_prints_the_losses_of_megatron_lm(layout, ranks, tmp_path):
    script, losses = tmp_path / "script.py", tmp_path / "losses.json"
    lines = SCRIPT.read_text().splitlines(keepends=True)
    lines.insert(lines.index("import torch\n") + 1, ADAPTOR_LINE)
    script.write_text("".join(lines))
    # The quick case imports everything in the order of the script; the others find it imported.
    setup = trainer_job.SETUP if layout in SLOW else ""
    words = [FLAGS[layout], f"--losses={losses}"]
    ranks(2, core_job.run, str(script), words, setup=setup, backend=None)
    steps = json.loads(losses.read_text())
    assert len(steps) == 6
    assert_losses(as_printed([loss for loss, _ in steps]), layout)
    assert_norms([norm for _, norm in steps], layout)

    world_size, flags, _, _ = LAYOUTS[layout]
    file = tmp_path / "metrics.jsonl"
    flags = [*flags, "--metrics-file", str(file)]
    job = trainer_job.train, flags, trainer_job.whole_mock_data
    trained = ranks(world_size, *job, setup=trainer_job.SETUP, backend=None)
    assert {result["error"] for result in trained} == {None}
    ours = [(record["lm_loss"], record["grad_norm"]) for record in trainer_job.metrics(file)]
    # The same operations of the same processor; only the last bits of a mean are taken otherwise.
    torch.testing.assert_close(torch.tensor(steps), torch.tensor(ours), rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which it just runs")
def test_without_the_import_line_it_needs_a_gpu(ranks, tmp_path):
    with pytest.raises(RankError, match=r"torch\.cuda\.set_device"):
        ranks(1, core_job.run, str(SCRIPT), [f"--losses={tmp_path / 'losses'}"], backend=None)
