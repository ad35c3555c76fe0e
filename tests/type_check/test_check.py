"""``mindspeed check --types`` accepts right layouts and finds planted faults at their line."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.architecture.source import ROOT
from tests.support import commands_job
from tests.type_check import faults
from tests.type_check.check_job import SMALL
from tests.type_check.faults import (
    CONTEXT,
    EXCHANGED,
    EXPERTS,
    GATHERED,
    GLOBAL_LOSS,
    GRID,
    LORA,
    PACKED,
    PAIRS,
    SCORES,
    SEQUENCE_LOSS,
    SLICED,
    SP,
    SPREAD,
    TP,
)

pytest.importorskip("spmd_types")
pytestmark = pytest.mark.timeout(900)  # the first test waits for all cases

ADAPTOR = "mindspeed.megatron_adaptor"
DELTA_NETS = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--linear-conv-kernel-dim 4 --linear-key-head-dim 8 --linear-value-head-dim 12 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4"
)
LATENT = f"{TP} --nproc 2 --multi-latent-attention"

RIGHT = {
    "tp": f"{TP} --nproc 2",
    "tp-of-64": f"{TP} --nproc 64",
    "sp": f"{SP} --nproc 2",
    "sp-of-64": f"{SP} --nproc 64",
    "sp-local": f"{SP} --nproc 2 --transformer-impl local",
    "tp-query-norms": f"{TP} --nproc 2 --qk-layernorm",
    "tp-local-query-norms": f"{TP} --nproc 2 --qk-layernorm --transformer-impl local",
    "grouped-queries": f"{SP} --nproc 2 --group-query-attention --num-query-groups 2",
    "latent-attention": LATENT,
    "latent-attention-sp": f"{LATENT} --sequence-parallel",
    "latent-attention-local": f"{LATENT} --transformer-impl local --qk-layernorm --q-lora-rank 16",
    "attention-sink": f"{TP} --nproc 2 --softmax-type learnable",
    "multi-token-prediction": f"{SP} --nproc 2 --mtp-num-layers 1",
    "interleaved": f"{TP} --nproc 4 --pipeline-model-parallel-size 2 --num-layers 4 "
    "--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 2",
    "coc": f"{SP} --nproc 2 --use-ascend-coc --coc-parallel-num 2",
    "mc2": f"{SP} --nproc 2 --use-ascend-mc2",
    "half-batches": f"{SP} --nproc 2 --half-batch-overlap --micro-batch-size 2",
    "grid": f"{GRID} --nproc 4 --num-layers 4",
    "grid-of-64": f"{GRID} --nproc 64 --context-parallel-size 2 --seq-length 64",
    "grid-pipeline": f"{GRID} --nproc 8 --pipeline-model-parallel-size 2",
    "largest-logit": f"{TP} --nproc 2 --z-loss-weight 0.1",
    "fused": f"{SP} --nproc 2 --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb "
    "--use-flash-attn",
    "fp8": f"{SP} --nproc 2 --bf16 --fp8-format hybrid",
    "documents": f"{TP} --nproc 2 --reset-attention-mask --reset-position-ids",
    "activation-plan": f"{TP} --nproc 2 --recompute-activation-function",
    "cp": f"{TP} --context-parallel-size 2 --nproc 4",
    "cp-ulysses": f"{TP} --context-parallel-size 2 --nproc 4 --cp-comm-type a2a",
    "cp-hybrid": f"{TP} --context-parallel-size 4 --nproc 8 --cp-comm-type a2a+p2p "
    "--hierarchical-context-parallel-sizes 2 2",
    "cp-attention-sink": f"{TP} --context-parallel-size 2 --nproc 4 --softmax-type learnable",
    "cp-gated-delta-nets": f"{SP} --context-parallel-size 2 --nproc 4 {DELTA_NETS}",
    "pipeline": f"{SP} --pipeline-model-parallel-size 2 --nproc 4",
    "long-pipeline": f"{SP} --pipeline-model-parallel-size 4 --nproc 8 --num-layers 8",
    "half-memory": f"{SP} --pipeline-model-parallel-size 2 --nproc 4 --num-layers 4 "
    "--global-batch-size 4 --pipeline-schedule v-half",
    "waves": f"{SP} --pipeline-model-parallel-size 2 --nproc 4 --num-layers 8 "
    "--global-batch-size 4 --num-virtual-stages-per-pipeline-rank 4 --pipeline-schedule zb-wave",
    "forward-beside-backward": f"{SP} --pipeline-model-parallel-size 2 --nproc 4 --num-layers 4 "
    f"--global-batch-size 8 --schedules-method dualpipev {EXPERTS} {SPREAD} --bf16 "
    "--moe-token-dispatcher-type alltoall --moe-fb-overlap",
    "recomputation": f"{SP} --nproc 2 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "recomputed-attention": f"{SP} --nproc 2 --recompute-granularity selective",
    "adapters": f"{TP} --nproc 2 {LORA}",
    "adapters-sp": f"{SP} --nproc 2 {LORA}",
    "experts": f"{SP} --nproc 2 {EXPERTS} --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1",
    "expert-tensor": f"{SP} --nproc 2 {EXPERTS} --moe-grouped-gemm",
    "experts-over-data": f"{SP} --nproc 8 {EXPERTS} --expert-model-parallel-size 4 "
    "--expert-tensor-parallel-size 1",
    "experts-gathered": f"{SP} --nproc 2 {EXPERTS} --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1 --moe-token-dispatcher-type allgather",
    "experts-overlapped": f"{SP} --nproc 2 {EXPERTS} {SPREAD} --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-alltoall-overlap-comm "
    "--moe-shared-expert-intermediate-size 32",
    "experts-gathered-overlapped": f"{SP} --nproc 2 {EXPERTS} {SPREAD} --moe-grouped-gemm "
    "--moe-token-dispatcher-type allgather --moe-permutation-async-comm "
    "--moe-allgather-overlap-comm",
    "experts-device-sizes": f"{SP} --nproc 2 {EXPERTS} {SPREAD} --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-alltoall-overlap-comm --moe-device-bound 1.5",
    "experts-fp8-dispatch": f"{SP} --nproc 2 {EXPERTS} {SPREAD} --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --hidden-size 128 --moe-fp8-dispatch both",
    "experts-zero-memory": f"{SP} --nproc 2 {EXPERTS} {SPREAD} --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-alltoall-overlap-comm --moe-zero-memory level0",
    "experts-one-by-one": f"{SP} --nproc 2 {EXPERTS} {SPREAD} --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --use-pipe-experts",
    "experts-hot": f"{SP} --nproc 2 {EXPERTS} {SPREAD} --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --balanced-moe-experts --balanced-moe-hot-expert-num 2",
    "experts-beside-attention": f"{SP} --nproc 2 {EXPERTS} {SPREAD} --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --ampipe-degree 2",
    "experts-latent-overlapped": f"{SP} --nproc 2 {EXPERTS} {SPREAD} --moe-latent-size 16 "
    "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-alltoall-overlap-comm",
    "experts-latent": f"{SP} --nproc 2 {EXPERTS} {SPREAD} --moe-latent-size 16",
    "experts-whole": f"{SP} --nproc 2 {EXPERTS} --expert-tensor-parallel-size 1",
    "experts-loss-per-sequence": f"{SP} --nproc 2 {SEQUENCE_LOSS} --moe-z-loss-coeff 0.001",
    "experts-global-loss": f"{SP} --nproc 8 {CONTEXT} {GLOBAL_LOSS} --moe-z-loss-coeff 0.001",
    "slices": f"{SLICED} --nproc 2",
    "slices-sequential": f"{EXCHANGED} --nproc 2",
    "slices-local": f"{EXCHANGED} --nproc 2 --transformer-impl local",
    "slices-spread": f"{SLICED} --nproc 4 --expert-model-parallel-size 2 --moe-permute-fusion",
    "slices-stacked": f"{SLICED} --nproc 4 --expert-model-parallel-size 2 "
    "--moe-use-legacy-grouped-gemm --bf16",
    "slices-gathered": f"{GATHERED} --nproc 4 --expert-model-parallel-size 2 --moe-grouped-gemm",
    "slices-gathered-sequential": f"{GATHERED} --nproc 2",
    "slices-overlapped": f"{SLICED} --nproc 4 --expert-model-parallel-size 2 "
    "--moe-alltoall-overlap-comm",
    "slices-gathered-overlapped": f"{GATHERED} --nproc 4 --expert-model-parallel-size 2 "
    "--moe-grouped-gemm --moe-permutation-async-comm --moe-allgather-overlap-comm",
    "cp-all-gather": f"{SP} {CONTEXT} --nproc 4 --context-parallel-algo kvallgather_cp_algo",
    "cp-adaptive": f"{SP} {CONTEXT} --nproc 4 --context-parallel-algo adaptive_cp_algo",
    "cp-multi-token-prediction": f"{SP} {CONTEXT} --nproc 4 --mtp-num-layers 1",
    "packed-ulysses": f"{SP} {PACKED} --nproc 4 --context-parallel-algo ulysses_cp_algo",
    "packed-ring": f"{SP} {PACKED} --nproc 4 --context-parallel-algo megatron_cp_algo",
    "packed-all-gather": f"{SP} {PACKED} --nproc 4 --context-parallel-algo kvallgather_cp_algo",
    "packed-hybrid": f"{SP} {PACKED} --nproc 8 --context-parallel-size 4 "
    "--context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 2",
    "packed-multi-token-prediction": f"{TP} {PACKED} --nproc 4 --mtp-num-layers 1",
    "packed-experts": f"{SP} {PACKED} --nproc 4 {EXPERTS}",
    "packed-pipeline": f"{SP} {PACKED} --nproc 8 --pipeline-model-parallel-size 2",
    "pairs": f"{SP} --nproc 8 {PAIRS} --pipeline-model-parallel-size 2 --num-layers 4 "
    "--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 8",
    "pairs-adapters": f"{TP} {CONTEXT} --nproc 8 {PAIRS} {LORA}",
    "pairs-unpaired": f"{SP} {CONTEXT} --nproc 8 {PAIRS} --loss-type kto",
    "pairs-packed": f"{TP} {CONTEXT} --nproc 8 {PAIRS} --loss-type orpo --pack-sequences "
    "--fix-sub-seq-length 8",
    "pairs-known-reference": f"{SP} --nproc 4 {PAIRS} --precompute-reference",
    "pairs-experts": f"{SP} --nproc 4 {PAIRS} {EXPERTS} {SPREAD}",
    "rewards": f"{SP} --nproc 4 {SCORES}",
    "rewards-adapters": f"{TP} {CONTEXT} --nproc 8 {SCORES} {LORA}",
    "cross-entropy": f"{SP} --nproc 2 --cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
}


@dataclass(frozen=True)
class Repaired:
    """A layout that Megatron itself trains wrongly.

    Attributes:
        repair: that makes it right.
        flags: of the layout.
        place: file and function of the first wrong use without the repair.
        setup: a name in :data:`tests.type_check.faults.SETUPS`.
    """

    repair: str
    flags: str
    place: str
    setup: str | None = None


REPAIRED = {
    "experts-whole": Repaired(
        "parameter-marks", RIGHT["experts-whole"], "te/linear_function.py:linear"
    ),
    "attention-sink": Repaired(
        "parameter-marks", RIGHT["attention-sink"], "te/attention.py:_with_sink"
    ),
    "latent-attention-local": Repaired(
        "parameter-marks", RIGHT["latent-attention-local"], "te/kernels.py:normalize"
    ),
    "latent-attention": Repaired(
        "latent-key-gradient",
        RIGHT["latent-attention"],
        "multi_latent_attention.py:qkv_up_proj_and_rope_apply",
    ),
    "latent-attention-sp-local": Repaired(
        "latent-key-gradient",
        f"{LATENT} --sequence-parallel --transformer-impl local",
        "multi_latent_attention.py:qkv_up_proj_and_rope_apply",
    ),
    "gathered-logits": Repaired(
        "losses",
        f"{TP} --nproc 2",
        "cross_entropy.py:vocab_parallel_cross_entropy",
        "gathered logits",
    ),
    "cp-multi-token-prediction": Repaired(
        "mtp", RIGHT["cp-multi-token-prediction"], "gpt/gpt_model.py:_postprocess"
    ),
    "cp": Repaired("losses", RIGHT["cp"], "pipeline_parallel/schedules.py:forward_step_calc_loss"),
    "smoothed-labels": Repaired(
        "losses", f"{TP} --nproc 2", "training/forward_step.py:next_token_loss", "smoothed labels"
    ),
}

# The row of the ledger that the refusal names.
REPORTED = {
    "experts-whole": "Megatron-LM PR 5916",
    "attention-sink": "Megatron-LM PR 7530",
    "latent-attention": "Megatron-LM PR 6839",
    "cp": "Megatron-LM PR 7513",
}

# All other repairs, and why the check cannot see what they repair.
NOT_SEEN = {
    "factors and dtypes of the router's losses and counts": "router router_loss_scale",
    "a job has one set of groups; other groups are refused when the model is built": (
        "explicit_groups"
    ),
    "which tokens a mask or a document has": (
        "masks mtp_packed_roll packed_conversations sampler_epochs dataset_helpers dataset_tokens "
        "token_ids"
    ),
    "data parallelism is taken to sum gradients": "fsdp",
    "time: communication that nothing waits for": "overlap expert_overlap",
    "groups after training, and workers": "process_groups checkpoint_worker failed_exit",
    "what is saved, loaded or counted on one rank": (
        "checkpoint_pickles expert_shards rerun_checkpoints serialization_format upcycling "
        "memory_estimate flops log_line numpy_names"
    ),
    "the optimizer": (
        "main_params optimizer_groups optimizer_offload optimizer_resume optimizer_schedule "
        "optimizer_states"
    ),
    "random states": "rng_tracker",
    "values and shapes on one rank": (
        "attention_logits layer_comm_types output_gate rope_flags yarn grouped_experts "
        "cuda_kernels delta_rule_functions fp32_residual local_spec offloading_state recompute "
        "te_activation absent_triton bridge_adapters clamped_activation eager_wandb jit_warmup "
        "nvidia_packages printed_objects"
    ),
}
BY_FAULTS = {"reductions"}  # a strided tensor: no layout of a job has one there


SIZES = ("smallest", "64")


def of_size(fault: faults.Fault, size: str) -> str:
    """The flags of a fault's job under the ranks that it needs, or 64."""
    of_four = ("--tp-2d", "pipeline", faults.CONTEXT, faults.SLICES)
    needed = 4 if any(one in fault.flags for one in of_four) else 2
    return f"{fault.flags} --nproc {needed if size == 'smallest' else 64}"


