"""A dense step: FakeTensors and real ranks count the same, to the byte."""

from __future__ import annotations

import pytest

from tests.planner.real_and_fake import compare

_TP = "--tensor-model-parallel-size 2 --bf16 "
_TE = "--transformer-impl transformer_engine "
_DIST = "--use-distributed-optimizer "
_MLA = (
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 12"
)
_PP = "--pipeline-model-parallel-size 2 --bf16 "
CASES = {
    "overlapped, interleaved": (
        4,
        _PP + _TE + _DIST + "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1 "
        "--overlap-grad-reduce --overlap-param-gather",
        (0, 3),
    ),
    "sequence parallel": (4, _TP + _TE + _DIST + "--sequence-parallel", (0, 3)),
    "fp32, sgd": (4, "--tensor-model-parallel-size 2 --optimizer sgd", (0,)),
    "fp16": (
        4,
        "--tensor-model-parallel-size 2 --fp16 --initial-loss-scale 1 " + _TE + _DIST,
        (0,),
    ),
    "layers in blocks again": (
        4,
        _PP + _TE + "--num-layers 4 --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 1",
        (0, 3),
    ),
    "layers again, divided": (
        4,
        _TP + "--sequence-parallel --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        (1,),
    ),
    "attention again": (
        4,
        _TP + _TE + "--recompute-granularity selective --recompute-modules core_attn layernorm",
        (1,),
    ),
    "modules again": (
        4,
        _TP + "--recompute-granularity selective --recompute-modules core_attn mlp",
        (0,),
    ),
    "activation functions again": (4, _TP + _TE + "--recompute-activation-function", (0,)),
    "norms again": (4, _TP + "--recompute-norm", (0,)),
    "latent attention": (4, _TP + _TE + _MLA, (0,)),
    "predictions of more tokens": (4, _PP + _TE + "--mtp-num-layers 1", (0, 3)),
    "muon": (4, _TP + _TE + "--optimizer muon", (0,)),
    "muon by layers": (4, _TP + _TE + "--optimizer dist_muon", (0,)),
    "narrow states": (
        4,
        _TP + _TE + _DIST + "--use-precision-aware-optimizer --exp-avg-dtype bf16 "
        "--exp-avg-sq-dtype bf16",
        (0,),
    ),
    "quantised states": (4, _TP + _TE + "--quant-states fp8", (0,)),
    "averaged weights": (4, _TP + _TE + "--optimizer-selection fused_ema_adamw", (0,)),
    "states on the host": (4, _TP + _TE + _DIST + "--swap-optimizer", (0,)),
    "mapped states": (4, _TP + _TE + _DIST + "--virtual-optimizer 1", (0,)),
    "one memory for both weights": (4, _TP + _TE + "--reuse-fp32-param", (0,)),
    "parts of both weights": (4, _TP + _TE + _DIST + "--reuse-fp32-param", (0,)),
    "attention on the host": (4, _TP + _TE + "--swap-attention --swap-min-bytes 1024", (0,)),
    "released gradients": (4, _TP + _TE + "--release-fp32-grad --grad-reduce-in-bf16", (0,)),
    "two copies of the states": (
        8,
        _TP + _TE + _DIST + "--overlap-grad-reduce --num-distributed-optimizer-instances 2",
        (0,),
    ),
    "dropout": (4, _TP + _TE + "--attention-dropout 0.1 --hidden-dropout 0.1", (0,)),
    "all": (
        8,
        _TP + _TE + _DIST + "--sequence-parallel --pipeline-model-parallel-size 2 --num-layers 4 "
        "--overlap-grad-reduce --overlap-param-gather",
        (0, 7),
    ),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("case", CASES)
def test_fake_equals_real(ranks, case: str) -> None:
    assert compare(ranks, *CASES[case]) == {}
