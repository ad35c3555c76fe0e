"""``mindspeed explain``: figures of layers add up, and its changes do what they promise."""

from __future__ import annotations

import json
import shlex

import pytest

from tests.support import commands_job
from tests.support.lazy import Lazy, needs

needs("megatron.core")

isolated = Lazy("mindspeed.planner.isolated")
jobs = Lazy("mindspeed.planner.job")

FLAGS = shlex.split("""
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 128
    --max-position-embeddings 64 --tokenizer-type NullTokenizer --micro-batch-size 1
    --global-batch-size 8 --bf16 --pipeline-model-parallel-size 2
""")
DEVICES, CLUSTER = 4, "generic"


def kept_by_a_micro_batch(stage):
    """Bytes between two forwards of a pipeline rank in a step of the whole job."""
    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.pieces import kept
    from mindspeed.planner.tiny_run import Point, run

    return kept(run(jobs.Job(FLAGS), Point({}, DEVICES, stage), load_cluster(CLUSTER)))


def composed(words):
    """Seconds and bytes of a command line, as ``mindspeed plan --check`` composes them."""
    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.composed import compose

    job, cluster = jobs.Job(words), load_cluster(CLUSTER)
    found = compose(job, job.settings(None, DEVICES).args, cluster, cluster.memory_limit)
    return found.prediction.seconds, found.prediction.peak_bytes, found.check.fits


def test_a_changed_job_has_the_words_of_its_flags():
    from mindspeed.planner.explain import changed_job

    job = jobs.Job([*FLAGS, "--seed", "1"])
    changed = changed_job(job, {"seed": 2, "overlap_grad_reduce": True})
    assert set(changed.argv) - set(job.argv) == {"--seed=2", "--overlap-grad-reduce"}
    assert "--seed" not in changed.argv
    assert set(changed.flags({"seed": 3})) - set(changed.argv) == {"--seed=3"}
    assert job.argv[-2:] == ("--seed", "1") and changed_job(job, {}) is job


@pytest.mark.slow
def test_layers_add_up_and_changes_do_what_is_promised(tmp_path):
    import mindspeed.megatron_adaptor  # noqa: F401 - before megatron.core

    words = ["explain", "--json", "--cluster", CLUSTER, "--devices", str(DEVICES), "--", *FLAGS]
    status, text, errors = isolated.call(commands_job.run, words, str(tmp_path))
    assert status == 0, errors
    found = json.loads(text)
    first = found["parts"]["0"]
    assert {part["name"] for part in first} >= {"chunk 0", "chunk 0, layers 1-2", "optimizer"}
    [layers] = [part for part in first if part["count"] == 2]
    assert layers["kept"] > 0 and not layers["of_step"]
    kept = sum(part["count"] * (part["kept"] or 0) for part in first)
    # The rank has the tokens, too, and an element of what it sent on.
    assert kept == pytest.approx(isolated.call(kept_by_a_micro_batch, 0), abs=4 * 64 * 8 + 2)
    assert 1 <= len(found["helpful"]) <= 3 and found["fits"]
    for one in found["helpful"][:2]:
        command = shlex.split(one["command"])
        assert command[:2] == ["mindspeed", "pretrain"]
        seconds, peak, fits = isolated.call(composed, command[2:])
        assert fits and seconds < found["time"]["seconds"]
        assert (seconds, peak) == pytest.approx((one["seconds"], one["peak_bytes"]), rel=1e-9)
    skipped = {one["what"]: one["skipped"] for one in found["tried"]}
    assert skipped["all layers are computed again"] == "only saves memory, and the job fits"
