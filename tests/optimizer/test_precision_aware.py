"""Master weights and 16-bit gradients inside ``FusedAdam``, under Megatron's optimizers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.optimizer.optimizer_ranks import (
    PART,
    Case,
    continued,
    load_errors,
    main_params_from,
    replace_all,
    resume_all,
    resumed_decay,
    resumed_rates,
    save_all,
    train_all,
)
from tests.support.lazy import needs

needs("megatron.core")

SETUP = "tests.support.warm"
BF16, FP16 = {"bf16": True}, {"fp16": True, "bf16": False}
REUSE = {**BF16, "reuse_fp32_param": True}
EXACT = {**REUSE, "reuse_fp32_param_exact": True}
SHARDED = {"use_distributed_optimizer": True}
KINDS = pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])


def run(rank_pool, world_size, function, *args):
    return rank_pool.run(world_size, function, *args, setup=SETUP, timeout=240)


@pytest.mark.slow
@pytest.mark.weekly_cases("plain")
@KINDS
def test_exact_remainders_train_to_the_same_bits(rank_pool, distributed):
    cases = {
        "plain": Case(BF16, distributed),
        "exact": Case(EXACT, distributed),
        "rounded": Case(REUSE, distributed),
    }
    for result in run(rank_pool, 2, train_all, cases, 12):
        plain, exact, rounded = (result[name] for name in cases)
        assert exact.losses == plain.losses and exact.norms == plain.norms
        assert exact.digests == plain.digests
        assert rounded.losses == pytest.approx(plain.losses, abs=2e-3)
        per_parameter = [o.state_bytes / o.numel for o in (plain, rounded, exact)]
        share = 2 if distributed else 1
        expected = [12 / share, 10 / share, 10.125 / share]
        assert per_parameter == pytest.approx(expected, rel=2e-3)


FORMATS = [
    ("torch", 2, 2),
    ("fully_reshardable", 2, 1),
    ("fully_reshardable", 1, 2),
    ("dp_reshardable", 2, 2),
]


@pytest.mark.weekly_cases("torch-2-2", "fully_reshardable-2-1", "fully_reshardable-1-2")
@pytest.mark.slow
@pytest.mark.parametrize(("format_", "before", "after"), FORMATS)
def test_checkpoints_are_those_of_runs_without_it(rank_pool, tmp_path, format_, before, after):
    """Whichever of the two wrote a checkpoint, both continue it with the same bits."""
    runs = {
        f"{name}-{kind}": Case(flags, kind == "distributed")
        for name, flags in (("plain", BF16), ("exact", EXACT))
        for kind in ("whole", "distributed")
    }
    run(rank_pool, before, save_all, runs, str(tmp_path), format_)
    pairs = {
        (one, other): runs[other]
        for one in runs
        for other in runs
        if one.partition("-")[2] == other.partition("-")[2]
    }
    for result in run(rank_pool, after, resume_all, pairs, str(tmp_path), format_):
        for (one, other), outcome in result.items():
            assert outcome.digests == result[one, one].digests, (one, other)
            assert outcome.losses == result[one, one].losses
            kind = one.partition("-")[2]
            assert outcome.digests == result[f"plain-{kind}", f"plain-{kind}"].digests


@pytest.mark.weekly_cases("fully_reshardable", "torch")
@pytest.mark.slow
@pytest.mark.parametrize("format_", ["dp_reshardable", "fully_reshardable", "torch"])
def test_fp8_moments_resume_to_the_bits_of_the_uninterrupted_run(rank_pool, tmp_path, format_):
    """The random rounding of step 3 is that of step 3, whoever wrote the checkpoint."""
    quantised = {**BF16, "quant_states": "fp8"}
    runs = {
        "whole": Case(quantised),
        "distributed": Case(quantised, True),
        "all": Case({**quantised, "quant_states_exempt": False}, True),
    }
    if format_ == "torch":
        runs["all"] = Case({**quantised, "quant_states_exempt": False})
    assert_continued(run(rank_pool, 2, continued, runs, str(tmp_path), format_))


def assert_continued(results):
    """The bits of the uninterrupted run, on every rank."""
    for result in results:
        for name, (at_once, resumed) in result.items():
            assert resumed.digests == at_once.digests, name
            assert resumed.norms == at_once.norms and resumed.losses == at_once.losses, name


@pytest.mark.weekly_cases("torch", "fully_reshardable")
@pytest.mark.slow
@pytest.mark.parametrize("format_", ["dp_reshardable", "torch", "fully_reshardable"])
def test_an_optimizer_on_the_host_resumes_to_the_same_bits(rank_pool, tmp_path, format_):
    """Its step count, master weights and the model's weights are those that were saved."""
    names = ("optimizer_cpu_offload", "use_precision_aware_optimizer", "use_distributed_optimizer")
    flags = {**BF16, **dict.fromkeys(names, True)}
    options = dict.fromkeys(names[:2], True)
    runs = {
        str(fraction): Case(
            flags, True, options={**options, "optimizer_offload_fraction": fraction}
        )
        for fraction in (1.0, 0.4)
    }
    assert_continued(run(rank_pool, 2, continued, runs, str(tmp_path), format_))


