"""ZeRO 2 and 3: a stopped run resumes exactly, with any number of ranks and in any stage."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
import torch

from mindspeed.storage import directory
from mindspeed.storage.global_tensors import GlobalTensors
from mindspeed.testing.ranks import RankError
from tests.checkpoint.shards_ranks import refusals, rule_refusals
from tests.support import fault
from tests.support.lazy import needs
from tests.support.trainer_job import SETUP, metrics, train

needs("einops")

SMALL = ["--num-layers", "2", "--train-iters", "4"]
DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--dataloader-type", "cyclic"]
EXPERTS = shlex.split("""
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-grouped-gemm
    --transformer-impl transformer_engine --moe-token-dispatcher-type alltoall
    --moe-router-enable-expert-bias --moe-router-score-function sigmoid
    --expert-model-parallel-size 2
""")
EVALUATION = ["--eval-interval", "2", "--eval-iters", "1"]
ADAPTERS = ["--lora-target-modules", "linear_qkv", "gate_proj", "linear_fc2", "--lora-r", "4"]
ADAPTERS += ["--lr", "0.01"]


def slow(*values):
    """A case that the quick test run leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def run(ranks, world_size, flags, *fault_and_args, fp32=False):
    flags = [*SMALL, *flags, *([] if fp32 or ADAPTERS[0] in flags else ["--bf16"])]
    results = ranks(
        world_size, train, flags, *fault_and_args, setup=SETUP, backend=None, timeout=240
    )
    assert {result["error"] for result in results} == {None}, results[0]["error"]
    return results


def losses(folder):
    return {r["iteration"]: r["lm_loss"] for r in metrics(folder / "metrics.jsonl")}


def second_half(folder):
    return {iteration: loss for iteration, loss in losses(folder).items() if iteration > 2}


def only(source: Path, iteration: int, target: Path) -> list[str]:
    """A directory with one checkpoint of another, and the flags to continue there."""
    name = directory.path_of(source, iteration).name
    shutil.copytree(source / name, target / name)
    (target / directory.TRACKER).write_text(str(iteration))
    return ["--save", str(target), "--auto-resume"]


@pytest.fixture(scope="module")
def stage_3(rank_pool, tmp_path_factory):
    """Checkpoints after iterations 2 and 4 of a run of stage 3 on two ranks."""
    folder = tmp_path_factory.mktemp("shards") / "stage 3"
    flags = ["--zero-stage", "3", "--save", str(folder), "--save-interval", "2", "--async-save"]
    run(rank_pool.run, 2, [*flags, "--max-skipped-nan-iterations", "1", *EVALUATION])
    return folder


