"""A flag whose feature does nothing in the first step: a warning, or refused."""

from __future__ import annotations

from tests.support.trainer_job import SETUP, train

FLAG = "--use-fused-rmsnorm"


def hook_where_nothing_calls(ranks: list[int]) -> None:
    """On these ranks the feature replaces a kernel that a dense model does not compute."""
    import os

    from mindspeed.features.platform.fused_rmsnorm import FusedRmsNorm

    def attach(self, seams, megatron):
        seams.use_kernels(owner=self.name, moe_permute=lambda *given: None)

    if int(os.environ["RANK"]) in ranks:
        FusedRmsNorm.attach = attach


def job(flags: list[str], in_vain: list[int]) -> dict:
    return train(flags, hook_where_nothing_calls, in_vain)


def run(ranks, in_vain, *flags):
    return ranks(
        2,
        job,
        ["--train-iters", "1", FLAG, *flags],
        in_vain,
        setup=SETUP,
        backend=None,
        timeout=240,
    )


def test_a_feature_that_no_rank_reaches_is_refused_on_all(ranks):
    for result in run(ranks, [0, 1]):
        assert (
            f"{FLAG} has had no effect in the first step (kernels.moe_permute: " in result["error"]
        )
        assert "leave it out, or --features-in-vain warn" in result["error"]


def test_a_feature_that_one_rank_reaches_is_accepted(ranks, capfd):
    assert {result["error"] for result in run(ranks, [0])} == {None}
    assert "features reached in the first step: fused-rmsnorm\n" in capfd.readouterr().out


def test_it_can_be_a_warning(ranks, capfd):
    results = run(ranks, [0, 1], "--features-in-vain", "warn")
    assert {result["error"] for result in results} == {None}
    assert f"warning: {FLAG} has had no effect in the first step" in capfd.readouterr().out