@pytest.fixture(scope="module")
def found(request) -> dict[str, dict]:
    """The verdicts of the cases that are asked for, from one process.

    It imports the checker first, and the cases run in children of it.
    """
    mine = [item for item in request.session.items if item.path == request.path]
    calls = [item.callspec.params for item in mine if "found" in item.fixturenames]
    asked = {name for call in calls for name in _names(**call)}
    cases = {name: case for name, case in _cases().items() if name in asked}
    done = subprocess.run(
        [sys.executable, "-m", "tests.type_check.check_job"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        input=json.dumps(list(cases.values())),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(cases), done.stderr[-4000:]
    return dict(zip(cases, lines, strict=True))


def _names(
    case: str | None = None, fault: str | None = None, size: str = "64", grid: tuple[str, ...] = ()
) -> list[str]:
    """The cases that a test with these parameters looks at."""
    found = [*grid]
    if case is not None:
        found += [case, f"{case}: unrepaired"]
    if fault is not None:
        found.append(f"{fault}: {size}")
    return found


def _cases() -> dict[str, tuple]:
    """Flags, fault and repair of each case."""
    cases: dict[str, tuple] = {name: (flags, None) for name, flags in RIGHT.items()}
    for name, one in REPAIRED.items():
        cases[name] = (one.flags, one.setup)
        cases[f"{name}: unrepaired"] = (one.flags, one.setup, one.repair)
    for fault in faults.NAMED.values():
        for size in SIZES:
            cases[f"{fault.name}: {size}"] = (of_size(fault, size), fault.name, fault.repair)
    return cases


# Weekly: layouts that another row has with more beside, or with a fault or a repair.
@pytest.mark.weekly_cases(
    *("tp-of-64", "sp-local", "tp-query-norms", "latent-attention-sp", "grid", "grid-of-64"),
    *("documents", "cp-ulysses", "cp-hybrid", "cp-attention-sink", "cp-all-gather", "pipeline"),
    *("recomputed-attention", "adapters", "expert-tensor", "experts", "experts-over-data"),
    *("experts-overlapped", "experts-gathered", "experts-loss-per-sequence", "slices"),
    *("slices-sequential", "slices-spread", "slices-gathered", "slices-gathered-sequential"),
    *("slices-overlapped", "packed-pipeline", "packed-multi-token-prediction", "sp"),
    *("pairs-unpaired", "pairs-known-reference", "pairs-experts", "pairs-adapters", "rewards"),
    *("experts-latent-overlapped", "experts-gathered-overlapped"),
)
@pytest.mark.slow
@pytest.mark.parametrize("case", RIGHT)
def test_a_right_layout_is_accepted(found, case):
    verdict = found[case]
    assert verdict.get("accepted"), verdict.get("error") or verdict["text"]
    assert "every gradient is summed over exactly the ranks" in verdict["text"]


# Functions with a rule that no layout here runs: where they run.
NOT_IN_THE_GRID = {
    "moe.dispatch.padded._SelectRows": "experts with equal capacities",
    "moe.events._Mark": "tests, which record the order of a backward",
    "te.comm._AllGather": "--use-transformer-engine-op-fuser",
    "te.comm._AllReduce": "--use-transformer-engine-op-fuser",
    "te.comm._ReduceScatter": "--use-transformer-engine-op-fuser",
}


@pytest.mark.weekly  # test_rules.py measures every function with a rule
@pytest.mark.slow
@pytest.mark.parametrize("grid", [tuple(RIGHT)], ids=["grid"])
def test_the_layouts_run_every_function_that_has_a_rule(found, grid):
    ran = {name for case in grid for name in found[case]["ran"]}
    own = {name for case in grid for name in found[case]["own"]}
    assert own - ran == set(NOT_IN_THE_GRID)


# Weekly: the same fault in another implementation, dispatcher or group of the layer.
@pytest.mark.weekly_cases(
    "norm of a frozen layer unmarked-64",
    "norms of the local spec unmarked-64",
    "gate of shared experts unmarked-64",
    "rewards not summed over the ranks of a sequence-64",
    "gathered probabilities get no sum-64",
    "norm of a layer after many unmarked-64",
    "bias of the local spec's row layers unmarked-64",
    "vectors on a grid unmarked-64",
    "sharded factors of adapters unmarked-64",
    "embedding summed and not scattered-64",
    "row layers of the local spec *-64",
    "results of slices of experts not summed-64",
    "results of slices of spread experts not summed-64",
    "results of slices of stacked experts not summed-64",
    "results of slices of gathered *-64",
    "counts of a loss per sequence summed over tensor ranks only-64",
    "gathered latent key gets no sum-64",
    "last norm of packed documents unmarked-64",
)
@pytest.mark.slow
@pytest.mark.parametrize("size", ["64", pytest.param("smallest", marks=pytest.mark.weekly)])
@pytest.mark.parametrize("fault", [fault.name for fault in faults.FAULTS])
def test_a_planted_fault_is_found_where_it_is_first_used(found, fault, size):
    verdict = found[f"{fault}: {size}"]
    assert verdict.get("accepted") is False, verdict
    file, line = faults.NAMED[fault].found
    wrong = verdict["wrong"]
    assert wrong["file"].endswith(file)
    assert line in Path(wrong["file"]).read_text("utf-8").splitlines()[wrong["line"] - 1]
    assert wrong.get("consequence", wrong["detail"]) in verdict["text"]
    assert f"REFUSED: stage {wrong['stage']}" in verdict["text"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault.name for fault, _ in faults.UNSEEN])
def test_a_changed_value_is_not_seen(found, fault):
    assert found[f"{fault}: 64"]["accepted"]
    test = dict((one.name, test) for one, test in faults.UNSEEN)[fault]
    file, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("fault", [faults.READS.name])
def test_experts_that_read_values_are_checked_with_real_tensors(found, fault):
    verdict = found[f"{fault}: 64"]
    assert verdict["accepted"], verdict["text"]
    assert "router.py" in verdict["with_values"]["0"]


@pytest.mark.slow
@pytest.mark.parametrize("case", REPAIRED)
def test_megatron_without_the_repair_is_refused(found, case):
    assert found[case].get("accepted"), found[case].get("error") or found[case]["text"]
    verdict = found[f"{case}: unrepaired"]
    assert verdict.get("accepted") is False, verdict
    file, _, function = REPAIRED[case].place.partition(":")
    assert verdict["wrong"]["file"].endswith(file)
    assert function in verdict["wrong"]["function"], verdict["text"]
    if case in REPORTED:
        [report] = verdict["wrong"]["known"]
        assert report["report"] == REPORTED[case]
        assert report["by"] == f"repair {REPAIRED[case].repair.replace('-', '_')}"
        assert f"known        {report['report']}: {report['wrong']}" in verdict["text"]


def test_every_repair_is_seen_or_has_a_reason():
    folder = ROOT / "mindspeed" / "adaptor" / "repairs"
    repairs = sorted(path.stem for path in folder.glob("*/*.py") if path.stem != "__init__")
    seen = {one.repair.replace("-", "_") for one in REPAIRED.values()}
    others = [name for names in NOT_SEEN.values() for name in names.split()]
    assert sorted([*seen, *others, *BY_FAULTS]) == repairs


@pytest.mark.slow
@pytest.mark.parametrize("grid", [("pipeline", "long-pipeline")], ids=["pipelines"])
def test_pipeline_stages_that_are_made_alike_run_once(found, grid):
    assert found["pipeline"]["stages"] == [0, 1]
    assert found["long-pipeline"]["stages"] == [0, 1, 3]
    assert "stages 0, 1, 3 of 4: the others are" in found["long-pipeline"]["text"]
    assert found["long-pipeline"]["parameters"]["V"] == 8 * 4 + 2


class Layer(torch.nn.Module):
    """Counts its calls."""

    def __init__(self, number: int, eps: float = 1.0) -> None:
        super().__init__()
        self.layer_number, self.eps, self.calls = number, eps, []

    def forward(self, hidden_states, context=None):
        """Returns what it is given."""
        self.calls.append(self.layer_number)
        return hidden_states, context


def test_layers_that_are_built_alike_run_once(monkeypatch):
    from mindspeed.type_check import equal_parts

    monkeypatch.setattr(equal_parts, "_follows_from_parts", lambda args: True)
    layers = [Layer(1), Layer(2), Layer(3), Layer(4, eps=2.0), Layer(5)]
    chunk = SimpleNamespace(decoder=SimpleNamespace(layers=layers))
    for ran in (set(), shared := set(), shared):  # of a stage, and of another's two chunks
        with equal_parts.equal_layers_run_once(argparse.Namespace(), chunk, ran):
            for layer in layers:
                layer(hidden_states=torch.zeros(2))
    assert [len(layer.calls) for layer in layers] == [2, 0, 0, 2, 0]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["last norm unmarked"])
