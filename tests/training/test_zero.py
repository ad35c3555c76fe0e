"""``--zero-stage``: every stage trains as stage 0 does, with less on each rank."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from mindspeed.errors import ConfigError
from tests.lora import lora_ranks, oracle

SETUP = "tests.support.warm"
RANKS = 2
ADAPTERS = ("--lora-target-modules", "dense")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return oracle.save_base(tmp_path_factory.mktemp("zero") / "base")


@pytest.fixture(scope="module")
def unsharded(base, rank_pool):
    return rank_pool.run(RANKS, lora_ranks.steps, str(base), ["--zero-stage=0"], setup=SETUP)


@pytest.mark.slow
@pytest.mark.weekly_cases("2")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stage_equals_stage_0_with_less_on_each_rank(stage, base, unsharded, ranks):
    if stage > 1:
        pytest.importorskip("einops")
    flags = [f"--zero-stage={stage}"]
    found = ranks(RANKS, lora_ranks.steps, str(base), flags, setup=SETUP, timeout=120)
    (planned,) = ranks(1, lora_ranks.planned, str(base), flags, RANKS, setup=SETUP, backend=None)
    for mine, whole in zip(found, unsharded, strict=True):
        assert mine["losses"] == pytest.approx(whole["losses"], rel=2e-6)
    for kind, first_stage in (("optimizer", 1), ("gradients", 2), ("parameters", 3)):
        whole = unsharded[0][kind]
        share = whole // RANKS if stage >= first_stage else whole
        total = sum(mine[kind] for mine in found)
        assert total >= whole
        for mine in found:
            # Shares are padded to equal sizes; those of the optimizer are not equal.
            assert mine[kind] == pytest.approx(share, rel=0.1), kind
            if (kind, stage) == ("parameters", 3):  # what is gathered between steps counts, too
                assert mine[kind] <= planned[kind] <= 1.1 * (mine[kind] + whole)
            else:
                assert planned[kind] == pytest.approx(mine[kind], rel=0.1), kind


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--zero-stage=4"], "--zero-stage 4"),
        (["--zero-stage=0", "--use-distributed-optimizer"], "--use-distributed-optimizer does"),
        (["--zero-stage=1", "--use-megatron-fsdp"], "contradicts --use-megatron-fsdp"),
        (["--zero-stage=3", "--pipeline-model-parallel-size=2"], "-size 2: Megatron-FSDP does not"),
        (["--zero-stage=1", "--no-use-distributed-optimizer"], "contradicts --no-use-distributed"),
        (["--zero-stage=2", "--no-use-megatron-fsdp"], "contradicts --no-use-megatron-fsdp"),
        (
            ["--zero-stage=3", "--data-parallel-sharding-strategy=no_shard"],
            "-strategy optim_grads_params, not no_shard",
        ),
        (["--zero-stage=2", "--fp16"], "--zero-stage 2 cannot be combined with --fp16: "),
        (["--zero-stage=0", "--bf16", "--save=x", *ADAPTERS], "only the distributed optimizer"),
    ],
)
def test_contradictions_are_refused(flags, message, base):
    with pytest.raises(ConfigError, match=message):
        lora_ranks.resolved(str(base), flags, RANKS)


def test_stages_with_experts_are_refused_where_one_adam_cannot_update_both_meshes(monkeypatch):
    from mindspeed.training import resolve_zero

    flags = SimpleNamespace(
        zero_stage=3,
        use_distributed_optimizer=False,
        use_megatron_fsdp=False,
        data_parallel_sharding_strategy="no_shard",
        save=None,
        given_flags=[],
    )
    monkeypatch.setattr(resolve_zero, "_sharded", lambda args, flag: iter(()))
    monkeypatch.setattr(resolve_zero, "fused_adam_takes_several_meshes", lambda: False)
    (text,) = resolve_zero.complete(flags, expert_parallel=2)
    assert "--expert-model-parallel-size above 1 need torch 2.9" in text
    monkeypatch.setattr(resolve_zero, "fused_adam_takes_several_meshes", lambda: True)
    assert not list(resolve_zero.complete(flags, expert_parallel=2))


def test_adapters_beside_a_16_bit_model_get_the_optimizer_that_can_be_saved(base):
    flags = ["--bf16", *ADAPTERS]
    assert not lora_ranks.resolved(str(base), flags).use_distributed_optimizer
    assert lora_ranks.resolved(str(base), [*flags, "--save=x"]).use_distributed_optimizer


@pytest.mark.parametrize("stage", [1, 3])
def test_a_deepspeed_file_chooses_the_stage(stage, base, tmp_path):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}))
    args = lora_ranks.resolved(str(base), [f"--deepspeed_config={path}"])
    assert args.use_distributed_optimizer and args.bf16
    assert args.use_megatron_fsdp == (stage == 3)
