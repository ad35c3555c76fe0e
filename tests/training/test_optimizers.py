"""Optimizers that Megatron accepts, and those that features bring, in our trainer."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.training.arguments import build_parser
from mindspeed.training.recipe import parse_with_recipe
from tests.support.lazy import Lazy
from tests.support.trainer_job import SETUP, TINY, metrics, train
from tests.training.optimizer_job import direct_muon, train_muon_with_seams, train_with_signs

resolve = Lazy("mindspeed.training.resolve", "resolve")


TP = "--tensor-model-parallel-size 2"
SHARDED = "--use-distributed-optimizer --use-precision-aware-optimizer --bf16"
MUON = (
    "--lr 1e-3 --weight-decay 0.1 --muon-momentum 0.8 --muon-no-split-qkv --muon-use-nesterov "
    "--muon-extra-scale-factor 0.2"
)


@pytest.fixture
def run(rank_pool, tmp_path):
    """Trains; returns the metrics and what each rank says."""
    file = tmp_path / "metrics.jsonl"

    def run(world, flags, *before):
        file.unlink(missing_ok=True)
        words = f"{flags} --metrics-file {file}".split()
        given = {"setup": SETUP, "backend": None, "timeout": 240}
        results = rank_pool.run(world, train, words, *before, **given)
        assert {result["error"] for result in results} == {None}, results
        return metrics(file), results

    return run


def curve(records):
    return [(record["lm_loss"], record["grad_norm"]) for record in records]


@pytest.mark.weekly_cases("blockwise")
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["blockwise", "distributed"])
def test_muon_equals_megatrons_own_function(run, mode):
    flags = f"{TP} {MUON} --muon-tp-mode {mode} --train-iters 3"
    ours, _ = run(2, f"{flags} --optimizer muon")
    direct, _ = run(2, flags, direct_muon, 1e-3, 0.8, mode)
    assert curve(ours) == curve(direct)
    adam, _ = run(2, flags)
    assert ours[0]["lm_loss"] == adam[0]["lm_loss"] and ours[1]["lm_loss"] != adam[1]["lm_loss"]


@pytest.mark.slow
def test_muon_by_layers_equals_muon_and_resumes(run, tmp_path):
    flags = f"{MUON} --train-iters 4 --bf16"
    plain, _ = run(2, f"{flags} --optimizer muon")
    save = f"--save {tmp_path / 'save'} --save-interval 2"
    by_layers, first = run(2, f"{flags} --optimizer dist_muon {save}")
    for name in ("lm_loss", "grad_norm"):
        expected = pytest.approx([record[name] for record in plain], rel=1e-3)
        assert [record[name] for record in by_layers] == expected
    rest, second = run(2, f"{flags} --optimizer dist_muon --load {tmp_path / 'save'} --ckpt-step 2")
    assert curve(rest) == curve(by_layers)[2:]
    assert [r["digest"] for r in second] == [r["digest"] for r in first]


DTYPES = {
    "fp16-master": "--main-params-dtype fp16 --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16",
    "bf16-gradients": "--main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8",
}


@pytest.mark.weekly_cases("bf16-gradients")
@pytest.mark.slow
@pytest.mark.parametrize("dtypes", DTYPES)
def test_states_of_other_dtypes_resume_bit_for_bit(run, tmp_path, dtypes):
    flags = f"{SHARDED} {DTYPES[dtypes]} --train-iters 4"
    whole, first = run(2, f"{flags} --save {tmp_path / 'save'} --save-interval 2")
    rest, second = run(2, f"{flags} --load {tmp_path / 'save'} --ckpt-step 2")
    assert curve(rest) == curve(whole)[2:]
    assert [r["digest"] for r in second] == [r["digest"] for r in first]
    assert curve(whole)[-1][0] < curve(whole)[0][0]


@pytest.mark.weekly_cases("fp32")
@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", SHARDED], ids=["fp32", "distributed"])
def test_a_custom_update_rule_state_storage_and_wrapper(ranks, tmp_path, flags):
    save = tmp_path / "save"
    constant = "--lr 1e-2 --lr-decay-style constant"
    words = f"{flags} {constant} --train-iters 4 --save {save} --save-interval 2".split()
    given = {"setup": SETUP, "backend": None, "timeout": 240}
    for result in (first := ranks(2, train_with_signs, words, **given)):
        assert result["steps"] == 4 and result["betas"] == (0.5, 0.999)
        assert result["moved"] == pytest.approx(4e-2, rel=1e-2)
        assert result["dtypes"]["exp_avg"] == "torch.bfloat16"
        assert result["dtypes"]["mean"] == "torch.float32"
    words = f"{flags} {constant} --train-iters 4 --load {save} --ckpt-step 2".split()
    second = ranks(2, train_with_signs, words, **given)
    assert [r["digest"] for r in second] == [r["digest"] for r in first]
    assert {r["steps"] for r in second} == {2}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "dist_muon"])
def test_features_get_the_whole_of_muon_once(ranks, name):
    words = f"--optimizer {name} {MUON} --train-iters 2".split()
    given = {"setup": SETUP, "backend": None, "timeout": 240}
    for seen in ranks(2, train_muon_with_seams, words, **given):
        assert seen["called"] == ["optimizer_args", "optimizer"] and seen["steps"] == 2
        assert seen["kinds"][0] == "TensorParallelMuon" and len(seen["kinds"]) > 1
        assert seen["moments"][0] == 0.25


def test_features_that_would_get_half_of_muon_are_refused(ranks):
    words = f"{MUON} --train-iters 2".split()
    given = {"setup": SETUP, "backend": None, "timeout": 240}
    (seen,) = ranks(1, train_muon_with_seams, words, True, **given)
    assert seen["error"].startswith("--optimizer muon: other-momentum, counting would change only")


REFUSED = {
    "--optimizer lion": "choose one of adam, sgd, muon, dist_muon",
    "--optimizer muon --use-distributed-optimizer": "excludes --use-distributed-optimizer: drop",
    "--optimizer dist_muon --overlap-grad-reduce": "dist_muon excludes --overlap-grad-reduce",
    "--optimizer muon --fp16": "excludes --fp16",
    "--optimizer muon --muon-tp-mode whole": "'whole' .choose from .*blockwise",
    "--exp-avg-dtype fp64": "'fp64': choose one of fp32, fp16, bf16, fp8",
    "--main-grads-dtype fp8": "'fp8': choose one of fp32, bf16",
    "--main-params-dtype bf16": "'bf16': choose one of fp32, fp16",
    f"{SHARDED} --main-grads-dtype bf16 --accumulate-allreduce-grads-in-fp32": "drop one",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_unsupported_optimizers_are_refused_with_one_message(flags):
    with pytest.raises(ConfigError, match=REFUSED[flags]):
        resolve(parse_with_recipe([*TINY, *flags.split()], build_parser()), world_size=1)