def test_a_wrong_norm_is_named(found, fault):
    names = found[f"{fault}: 64"]["wrong"]["parameters"]
    assert names == ["decoder.final_layernorm.weight"]
    assert "its own tokens; nothing sums them" in found[f"{fault}: 64"]["text"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["function without a rule"])
def test_a_function_without_a_rule_stops_the_check_and_says_how_to_give_it_one(found, fault):
    text = found[f"{fault}: 64"]["text"]
    assert "mlp.py:" in text and "Halved is an autograd function without a rule" in text
    assert "from mindspeed.spmd import Local, typed" in text and "@typed(Local())" in text


FRAMEWORK = (
    *("", "context", "fault", "reads", "fault reads"),
    *("delta", "mamba", "formula", "formula unrepaired"),
)
"""Models of a framework that has imported the adaptor, bound names and asks for a check."""


@pytest.fixture(scope="module")
def framework(rank_pool) -> dict[str, list[str]]:
    """The lines of each check."""
    options = {"setup": ADAPTOR, "backend": None, "timeout": 300}
    [texts] = rank_pool.run(1, checks_of_a_framework, **options)
    return {name: text.splitlines() for name, text in zip(FRAMEWORK, texts, strict=True)}


def checks_of_a_framework() -> list[str]:
    """What a process says that imports the framework."""
    from tests.type_check import framework_job

    return framework_job.checks(list(FRAMEWORK))


