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
    --global-batch-size 8 --bf16
""")
PIPELINE = [*FLAGS, "--pipeline-model-parallel-size", "2"]
DEVICES, CLUSTER = 1, "generic"


def parts_of_the_first_rank():
    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.count.parts import parts

    return parts(jobs.Job(PIPELINE).settings(None, 4).args, load_cluster(CLUSTER))


def kept_by_a_micro_batch():
    """Bytes between two forwards of the first pipeline rank in a step of the whole job."""
    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.count.recorder import record
    from mindspeed.planner.count.recording import Part, Point

    found = record(jobs.Job(PIPELINE), Point({}, 4, 0), load_cluster(CLUSTER))
    first, second = (place.op for place in found.row[:2])
    assert (first, second) == ("F", "F")
    blocks = (block for block in found.blocks if block.action == (block.part is not Part.GAP))
    return sum(block.net for block in blocks)


def composed(words):
    """Seconds and bytes of a command line, as ``mindspeed plan --check`` composes them."""
    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.compose.compose import compose

    job, cluster = jobs.Job(words), load_cluster(CLUSTER)
    found = compose(job, job.settings(None, DEVICES).args, cluster, cluster.memory_limit)
    return found.prediction.seconds, found.prediction.peak_bytes, found.check.fits


def test_a_changed_job_has_the_words_of_its_flags():
    job = jobs.Job([*FLAGS, "--seed", "1"])
    changed = job.changed({"seed": 2, "overlap_grad_reduce": True})
    assert set(changed.argv) - set(job.argv) == {"--seed=2", "--overlap-grad-reduce"}
    assert "--seed" not in changed.argv
    assert set(changed.flags({"seed": 3})) - set(changed.argv) == {"--seed=3"}
    assert job.argv[-2:] == ("--seed", "1") and job.changed({}) is job


@pytest.mark.slow
@pytest.mark.usefixtures("imported_ahead")
def test_what_layers_keep_adds_up_to_a_micro_batch():
    found = isolated.call(parts_of_the_first_rank)
    of_step = {part.name: part.of_step for part in found}
    assert of_step == {
        "chunk 0": False, "chunk 0, layers 1-2": False, "gradients": True, "optimizer": True,
    }  # fmt: skip
    kept = sum(part.count * (part.kept or 0) for part in found)
    # The rank has the tokens, too, and an element of what it sent on.
    assert kept == pytest.approx(isolated.call(kept_by_a_micro_batch), abs=4 * 64 * 8 + 2)


@pytest.mark.slow
@pytest.mark.usefixtures("imported_ahead")
def test_changes_do_what_is_promised(tmp_path):
    """The commands that it prints are composed anew, as ``mindspeed plan --check`` does."""
    words = ["explain", "--json", "--cluster", CLUSTER, "--devices", str(DEVICES), "--", *FLAGS]
    status, text, errors = isolated.call(commands_job.run, words, str(tmp_path))
    assert status == 0, errors
    found = json.loads(text)
    assert 1 <= len(found["helpful"]) <= 3 and found["fits"]
    best = found["helpful"][0]
    command = shlex.split(best["command"])
    assert command[:2] == ["mindspeed", "pretrain"]
    seconds, peak, fits = isolated.call(composed, command[2:])
    assert fits and seconds < found["time"]["seconds"]
    assert (seconds, peak) == pytest.approx((best["seconds"], best["peak_bytes"]), rel=1e-9)
    skipped = {one["what"]: one["skipped"] for one in found["tried"]}
    assert skipped["all layers are computed again"] == "only saves memory, and the job fits"