@pytest.mark.weekly_cases("torch", "dp_reshardable")
@pytest.mark.slow
@pytest.mark.parametrize("format_", ["fully_reshardable", "dp_reshardable", "torch"])
def test_states_in_padded_buckets_resume_to_the_same_bits(rank_pool, tmp_path, format_):
    """A bucket is padded to a multiple of the ranks; those after it start later (PR 5077)."""
    sharded = {**BF16, **SHARDED}
    runs = {
        name: Case(flags, True, bucket=3000)
        for name, flags in (
            ("plain", sharded),
            ("fp8", {**sharded, "quant_states": "fp8"}),
            ("average", {**sharded, "optimizer_selection": "fused_ema_adamw"}),
        )
    }
    assert_continued(run(rank_pool, 2, continued, runs, str(tmp_path), format_))


@pytest.mark.weekly_cases("fully_reshardable")
@pytest.mark.slow
@pytest.mark.parametrize("format_", ["dp_reshardable", "torch", "fully_reshardable"])
def test_states_of_another_rule_are_refused_where_they_are_loaded(rank_pool, tmp_path, format_):
    """Megatron's checkpoints hold both moments whatever the rule has: zeros would be divided by."""
    names = ("optimizer_cpu_offload", "use_precision_aware_optimizer")
    runs = {
        "adam": Case({**BF16, **SHARDED}, True),
        "cadam": Case({**BF16, **SHARDED, "optimizer": "cadam"}, True),
        "average": Case({**BF16, **SHARDED, "optimizer_selection": "fused_ema_adamw"}, True),
        "host": Case(
            {**BF16, **SHARDED, **dict.fromkeys(names, True)},
            True,
            options={**dict.fromkeys(names, True), "optimizer_offload_fraction": 1.0},
        ),
        "whole adam": Case(BF16),
        "whole cadam": Case({**BF16, "optimizer": "cadam"}),
    }
    said = {
        (
            "cadam",
            "adam",
        ): "trained with --optimizer cadam and has no exp_avg_sq, which --optimizer",
        ("cadam", "host"): "trained with --optimizer cadam and has no exp_avg_sq",
        ("cadam", "cadam"): "",
        ("average", "average"): "",
        ("average", "adam"): "",
    }
    if format_ != "dp_reshardable":  # a layout of the distributed optimizer
        said["whole cadam", "whole adam"] = "trained with --optimizer cadam"
    if format_ == "torch":  # of the others Megatron says which tensor is not there
        needs = "which --optimizer-selection fused_ema_adamw needs"
        said["adam", "average"] = f"has no ema_params, {needs}"
        said["cadam", "average"] = f"has no exp_avg_sq, ema_params, {needs}"
    pairs = {(one, other): runs[other] for one, other in said}
    saved = {name: runs[name] for name in {one for one, _ in said}}
    (result,) = run(rank_pool, 1, load_errors, saved, pairs, str(tmp_path), format_)
    for pair, text in said.items():
        assert text in result[pair], pair
        assert bool(text) == bool(result[pair]), pair


@pytest.mark.weekly_cases("plain-fully_reshardable", "distributed-torch")
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("format_", ["fully_reshardable", "torch"])
@KINDS
def test_the_flags_of_a_resumed_run_decide_its_learning_rates(
    rank_pool, tmp_path, format_, distributed
):
    """With and without a learning rate of embeddings, which no other field tells apart."""
    flag = "override_opt_param_scheduler"
    flags = {**BF16, "use_distributed_optimizer": distributed, "load": str(tmp_path)}

    def case(lr, embeddings):
        return Case(flags, distributed, options={"lr": lr, "decoupled_lr": embeddings})

    def resume(name, *given):
        (folder := tmp_path / name).mkdir()
        ((built, resumed),) = run(rank_pool, 1, resumed_rates, *given[:2], str(folder), *given[2:])
        return built, resumed

    old, new = case(5e-3, 7e-4), case(1e-3, 2e-4)
    built, resumed = resume("other", old, new, format_, flag)
    assert resumed == built and set(built) == {1e-3, 2e-4}
    built, resumed = resume("same", old, old, format_, "")
    assert resumed == built and set(built) == {5e-3, 7e-4}
    flag = "use_checkpoint_opt_param_scheduler"
    _, resumed = resume("saved", case(5e-3, None), case(1e-3, None), format_, flag)
    assert set(resumed) == {5e-3}


def test_the_first_step_of_a_resumed_run_decays_like_the_saved_one(rank_pool):
    saved, resumed = run(rank_pool, 1, resumed_decay)[0]
    assert resumed == saved