@pytest.mark.slow
def test_the_model_of_a_framework_is_proven(framework):
    found = framework[""]
    assert found[0] == "4 ranks: tensor 2, sequence parallel yes, pipeline 2"
    assert found[-2].startswith("accepted: every gradient is summed")


@pytest.mark.slow
def test_collectives_that_the_adaptor_completed_before_the_checker_came_are_accepted(framework):
    """The loss is all-reduced: the checker met the device layer's collectives at its import."""
    found = framework["context"]
    assert found[0] == "4 ranks: tensor 2, sequence parallel yes, context 2"
    assert found[-2].startswith("accepted: every gradient is summed"), found


@pytest.mark.slow
def test_a_mark_that_a_framework_forgot_is_named(framework):
    found = framework["fault"]
    assert found[1].startswith("REFUSED: stage 0, ") and "framework_job.py:" in found[1]
    assert found[2].split() == ["parameters", "embedding.shift.bias"]


@pytest.mark.slow
def test_a_model_that_reads_values_is_checked_with_real_tensors(framework):
    found = framework["reads"]
    place = r"framework_job\.py:\d+ \(forward\) reads the value of a tensor"
    assert re.match(rf"  stage 0 ran on short samples of zeros, .*{place}", found[1])
    assert found[-2].startswith("accepted: every gradient is summed")


