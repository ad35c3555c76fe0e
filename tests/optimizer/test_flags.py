"""Flags of the optimizer: what they refuse, and that doors accept them."""

from __future__ import annotations

import argparse

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features import registry
from tests.support.lazy import needs
from tests.support.refusal import refusal
from tests.support.trainer_job import SETUP, metrics, train

needs("megatron.core")

from tests.optimizer.optimizer_ranks import moved_parameters

BF16 = {"bf16": True, "fp16": False, "accumulate_allreduce_grads_in_fp32": True}
FP16 = {"bf16": False, "fp16": True, "accumulate_allreduce_grads_in_fp32": False}
REUSE, RELEASE = {"reuse_fp32_param": True}, {"release_fp32_grad": True}
FSDP = {"use_megatron_fsdp": True}

REFUSED = {
    "reuse fp16": (FP16 | REUSE, "--reuse-fp32-param: cannot be combined with --fp16"),
    "reuse fp32": ({"bf16": False} | REUSE, "--reuse-fp32-param: .* with fp32 training.*--bf16"),
    "reuse zero": (BF16 | REUSE | FSDP, "--reuse-fp32-param: .* --use-megatron-fsdp .--zero-stage"),
    "reuse sgd": (BF16 | REUSE | {"optimizer": "sgd"}, "--reuse-fp32-param: .* --optimizer sgd"),
    "reuse lora": (
        BF16 | REUSE | {"lora_target_modules": ("q",)},
        "--reuse-fp32-param: .* --lora-target-modules",
    ),
    "reuse fp16 masters": (
        BF16 | REUSE | {"main_params_dtype": "fp16"},
        "--reuse-fp32-param: .* --main-params-dtype fp16",
    ),
    "reuse on the host": (
        BF16
        | REUSE
        | {
            "optimizer_cpu_offload": True,
            "use_precision_aware_optimizer": True,
            "use_distributed_optimizer": True,
        },
        "--reuse-fp32-param: .* --optimizer-cpu-offload",
    ),
    "exact alone": (BF16 | {"reuse_fp32_param_exact": True}, "no effect without --reuse-fp32"),
    "release fp32": (
        {"bf16": False, "fp16": False} | RELEASE,
        "--release-fp32-grad: gradients of fp32 training have no copies",
    ),
    "release wide": (
        BF16 | RELEASE,
        "--release-fp32-grad: has no effect.*fp32.*--grad-reduce-in-bf16",
    ),
    "release muon": (
        FP16 | RELEASE | {"optimizer": "muon"},
        "--release-fp32-grad: .* --optimizer muon",
    ),
    "hif8": (BF16 | {"quant_states": "hif8"}, "--quant-states hif8: this device .*; use fp8"),
    "mxfp8": (BF16 | {"quant_states": "mxfp8"}, "--quant-states mxfp8: this device"),
    "fp4": (BF16 | {"quant_states": "fp4"}, "--quant-states 'fp4': choose one of fp8"),
    "states fp32": ({"bf16": False, "quant_states": "fp8"}, "needs 16-bit training"),
    "states twice": (
        BF16 | {"quant_states": "fp8", "exp_avg_dtype": "bf16"},
        "--quant-states fp8: cannot be combined with --exp-avg-dtype bf16",
    ),
    "exempt": (BF16 | {"quant_states_exempt": False}, "--no-quant-states-exempt: has no effect"),
    "gradients fp16": (FP16 | {"quant_grads": True}, "--quant-grads: .*--release-fp32-grad"),
    "selection sgd": (
        {"optimizer": "sgd", "optimizer_selection": "fused_torch_adamw"},
        "--optimizer-selection fused_torch_adamw: has no effect with --optimizer sgd",
    ),
    "selection": ({"optimizer_selection": "lamb"}, "'lamb': choose one of fused_adamw"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused(case):
    values, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        registry.resolve(values, "cpu")


@pytest.mark.parametrize(
    "values",
    [
        BF16 | REUSE,
        FP16 | RELEASE,
        BF16 | REUSE | RELEASE | {"accumulate_allreduce_grads_in_fp32": False},
        BF16 | REUSE | {"quant_states": "fp8", "quant_grads": True},
        BF16 | {"exp_avg_sq_dtype": "fp8", "quant_states_exempt": False},
        REUSE,  # a framework that does not say what it trains in
        {"optimizer": "fused_adam", "optimizer_selection": "fused_torch_adamw"},
    ],
    ids=str,
)
def test_what_can_work_is_accepted(values):
    assert not refusal(values)


def test_megatron_lms_parser_knows_the_old_name():
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", default="adam", choices=["adam", "sgd", "muon"])
    args = registry.add_arguments(parser).parse_args(["--optimizer", "fused_adam"])
    (feature,) = registry.resolve(vars(args), "cpu").enabled
    assert feature.name == "fused-adam"
    assert feature.corrects({}) == {"optimizer": "adam"}


SHARDED = "--use-distributed-optimizer"
RUNS = {
    "plain": "--bf16",
    "fused": "--bf16 --optimizer fused_adam --optimizer-selection fused_torch_adamw",
    "exact": "--bf16 --reuse-fp32-param --npu-deterministic",
    "exact-sharded": f"--bf16 --reuse-fp32-param --reuse-fp32-param-exact {SHARDED}",
}


@pytest.mark.slow
def test_the_trainer_trains_to_the_same_bits(rank_pool, tmp_path):
    digests = {}
    for name, flags in RUNS.items():
        (result, _) = rank_pool.run(
            2, train, [*flags.split(), "--train-iters", "3"], setup=SETUP, backend=None, timeout=240
        )
        assert result["error"] is None
        digests[name] = result["digest"]
    assert len(set(digests.values())) == 1, digests


MOMENTS = (
    f"--bf16 {SHARDED} --use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8"
)
HALF = f"--fp16 --initial-loss-scale 65536 {SHARDED}"
LOW = "--bf16 --quant-states fp8 --quant-grads --reuse-fp32-param"


@pytest.mark.weekly_cases("plain", "sharded", "megatron's flags", "fp16")
@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [LOW, f"{LOW} {SHARDED}", f"{LOW} {SHARDED} --no-quant-states-exempt", MOMENTS, HALF],
    ids=["plain", "sharded", "all", "megatron's flags", "fp16"],
)
def test_low_precision_resumes_bit_for_bit(rank_pool, tmp_path, flags):
    given = {"setup": SETUP, "backend": None, "timeout": 240}
    words = [*flags.split(), "--train-iters", "4"]
    save, file = tmp_path / "save", tmp_path / "metrics.jsonl"
    keep = ["--save", str(save), "--save-interval", "2"]
    first = rank_pool.run(2, train, [*words, *keep, "--metrics-file", str(file)], **given)
    assert {result["error"] for result in first} == {None}
    second = rank_pool.run(2, train, [*words, "--load", str(save), "--ckpt-step", "2"], **given)
    assert [r["digest"] for r in second] == [r["digest"] for r in first]
    losses = [record["lm_loss"] for record in metrics(file)]
    assert losses[-1] < losses[0]


LAYOUTS = {
    "tensor": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pipeline": "--pipeline-model-parallel-size 2",
    "overlap": f"{SHARDED} --overlap-grad-reduce --overlap-param-gather",
    "experts": f"{SHARDED} --num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall",
}
ALIKE = {
    "exact": ("--bf16", "--reuse-fp32-param --reuse-fp32-param-exact"),
    "release": ("--fp16 --initial-loss-scale 65536", "--release-fp32-grad"),
}


# Every kind and every layout, each kind with and without sharding.
PAIRS = (
    *(("tensor", "exact"), ("overlap", "exact"), ("experts", "exact")),
    *(("pipeline", "release"), ("overlap", "release")),
)


@pytest.mark.weekly_cases("tensor-exact", "overlap-exact", "overlap-release", "pipeline-release")
@pytest.mark.slow
@pytest.mark.parametrize("layout, kind", PAIRS)
def test_layouts_train_to_the_same_bits(rank_pool, layout, kind):
    """Pairs: where weights and gradients lie is independent of how precise they are."""
    given, added = ALIKE[kind]
    digests = []
    for flags in (given, f"{given} {added}"):
        words = f"{flags} {LAYOUTS[layout]} --train-iters 3".split()
        results = rank_pool.run(2, train, words, setup=SETUP, backend=None, timeout=240)
        assert {result["error"] for result in results} == {None}
        digests.append([result["digest"] for result in results])
    assert digests[0] == digests[1]


BUCKETS = {
    # A tied embedding is a bucket of its own on interleaved stages; small buckets of two replicas.
    "tied": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
    "--no-untie-embeddings-and-output-weights --overlap-grad-reduce",
    "replicas": "--overlap-grad-reduce --ddp-bucket-size 20000",
}


@pytest.mark.weekly_cases("tied")
@pytest.mark.slow
@pytest.mark.parametrize("case", BUCKETS)
def test_states_in_several_buckets_resume_bit_for_bit(rank_pool, tmp_path, case):
    given = {"setup": SETUP, "backend": None, "timeout": 240}
    words = f"--bf16 {SHARDED} {BUCKETS[case]} --dist-ckpt-optim-fully-reshardable --train-iters 4"
    keep = ["--save", str(tmp_path / "save"), "--save-interval", "2"]
    first = rank_pool.run(2, train, [*words.split(), *keep], **given)
    assert {result["error"] for result in first} == {None}
    load = ["--load", str(tmp_path / "save"), "--ckpt-step", "2"]
    second = rank_pool.run(2, train, [*words.split(), *load], **given)
    assert [r["digest"] for r in second] == [r["digest"] for r in first]


@pytest.mark.slow
def test_a_decoupled_rate_of_zero_is_not_taken_for_none(ranks):
    flags = ["--decoupled-lr", "0", "--decoupled-min-lr", "0", "--train-iters", "2"]
    (moved,) = ranks(1, moved_parameters, flags, setup=SETUP, backend=None, timeout=240)
    still = {name for name, moves in moved.items() if not moves}
    assert still == {"embedding.word_embeddings.weight", "output_layer.weight"}
