"""Chains of an unmodified Megatron-LM script: saved in one layout, continued in another.

Every row is a checkpoint format, an optimizer and a change of layout that Megatron documents
(docs/api-guide/core/dist_checkpointing.md): ``torch_dist`` changes every size for an optimizer that
is not distributed and with ``--dist-ckpt-optim-fully-reshardable``, the data-parallel size only in
the default format of the distributed optimizer; ``torch`` (legacy) and ``fsdp_dtensor`` continue as
they are. The truth is the second half of the run that saved.

Repairs: ``optimizer_groups``, ``optimizer_resume``, ``expert_shards``, ``fsdp``. The quick chains
of the trainer are in ``tests/checkpoint/test_chains.py``.
"""

from __future__ import annotations

import pytest

from tests.megatron_lm.launch import Run, pretrain
from tests.megatron_lm.test_matrix import MLA, MODEL, MOE, TRAINING

pytestmark = [
    pytest.mark.slow,
    pytest.mark.megatron_lm,
    pytest.mark.usefixtures("forked_scripts"),
]

DEEPSEEK = (
    f"{MLA} {MOE.removeprefix(MODEL)} --moe-layer-freq ([0]*1+[1]*3) "
    "--moe-shared-expert-intermediate-size 32"
)
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
V_SHAPE = f"{PP2} --schedules-method dualpipev"
EP2 = "--expert-model-parallel-size 2"
DISTRIBUTED = "--use-distributed-optimizer"
RESHARDABLE = f"{DISTRIBUTED} --dist-ckpt-optim-fully-reshardable"
LEGACY = "--ckpt-format torch"
CADAM = "--optimizer cadam --adam-beta1 0.965 --lr 1e-4"
AVERAGES = "--optimizer-selection fused_ema_adamw --ema-decay 0.9"
FSDP = (
    f"{DISTRIBUTED} --use-megatron-fsdp --no-gradient-accumulation-fusion "
    "--ckpt-format fsdp_dtensor --data-parallel-sharding-strategy"
)

# name: (model, ranks and flags of the run that saves, ranks and flags of the one that continues)
CHAINS = {
    # torch_dist, an optimizer that is not distributed
    "plain same": (MODEL, 2, "", 2, ""),
    "plain data 2 to 1": (MODEL, 2, "", 1, ""),
    "plain tensor 2 to pipeline 2": (MODEL, 2, TP2, 2, PP2),
    "plain pipeline 2 to virtual pipeline": (MODEL, 2, PP2, 2, VPP2),
    "plain v-shape to virtual pipeline": (MODEL, 2, V_SHAPE, 2, VPP2),
    "plain pipeline 2 to context 2": (MODEL, 2, PP2, 2, "--context-parallel-size 2"),
    "plain experts 2 to tensor 2": (MOE, 2, EP2, 2, TP2),
    "plain tensor 2 to experts 2": (MOE, 2, TP2, 2, EP2),
    "plain experts 1 to experts 2": (MOE, 2, "", 2, EP2),
    "plain deepseek experts 2 to pipeline 2": (DEEPSEEK, 2, EP2, 2, PP2),
    # torch_dist, the distributed optimizer's default: the data-parallel size may change
    "distributed same": (MODEL, 2, DISTRIBUTED, 2, DISTRIBUTED),
    "distributed data 2 to 1": (MODEL, 2, DISTRIBUTED, 1, DISTRIBUTED),
    # torch_dist, fully reshardable
    "reshardable tensor 2 to pipeline 2": (
        MODEL,
        2,
        f"{TP2} {RESHARDABLE}",
        2,
        f"{PP2} {RESHARDABLE}",
    ),
    "reshardable to default": (MODEL, 2, f"{TP2} {RESHARDABLE}", 2, f"{PP2} {DISTRIBUTED}"),
    "reshardable to plain": (MODEL, 2, RESHARDABLE, 2, ""),
    "reshardable experts 2 to tensor 2": (
        MOE,
        2,
        f"{EP2} {RESHARDABLE}",
        2,
        f"{TP2} {RESHARDABLE}",
    ),
    "reshardable deepseek to plain pipeline": (DEEPSEEK, 2, f"{EP2} {RESHARDABLE}", 2, PP2),
    # torch, the legacy format
    "legacy plain": (MODEL, 2, f"{LEGACY} {TP2}", 2, f"{LEGACY} {TP2}"),
    "legacy distributed": (MODEL, 2, f"{LEGACY} {DISTRIBUTED}", 2, f"{LEGACY} {DISTRIBUTED}"),
    # states that Megatron's optimizer does not have, or that are stored elsewhere
    "cadam data 2 to 1": (MODEL, 2, f"{DISTRIBUTED} {CADAM}", 1, f"{DISTRIBUTED} {CADAM}"),
    "cadam legacy": (
        MODEL,
        2,
        f"{LEGACY} {DISTRIBUTED} {CADAM}",
        2,
        f"{LEGACY} {DISTRIBUTED} {CADAM}",
    ),
    "averages": (MODEL, 2, f"{RESHARDABLE} {AVERAGES}", 1, f"{RESHARDABLE} {AVERAGES}"),
    "averages legacy": (
        MODEL,
        2,
        f"{LEGACY} {DISTRIBUTED} {AVERAGES}",
        2,
        f"{LEGACY} {DISTRIBUTED} {AVERAGES}",
    ),
    "swapped to plain": (MODEL, 2, f"{DISTRIBUTED} --swap-optimizer", 2, DISTRIBUTED),
    "plain to virtual": (MODEL, 2, DISTRIBUTED, 2, f"{DISTRIBUTED} --virtual-optimizer all"),
    # Megatron-FSDP
    "fsdp optimizer": (MODEL, 2, f"{FSDP} optim", 2, f"{FSDP} optim"),
    "fsdp gradients": (MODEL, 2, f"{FSDP} optim_grads", 2, f"{FSDP} optim_grads"),
    "fsdp parameters": (MODEL, 2, f"{FSDP} optim_grads_params", 2, f"{FSDP} optim_grads_params"),
    "fsdp data 2 to 1": (MODEL, 2, f"{FSDP} optim_grads_params", 1, f"{FSDP} optim_grads_params"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """``saved(model, ranks, flags)``: a run of five iterations and its checkpoint of the second."""
    made: dict[tuple[str, int, str], tuple[Run, str]] = {}

    def get(model: str, nproc: int, flags: str) -> tuple[Run, str]:
        key = (model, nproc, flags)
        if key not in made:
            folder = tmp_path_factory.mktemp("saved")
            save = f"--save {folder}/c --save-interval 2 --train-iters 5"
            run = pretrain(folder, nproc, *f"{model} {TRAINING} {flags} {save}".split())
            # Not --ckpt-step: the legacy format takes the optimizer that the tracker names.
            (folder / "c/latest_checkpointed_iteration.txt").write_text("2")
            made[key] = run, f"{folder}/c"
        return made[key]

    return get


@pytest.mark.parametrize("chain", CHAINS)
def test_losses_continue_those_of_one_run(chain, saved, tmp_path):
    model, ranks, saving, further_ranks, going_on = CHAINS[chain]
    whole, checkpoint = saved(model, ranks, saving)
    load = f"--load {checkpoint} --train-iters 5"
    rest = pretrain(tmp_path, further_ranks, *f"{model} {TRAINING} {going_on} {load}".split())
    assert rest.losses == pytest.approx(whole.losses[2:], rel=2e-6)
    assert rest.grad_norms == pytest.approx(whole.grad_norms[2:], abs=2e-3)