@pytest.mark.slow
def test_a_mark_is_missed_in_a_model_that_reads_values(framework):
    found = framework["fault reads"]
    assert found[2].startswith("REFUSED: stage 0, ") and "framework_job.py:" in found[2]
    assert found[3].split() == ["parameters", "embedding.shift.bias"]


@pytest.mark.slow
def test_layers_that_need_a_package_say_which(framework):
    if find_spec("mamba_ssm") is not None:
        pytest.skip("the package is installed")
    [said] = framework["mamba"]
    assert said.startswith("the check builds the model, which it cannot: ")
    assert said.endswith("Please install it with `pip install mamba-ssm`.")


@pytest.mark.slow
def test_gated_delta_nets_of_megatron_are_checked_without_their_package(framework):
    assert framework["delta"][-2].startswith("accepted: every gradient is summed")


@pytest.mark.slow
def test_the_norm_of_a_delta_net_is_refused_without_its_repair(framework):
    accepted, refused = framework["formula"], framework["formula unrepaired"]
    assert accepted[-2].startswith("accepted: every gradient is summed")
    assert refused[1].startswith("REFUSED: stage 0, ")
    assert "decoder.layers.0.self_attention.out_norm.weight" in refused[2].split()[1]
    assert any("output norm of gated delta nets" in line for line in refused)


