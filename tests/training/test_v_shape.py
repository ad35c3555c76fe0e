"""The trainer with stages in a V, in waves or anywhere: losses, norms, checkpoints of one rank."""

from __future__ import annotations

import json

import pytest
import torch

from mindspeed.pipeline.schedule.csv_file import write_plan
from mindspeed.pipeline.schedule.placement import Placement
from tests.pipeline.any_order import greedy
from tests.support.trainer_job import SETUP
from tests.training.matrix_job import dry_run
from tests.training.one_rank import assert_same_training, column
from tests.training.test_layouts import MTP_TIED

SIZES = "--num-layers 8 --global-batch-size 8"
GQA = f"{SIZES} --group-query-attention --num-query-groups 4 --untie-embeddings-and-output-weights"
TIED = f"{SIZES} --group-query-attention --num-query-groups 4"
MOE = (
    f"{GQA} --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 64 "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none "
    "--moe-layer-freq [0,1,0,0,1,1,0,1]"
)
PP, PP4 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
DUALPIPEV = f"{PP} --schedules-method dualpipev"
ZB_V = f"{PP} --pipeline-schedule zb-v"
WAVE = f"{PP} --pipeline-schedule zb-wave --num-virtual-stages-per-pipeline-rank 4"
PAIRS = "--micro-batch-size 2"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
LAYOUTS = {
    "two ranks": (2, GQA, DUALPIPEV),
    "split": (2, GQA, f"{DUALPIPEV} --dualpipev-dw-detach"),
    "zb-v, two ranks": (2, GQA, ZB_V),
    "zb-v, local spec": (2, f"{GQA} --transformer-impl local", ZB_V),
    "zb-v, four ranks": (4, TIED, f"{PP4} --pipeline-schedule zb-v"),
    "zb-v, tensor, sequence": (
        4,
        TIED,
        f"{ZB_V} {PAIRS} --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "zb-v, data, overlap": (4, TIED, f"{ZB_V} {OVERLAP}"),
    "zb-v, context, experts": (4, MOE, f"{ZB_V} {PAIRS} --context-parallel-size 2"),
    "zb-v, mtp": (2, f"{SIZES} {MTP_TIED}", ZB_V),
    "local spec": (2, f"{GQA} --transformer-impl local", DUALPIPEV),
    "four ranks": (4, GQA, f"{PP4} --schedules-method dualpipev"),
    "tied": (2, TIED, DUALPIPEV),
    "tensor, sequence": (
        4,
        TIED,
        f"{DUALPIPEV} {PAIRS} --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "data, overlap": (4, TIED, f"{DUALPIPEV} {OVERLAP}"),
    "context": (4, GQA, f"{DUALPIPEV} {PAIRS} --context-parallel-size 2"),
    "experts": (4, MOE, f"{DUALPIPEV} --expert-model-parallel-size 2"),
    "mtp": (2, f"{SIZES} {MTP_TIED}", DUALPIPEV),
    "waves": (2, TIED, WAVE),
    "auto takes a V": (2, TIED, f"{PP} --pipeline-schedule auto --pipeline-memory-limit 1"),
    "waves, whole, experts, data": (4, MOE, f"{WAVE.replace('zb-', '')} {OVERLAP}"),
    "uneven": (2, MOE, f"{DUALPIPEV} --pipeline-model-parallel-layout E|tttt|t|tttL"),
}


# What halves of backward could change is daily with zb-v, what stages could change with dualpipev.
@pytest.mark.weekly_cases(
    *("zb-v, two ranks", "zb-v, four ranks", "zb-v, mtp", "local spec", "tied"),
    *("tensor, sequence", "data, overlap", "context"),
    "zb-v, local spec",
    "zb-v, tensor, sequence",
    "zb-v, data, overlap",
    "experts",
    "four ranks",
    "two ranks",
    "mtp",
    "uneven",
    "waves, whole, experts, data",
    "auto takes a V",
)
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_trains_like_one_rank(layout, one_rank):
    world_size, model, flags = LAYOUTS[layout]
    reference = one_rank(model)
    assert_same_training(reference.train(world_size, flags), reference.records)


RESHARDABLE = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
RESUMED = {
    "to one rank": ((2, 1), (DUALPIPEV, "")),
    "from one rank": ((1, 2), ("", DUALPIPEV)),
    "from waves": ((2, 1), (WAVE, "")),
    "to waves": ((2, 2), (f"{DUALPIPEV} {RESHARDABLE}", f"{WAVE} {RESHARDABLE}")),
    "to four ranks": ((2, 4), (DUALPIPEV, f"{PP4} --schedules-method dualpipev")),
    "to the loop": (
        (4, 2),
        (
            f"{DUALPIPEV} {RESHARDABLE}",
            f"{PP} --num-layers-per-virtual-pipeline-stage 2 {RESHARDABLE}",
        ),
    ),
}


@pytest.mark.weekly_cases(
    *(
        "tied-from one rank",
        "tied-to four ranks",
        "experts-to one rank",
        "experts-to the loop",
        "tied-to the loop",
        "experts-to four ranks",
        "tied-to one rank",
        "experts-from waves",
        "tied-to waves",
        "experts-to waves",
    )
)
@pytest.mark.slow
@pytest.mark.parametrize("change", RESUMED)
@pytest.mark.parametrize("model", [TIED, MOE], ids=["tied", "experts"])
def test_a_run_continues_with_other_stages(model, change, one_rank):
    """Weights and optimizer states go by the names of the whole model."""
    reference = one_rank(model)
    records = reference.resumed(*RESUMED[change])
    for name in ("lm_loss", "grad_norm"):
        expected = pytest.approx(
            column(reference.records, name)[2:], rel=1e-6 if name == "lm_loss" else 1e-4
        )
        assert column(records, name) == expected


@pytest.mark.slow
def test_validation_runs_forward_only(one_rank):
    reference = one_rank(TIED)
    flags = "--eval-iters 2 --eval-interval 2 --calculate-per-token-loss"
    losses = []
    for world_size, layout in ((1, ""), (2, DUALPIPEV)):
        reference.train(world_size, f"{flags} {layout}")
        records = (reference.directory / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(record).get("validation_loss") for record in records])
    assert any(losses[0])
    assert losses[1] == [loss and pytest.approx(loss, rel=1e-6) for loss in losses[0]]


@pytest.mark.slow
def test_a_schedule_in_a_file_trains_like_its_name(one_rank, tmp_path):
    file, reference = tmp_path / "plan.csv", one_rank(TIED)
    by_name = reference.train(2, f"{ZB_V} --pipeline-schedule-dump {file}")
    by_file = reference.train(2, f"{PP} --pipeline-schedule {file}")
    for name in ("lm_loss", "grad_norm"):
        assert column(by_file, name) == column(by_name, name)


@pytest.mark.slow
def test_a_file_with_stages_anywhere_trains_like_one_rank(one_rank, tmp_path):
    file, reference = tmp_path / "plan.csv", one_rank(GQA)
    write_plan(file, greedy(Placement(((1, 2, 4, 7), (0, 3, 5, 6))), 8))
    found = reference.train(2, f"{PP} --pipeline-schedule {file}")
    assert_same_training(found, reference.records)


def test_dry_run_counts_the_ends_of_the_first_rank(rank_pool):
    counted = {}
    for model in (GQA, TIED):
        for flags in (DUALPIPEV, ZB_V, PP):
            words = [*model.split(), *flags.split()]
            (found,) = rank_pool.run(1, dry_run, words, setup=SETUP, backend=None)
            counted[model, flags] = found
    auto = f"{GQA} {PP} --pipeline-schedule auto --pipeline-memory-limit 1".split()
    (found,) = rank_pool.run(1, dry_run, auto, setup=SETUP, backend=None)
    assert found == ("auto", counted[GQA, ZB_V][1])
    norm = 64  # of the last stage
    ends = 1024 * 64 + norm  # padded vocabulary, hidden size
    assert counted[GQA, DUALPIPEV][0] == "dualpipev" and counted[TIED, ZB_V][0] == "zb-v"
    for schedule in (DUALPIPEV, ZB_V):
        assert counted[GQA, schedule][1] - counted[GQA, PP][1] == ends
        assert counted[TIED, schedule][1] == counted[TIED, PP][1] + norm


@pytest.mark.slow
def test_weights_are_saved_as_one_rank_saves_them(one_rank, tmp_path):
    for model in (TIED, f"{SIZES} {MTP_TIED}"):
        reference = one_rank(model)
        folder = tmp_path / str(len(model))
        reference.train(2, f"{DUALPIPEV} --lr 0 --train-iters 1 --save {folder}")
        saved, expected = (weights_of(path) for path in (folder, reference.directory / "weights"))
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[name], expected[name]) for name in expected)


def weights_of(folder):
    """The tensors of the model in a checkpoint, by name."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    path = next(folder.glob("iter_*"))
    reader = FileSystemReader(path)
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if not name.startswith(("optimizer", "rng")) and hasattr(entry, "properties")
    }
    _load_state_dict(state, storage_reader=reader, no_dist=True)
    return state
