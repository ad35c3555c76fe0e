"""A dense step: FakeTensors and real ranks count the same, to the byte."""

from __future__ import annotations

import pytest

from tests.planner.real_and_fake import compare

_TE = "--transformer-impl transformer_engine "
_TP = "--tensor-model-parallel-size 2 --bf16 " + _TE
_SP = _TP + "--sequence-parallel "
_PP = "--pipeline-model-parallel-size 2 --bf16 " + _TE
_DIST = "--use-distributed-optimizer "
_OVERLAP = _DIST + "--overlap-grad-reduce --overlap-param-gather "
_AGAIN = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
_MLA = (
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 12 "
)
_LORA = "--dry-run --lora-r 4 --lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2 "
_FP8 = "--fp8-format hybrid --ffn-hidden-size 192 --fp8-recipe "
_VIRTUAL = "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1 "
CASES = {
    "sequence parallel": (4, _SP + _DIST, [0, 3]),
    "overlapped, interleaved": (4, _PP + _VIRTUAL + _OVERLAP, [3]),
    "fp16": (4, _PP.replace("bf16", "fp16") + "--loss-scale 1024 " + _DIST, [3]),
    "layers in blocks again, interleaved": (
        4,
        _PP + _VIRTUAL + _AGAIN.replace("uniform", "block"),
        [0],
    ),
    "layers again, divided, local": (4, _SP.replace(_TE, "") + _AGAIN, [1]),
    "outputs again": (4, _TP + "--recompute-activation-function --recompute-norm", [0]),
    "outputs of latent attention again": (
        4,
        _TP + _MLA + "--recompute-granularity selective --recompute-modules mla_up_proj",
        [0],
    ),
    "latent attention, more tokens": (4, _PP + _MLA + _DIST + "--mtp-num-layers 1", [3]),
    "attention on the host": (4, _PP + "--swap-attention --swap-min-bytes 1024", [0]),
    "tied embeddings": (
        4,
        _PP + _OVERLAP + "~--untie-embeddings-and-output-weights",
        [0, 3],
    ),
    "dropout, fused loss": (
        4,
        _TP + "--attention-dropout 0.1 --hidden-dropout 0.1 --cross-entropy-loss-fusion "
        "--cross-entropy-fusion-impl te",
        [0],
    ),
    "adapters, whole modules, pipeline": (
        4,
        _PP + _DIST + _LORA + "--lora-modules-to-save output_layer",
        [3],
    ),
    "fp8, histories": (
        4,
        _TP + _FP8 + "delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max",
        [0],
    ),
    "divided gradients": (4, "--bf16 " + _TE + "--zero-stage 2", [0]),
    "divided weights": (4, _SP + "--zero-stage 3", [3]),
    "muon by layers": (4, _SP + "--optimizer dist_muon", [0]),
    "cadam": (4, _TP + _DIST + "--optimizer cadam", [0]),
    "quantised states, gradients": (
        4,
        _TP + "--quant-states fp8 --no-quant-states-exempt --quant-grads",
        [0],
    ),
    "states on the host": (4, _TP + _OVERLAP + "--swap-optimizer", [0]),
    "mapped states": (4, _TP + _DIST + "--virtual-optimizer 1", [0]),
    "parts of both weights": (
        4,
        _TP + _OVERLAP + "--reuse-fp32-param --reuse-fp32-param-exact",
        [0],
    ),
    "released gradients": (4, _TP + _DIST + "--release-fp32-grad --grad-reduce-in-bf16", [0]),
}


@pytest.mark.weekly_cases(
    "fp16",
    "layers again, divided, local",
    "outputs again",
    "divided gradients",
    "cadam",
    "mapped states",
    "latent attention, more tokens",
    "overlapped, interleaved",
    "muon by layers",
    "quantised states, gradients",
    "states on the host",
    "parts of both weights",
    "tied embeddings",
    "sequence parallel",
    "attention on the host",
)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_fake_equals_real(ranks, case: str) -> None:
    assert compare(ranks, *CASES[case]) == {}