def test_a_check_inside_a_running_job_is_refused(ranks):
    (said,) = ranks(1, check_inside_a_job, setup=ADAPTOR)
    assert "before torch.distributed.init_process_group" in said


def check_inside_a_job() -> str:
    """What :func:`mindspeed.check` says where torch.distributed is initialised."""
    import argparse

    import mindspeed
    from mindspeed.errors import ConfigError

    with pytest.raises(ConfigError) as raised:
        mindspeed.check(lambda **_: None, argparse.Namespace())
    return str(raised.value)


def test_a_missing_package_is_named(monkeypatch):
    from mindspeed.errors import ConfigError
    from mindspeed.type_check import require_package

    monkeypatch.setitem(sys.modules, "spmd_types.checker", None)
    with pytest.raises(ConfigError, match=r"pip install 'mindspeed\[types\]'"):
        require_package()


@pytest.mark.slow
def test_flags_of_the_job_stand_beside_those_of_the_command():
    words = [*SMALL.split(), *f"--nproc 2 {TP}".split()]
    done = subprocess.run(
        [sys.executable, "-m", "mindspeed", "check", "--types", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ranks: tensor 2\n") and "\naccepted: " in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"--types {SMALL} --nproc 3 {TP}", "3 ranks cannot be divided by tensor 2"),
        ("--nproc 2", "say what to check: --types"),
    ],
    ids=["ranks", "nothing"],
)
def test_what_cannot_be_checked_is_refused(ranks, words, message):
    call = commands_job.run, ["check", *words.split()]
    ((status, _, errors),) = ranks(1, *call, setup=commands_job.SETUP, backend=None)
    assert status == 1 and message in errors
