"""Parameters of a dry run are those of the models that ranks of a real job build."""

from __future__ import annotations

import pytest

from mindspeed.testing import RankError
from tests.support.trainer_job import SETUP
from tests.training.parameter_counts_job import built, counted

UNTIED = "--untie-embeddings-and-output-weights"
GQA = f"{UNTIED} --disable-bias-linear --normalization RMSNorm --swiglu --num-query-groups 2"
MOE = f"{GQA} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-grouped-gemm "
MOE += "--moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 16 "
MOE += "--moe-layer-freq [0,1,1,1] --moe-router-enable-expert-bias "
MOE += "--moe-router-score-function sigmoid"
TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
SP, EP = f"{TP} --sequence-parallel", "--expert-model-parallel-size 2"
PLAIN = MOE.replace("--moe-router-enable-expert-bias", "")
LORA = "--load x --lora-r 4 --lora-target-modules"
# Model, layout, ranks.
CASES = {
    "biases": ("", TP, 2),
    "tied over two stages": ("", PP, 2),
    "grouped queries with norms": (f"{GQA} --qk-layernorm", SP, 2),
    "uneven query groups": (
        f"{GQA} --num-attention-heads 6 --kv-channels 8 --num-query-groups 3",
        f"{TP} --unaligned-linear",
        2,
    ),
    "virtual stages": (GQA, f"{PP} --num-layers-per-virtual-pipeline-stage 1", 2),
    "multi-token prediction": (f"{GQA} --mtp-num-layers 1", PP, 2),
    "whole experts": (MOE, f"{SP} {EP} {PP} --expert-tensor-parallel-size 1", 4),
    "sharded experts": (MOE, f"{SP} {EP} --use-distributed-optimizer", 4),
    "hot experts": (PLAIN, f"{EP} --balanced-moe-experts --balanced-moe-hot-expert-num 1", 2),
    "tied, in a V-shape": ("", f"{PP} --schedules-method dualpipev", 2),
    "adapters": (f"{GQA} --load x --lora-r 4 --lora-target-modules all-linear", TP, 2),
    "adapters of the last stage": (f"{GQA} {LORA} o_proj output_layer", PP, 2),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_real_ranks_and_of_the_model_on_one(rank_pool, case):
    model, layout, ranks = CASES[case]
    options = {"setup": SETUP, "timeout": 120}
    flags = f"{model} {layout}"
    ((stages, total),) = rank_pool.run(1, counted, flags, ranks, backend=None, **options)
    found = rank_pool.run(ranks, built, flags, backend=None, **options)
    for stage, sizes in enumerate(stages):
        assert sizes == next(sizes for at, *sizes, first in found if first and at == stage)
    ((_, whole, *_),) = rank_pool.run(1, built, model, backend=None, **options)
    assert total == whole


def test_a_name_that_no_stage_knows_is_refused(rank_pool):
    flags = f"{GQA} {PP} {LORA} o_proj q_projj"
    with pytest.raises(RankError, match="q_projj matches no linear layer of this model; it has"):
        rank_pool.run(1, counted, flags, 2, setup=SETUP, backend=None, timeout=120)
