"""``--disable-gloo-group`` with an unmodified ``pretrain_gpt.py``: the same losses and file."""

from __future__ import annotations

import pytest

from tests.megatron_lm.launch import pretrain
from tests.megatron_lm.test_matrix import MODEL, TRAINING

pytestmark = [pytest.mark.slow, pytest.mark.megatron_lm]

STAGED = "--disable-gloo-group --hccl-slice-size 4096"


def test_legacy_checkpoints_are_written_and_read_without_gloo(tmp_path):
    base = f"{MODEL} {TRAINING} --bf16 --use-distributed-optimizer --ckpt-format torch"
    runs, files = {}, {}
    for name, flags in {"gloo": "", "staged": STAGED}.items():
        save = f"--save {tmp_path / name} --save-interval 2 {flags}"
        runs[name] = pretrain(tmp_path, 2, *f"{base} {save}".split())
        (file,) = (tmp_path / name / "iter_0000002").rglob("distrib_optim.pt")
        files[name] = file.read_bytes()
    assert runs["staged"].losses == runs["gloo"].losses
    assert files["staged"] == files["gloo"]
    (tmp_path / "gloo" / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = pretrain(tmp_path, 2, *f"{base} --load {tmp_path / 'gloo'} {STAGED}".split())
    assert resumed.losses == runs["gloo"].losses[2:]