@pytest.mark.slow
@KINDS
def test_weights_that_a_job_replaces_are_trained_on(rank_pool, distributed):
    """``reload_model_params`` reaches the masters, wherever and however they are stored."""
    sharded = {**BF16, "use_distributed_optimizer": distributed}
    own = {"use_precision_aware_optimizer": True, "store_param_remainders": False}
    cases = {
        "plain": Case(sharded, distributed),
        "fp8": Case({**sharded, "quant_states": "fp8"}, distributed),
        "exact": Case({**EXACT, "use_distributed_optimizer": distributed}, distributed),
    }
    if distributed:
        cases["swapped"] = Case({**sharded, "swap_optimizer": True}, True)
        cases["megatron's own"] = Case(sharded, True, options=own)
        names = ("optimizer_cpu_offload", "use_precision_aware_optimizer")
        host = dict.fromkeys(names, True)
        for share in (1.0, 0.4):
            options = host | {"optimizer_offload_fraction": share}
            cases[f"{share} on the host"] = Case(sharded | host, True, options=options)
    for result in run(rank_pool, 2, replace_all, cases):
        plain = result.pop("plain")
        for name, weights in result.items():
            # fp8: two steps of the learning rate 1e-2; torch's Adam rounds otherwise than ours.
            near = 2e-2 if name == "fp8" else 2e-3 if "host" in name else 0
            for weight, expected in zip(weights, plain, strict=True):
                torch.testing.assert_close(weight, expected, rtol=0, atol=near, msg=name)


@pytest.mark.weekly_cases("1")
@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 2])
def test_main_params_of_a_checkpoint_reach_every_optimizer(rank_pool, chunks):
    """Those of experts and of every chunk, wherever they are stored."""
    options = {"use_precision_aware_optimizer": True, "store_param_remainders": False}
    sharded = {**BF16, **SHARDED, "load_main_params_from_ckpt": True}
    experts = {"num_moe_experts": 12}  # the name of weight1 is part of weight10
    own = {"num_moe_experts": 24, "expert_model_parallel_size": 2}  # with an optimizer of their own
    cases = {}
    for name, sizes in (("", experts), (" own", own)):
        plain = Case(sharded, True, model="moe-grouped", model_options=sizes)
        cases |= {f"plain{name}": plain, f"inside{name}": replace(plain, options=options)}
    for result in run(rank_pool, 2, main_params_from, cases, chunks):
        for name in ("", " own"):
            found, right = result[f"inside{name}"], result[f"plain{name}"]
            for weight, expected in zip(found, right, strict=True):
                assert torch.equal(weight, expected)


GRADIENTS = {
    "fp16": (FP16, torch.float16, {}, (2, 9)),
    "fp16-constant-scale": (FP16, torch.float16, {"loss_scale": 512.0}, ()),
    "fp16-experts": (FP16, torch.float16, {}, (3,), "moe-grouped"),
    "bf16": ({**BF16, "grad_reduce_in_bf16": True}, torch.bfloat16, {}, ()),
}


ALIKE = {
    # Flags of two runs that have 16-bit gradients and end with the same bits.
    "swapped": ({**FP16, **SHARDED}, {"release_fp32_grad": True, "swap_optimizer": True}),
    "exact": (BF16, {"reuse_fp32_param": True, "reuse_fp32_param_exact": True}),
    "fp8": ({**FP16, "quant_states": "fp8"}, {"release_fp32_grad": True}),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ALIKE)
def test_narrow_gradients_are_not_rounded_again(rank_pool, kind):
    """Whichever feature lets the update read them, and wherever the states are."""
    flags, added = ALIKE[kind]
    dtype = torch.float16 if flags.get("fp16") else torch.bfloat16
    options = {"clip_grad": 0.1}
    cases = {
        "one": Case(flags, True, dtype, False, options),
        "other": Case({**flags, **added}, True, dtype, False, options),
    }
    for result in run(rank_pool, 2, train_all, cases, 6):
        assert result["one"].norms == result["other"].norms
        assert min(result["one"].norms) > 0.1, "clipped"
        assert result["one"].digests == result["other"].digests


@pytest.mark.weekly_cases(
    "fp16-constant-scale-plain",
    "fp16-experts-plain",
    "fp16-distributed",
    "bf16-plain",
    "fp16-plain",
    "fp16-constant-scale-distributed",
)
@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("kind", GRADIENTS)
def test_without_copies_of_gradients_the_weights_are_the_same_bits(rank_pool, distributed, kind):
    flags, dtype, options, overflows, *model = GRADIENTS[kind]
    given = (distributed, dtype, False, options, *(model or ["rmsnorm-swiglu-gqa"]), overflows)
    cases = {
        "copies": Case(flags, *given),
        "released": Case({**flags, "release_fp32_grad": True}, *given),
    }
    for result in run(rank_pool, 2, train_all, cases, 20):
        copies, released = result["copies"], result["released"]
        assert released.updated == copies.updated
        assert released.updated == [number not in overflows for number in range(20)]
        assert released.losses == copies.losses and released.norms == copies.norms
        assert released.digests == copies.digests
        assert released.state_bytes == copies.state_bytes
        share = 2 if distributed else 1
        saved = copies.peaks[-1] - released.peaks[-1]
        assert saved == pytest.approx(4 * copies.numel / share, abs=32 * PART)