@pytest.fixture(scope="module")
def stage_1(rank_pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards") / "stage 1"
    flags = ["--zero-stage", "1", "--save", str(folder), "--save-interval", "2"]
    run(rank_pool.run, 2, flags)
    return folder


@pytest.mark.weekly_cases("stage-2-dropout")
@pytest.mark.slow
@pytest.mark.parametrize(
    "world_size, flags",
    [(2, ["--zero-stage", "2", *DROPOUT]), (2, ["--zero-stage", "3", *EXPERTS])],
    ids=["stage-2-dropout", "stage-3-experts-on-two-ranks"],
)
def test_resumed_training_is_bit_equal_to_uninterrupted_training(
    world_size, flags, ranks, tmp_path
):
    whole, part = tmp_path / "whole", tmp_path / "part"
    straight = run(ranks, world_size, [*flags, "--save", str(whole), "--save-interval", "2"])
    resumed = run(ranks, world_size, [*flags, *only(whole, 2, part)])
    assert [r["digest"] for r in resumed] == [r["digest"] for r in straight]
    assert losses(part) == second_half(whole) and set(losses(part)) == {3, 4}
    if EXPERTS[0] in flags:
        plain = tmp_path / "plain"
        run(ranks, world_size, [*flags, "--zero-stage", "0", "--save", str(plain)])
        assert losses(whole) == pytest.approx(losses(plain), rel=1e-6)


@pytest.mark.weekly_cases("as-before", "tensor-2")
@pytest.mark.slow
@pytest.mark.parametrize(
    "world_size, flags",
    [
        (1, ["--zero-stage", "2"]),
        (2, ["--zero-stage", "3"]),
        (2, ["--zero-stage", "3", "--tensor-model-parallel-size", "2"]),
        slow(2, ["--zero-stage", "1", "--pipeline-model-parallel-size", "2"]),
    ],
    ids=["one-rank-stage-2", "as-before", "tensor-2", "pipeline-2-stage-1"],
)
def test_a_run_resumes_in_another_layout(world_size, flags, stage_3, ranks, tmp_path):
    run(ranks, world_size, [*flags, *only(stage_3, 2, tmp_path / "part")])
    exact = "as-before" if flags == ["--zero-stage", "3"] else None
    tolerance = 0 if exact else 1e-5  # other layouts add in another order
    assert losses(tmp_path / "part") == pytest.approx(second_half(stage_3), rel=tolerance)


@pytest.mark.weekly
@pytest.mark.slow
def test_zero_stage_3_resumes_from_stage_1(stage_1, ranks, tmp_path):
    run(ranks, 2, ["--zero-stage", "3", *only(stage_1, 2, tmp_path / "part")])
    assert losses(tmp_path / "part") == pytest.approx(second_half(stage_1), rel=1e-6)


def test_the_files_hold_what_stage_1_writes(stage_1, stage_3):
    """Same names, shapes, types and numbers, so every tool that reads one reads the other."""
    shared, plain = (GlobalTensors(directory.path_of(root, 2)) for root in (stage_3, stage_1))
    assert set(shared) == set(plain)
    assert any(key.startswith("optimizer.state.exp_avg_sq.decoder.") for key in shared)
    for key in shared:
        assert shared.dtype(key) == plain.dtype(key)
        tolerance = 2**-7 if shared.dtype(key) == torch.bfloat16 else 1e-5
        torch.testing.assert_close(
            shared.read(key, ()), plain.read(key, ()), rtol=tolerance, atol=1e-6
        )


FORMS = {  # of the checkpoint's optimizer, of ours: what can read it instead
    (None, "shares"): "--zero-stage 0",
    (None, "distributed"): "--zero-stage 0",
    ("dp_reshardable", "shares"): "--zero-stage 1",
    ("fully_reshardable", "whole"): "--zero-stage 1",
}


def test_an_incompatible_optimizer_is_refused_naming_a_compatible_one(ranks):
    (messages,) = ranks(1, refusals, list(FORMS), setup=SETUP, backend=None)
    for message, instead in zip(messages, FORMS.values(), strict=True):
        assert instead in message and "(--no-load-optim)" in message


@pytest.mark.slow
@pytest.mark.weekly_cases("fp32")
@pytest.mark.parametrize("fp32", [slow(False), True], ids=["bf16", "fp32"])
def test_loading_weights_only_updates_the_optimizer_master_weights(fp32, stage_3, ranks, tmp_path):
    """Steps that change nothing copy the optimizer's weights to the model's."""
    frozen = ["--lr", "0", "--load", str(stage_3), "--finetune", "--seed", "7", "--no-save-optim"]
    flags = ["--zero-stage", "2", *frozen, "--save", str(tmp_path), "--train-iters", "1"]
    run(ranks, 2, flags, fp32=fp32)
    before, after = (
        GlobalTensors(directory.path_of(root, i)) for root, i in ((stage_3, 4), (tmp_path, 1))
    )
    assert set(after) == {key for key in before if not key.startswith("optimizer.")}
    for key in after:
        assert torch.equal(before.read(key, ()).float(), after.read(key, ()).float()), key


@pytest.fixture(scope="module")
def adapters(stage_3, rank_pool, tmp_path_factory):
    """Losses of adapters trained without ZeRO in fp32, and their flags but for the stage."""
    folder = tmp_path_factory.mktemp("adapters") / "stage 0"
    flags = [*ADAPTERS, "--load", str(stage_3), "--save-interval", "2"]
    run(rank_pool.run, 2, [*flags, "--save", str(folder)])
    return losses(folder), flags


@pytest.mark.slow
@pytest.mark.weekly_cases("stage-2-tensor-2")
@pytest.mark.parametrize(
    "flags",
    [slow(["--zero-stage", "2", "--tensor-model-parallel-size", "2"]), ["--zero-stage", "3"]],
    ids=["stage-2-tensor-2", "stage-3"],
)
def test_adapters_train_as_without_zero_and_resume_exactly(flags, adapters, ranks, tmp_path):
    plain, common = adapters
    whole, part = tmp_path / "whole", tmp_path / "part"
    run(ranks, 2, [*common, *flags, "--save", str(whole)])
    found = losses(whole)
    assert found == pytest.approx(plain, rel=2e-6)
    again = ["--lora-load", str(directory.path_of(whole, 2)), "--save", str(part)]
    run(ranks, 2, [*common, *flags, *again])
    assert losses(part) == {3: found[3], 4: found[4]}
    stored = GlobalTensors(directory.path_of(part, 4))
    layers = {key: stored.shape(key) for key in stored if key.startswith("decoder.layers.1.mlp.")}
    assert set(layers.values()) == {(4, 64), (176, 4), (4, 176), (64, 4)}
    assert all(".lora_" in key for key in stored)


# All three leave the checkpoint before; the tracker's is the only one with a complete folder.
@pytest.mark.weekly_cases("in a file", "before the rename")
@pytest.mark.slow
@pytest.mark.parametrize("moment", ["in a file", "before the rename", "before the tracker"])
def test_adapters_survive_a_kill_in_the_middle_of_a_save(moment, adapters, ranks, tmp_path):
    plain, common = adapters
    flags = [*common, "--zero-stage", "3", "--save", str(tmp_path)]
    with pytest.raises(RankError) as died:
        ranks(
            2, train, [*SMALL, *flags], fault.killed_in_save, 2, moment,
            setup=SETUP, backend=None, timeout=240,
        )  # fmt: skip
    assert died.value.kind == "died"
    assert directory.tracked(tmp_path) == 2
    assert directory.problem_with(directory.path_of(tmp_path, 2)) is None
    run(ranks, 2, [*flags, "--lora-load", str(tmp_path)])
    assert directory.iterations(tmp_path) == [4, 2] and directory.tracked(tmp_path) == 4
    assert losses(tmp_path) == pytest.approx(plain, rel=2e-6)


def test_states_that_the_checkpoint_lacks_are_refused(ranks):
    cadam, ema = {"update_rule": "cadam"}, {"optimizer_selection": "fused_ema_adamw"}
    pairs = [({}, {}), (ema, ema), (ema, {}), (cadam, cadam), ({}, cadam), ({}, ema), (cadam, {})]
    (said,) = ranks(1, rule_refusals, pairs, setup="tests.support.warm")
    assert said[:5] == [""] * 5
    assert "no averages of the weights; load without" in said[5]
    assert "second moments: it was trained with --optimizer cadam" in said[6]
