"""Flags of Cadam, averages and states in host memory: what they refuse."""

from __future__ import annotations

import logging

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features import registry
from mindspeed.features.optimizer import virtual_optimizer
from mindspeed.features.optimizer.cadam import Cadam
from mindspeed.features.optimizer.virtual_optimizer import VirtualOptimizer

BF16 = {"bf16": True, "fp16": False}
CADAM = {"optimizer": "cadam"}
EMA = {"optimizer_selection": "fused_ema_adamw"}
SWAP = BF16 | {"swap_optimizer": True, "use_distributed_optimizer": True}
VIRTUAL = BF16 | {"virtual_optimizer": ("all",)}

REFUSED = {
    "beta 1": (CADAM | {"adam_beta1": 1.0}, "--adam-beta1: 1.0 is not in .0, 1."),
    "beta negative": (CADAM | {"adam_beta1": -0.1}, "--adam-beta1: -0.1 is not in"),
    "beta2": (CADAM | {"adam_beta2": 0.95}, "--adam-beta2: has no effect with --optimizer cadam"),
    "muon": (CADAM | {"muon_momentum": 0.8}, "--muon-momentum: has no effect"),
    "selection": (CADAM | EMA, "fused_ema_adamw: has no effect with --optimizer cadam"),
    "cadam zero": (CADAM | {"use_megatron_fsdp": True}, "--use-megatron-fsdp: cannot be combined"),
    "cadam fp8": (CADAM | {"exp_avg_dtype": "fp8"}, "--exp-avg-dtype: cannot be combined"),
    "cadam level": (CADAM | {"optimization_level": 1}, "needs --optimization-level >= 2"),
    "cadam reuse": (CADAM | BF16 | {"reuse_fp32_param": True}, "--reuse-fp32-param: .*cadam"),
    "decay alone": ({"ema_decay": 0.5}, "--ema-decay: has no effect alone; add --optimizer-sel"),
    "decay": (EMA | {"ema_decay": 1.5}, "--ema-decay"),
    "ema reuse": (EMA | BF16 | {"reuse_fp32_param": True}, "--reuse-fp32-param: .*fused_ema"),
    "ema swap": (EMA | SWAP, "--swap-optimizer: cannot be combined with --optimizer-selection"),
    "ema virtual": (EMA | VIRTUAL, "--virtual-optimizer: cannot be combined with --optimizer-sel"),
    "ema sgd": (EMA | {"optimizer": "sgd"}, "fused_ema_adamw"),
    "times alone": ({"swap_optimizer_times": 4}, "--swap-optimizer-times: has no effect alone"),
    "times": (SWAP | {"swap_optimizer_times": 0}, "--swap-optimizer-times"),
    "swap whole": (SWAP | {"use_distributed_optimizer": False}, "add --use-distributed-optimizer"),
    "swap reuse": (SWAP | {"reuse_fp32_param": True}, "--reuse-fp32-param: .*--swap-optimizer"),
    "swap quant": (SWAP | {"quant_states": "fp8"}, "--quant-states: .*--swap-optimizer"),
    "swap cadam": (SWAP | CADAM, "--swap-optimizer: cannot be combined with --optimizer cadam"),
    "swap virtual": (SWAP | VIRTUAL, "--virtual-optimizer: .*--swap-optimizer: both"),
    "swap masters": (SWAP | {"main_params_dtype": "fp16"}, "--main-params-dtype: .*--swap"),
    "virtual word": (BF16 | {"virtual_optimizer": ("most",)}, "most is not all, and not numbers"),
    "virtual zero": (BF16 | {"virtual_optimizer": ("0",)}, "0 is not all, and not numbers"),
    "virtual stages": (
        BF16 | {"virtual_optimizer": ("1", "2"), "pipeline_model_parallel_size": 4},
        "--virtual-optimizer: got 2 numbers for 4 pipeline stages; give 1 or 4",
    ),
    "virtual muon": (VIRTUAL | {"optimizer": "muon"}, "--virtual-optimizer: .*--optimizer muon"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused(case):
    values, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        registry.resolve(values, "cpu")


@pytest.mark.parametrize("values", [CADAM, EMA, SWAP, VIRTUAL, BF16 | {"virtual_optimizer": "2"}])
def test_what_works_is_accepted(values):
    assert len(registry.resolve(values, "cpu").enabled) > 0


class Kernels:
    """A seam that keeps what it is given."""

    def use_kernels(self, *, owner, **functions):
        vars(self).update(functions)


@pytest.mark.parametrize("lr, beta, said", [(1e-3, 0.9, 1), (1e-4, 0.9, 0), (1e-3, 0.965, 0)])
def test_cadam_gives_advice_once(lr, beta, said, caplog, monkeypatch):
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with caplog.at_level(logging.WARNING, "mindspeed"):
            values = {"lr": lr, "adam_beta1": beta}
            Cadam().attach(Kernels(), values)
    records = [record for record in caplog.records if "3 to 10 times lower" in record.message]
    assert len(records) == said


def test_each_stage_has_its_own_limit(monkeypatch):
    from mindspeed.te import optimizer_policy

    monkeypatch.setattr(optimizer_policy, "pipeline_rank", lambda: 1)
    seams = Kernels()
    VirtualOptimizer(("1", "0.5")).attach(seams, {"pipeline_model_parallel_size": 2})
    space = seams.state_placement("exp_avg")
    assert space.limit == 2**29 and seams.state_placement("exp_avg_sq") is space
    assert seams.state_placement("master_param") is None


def test_without_mapped_memory_states_are_swapped_with_a_warning(monkeypatch, caplog):
    from mindspeed.optimizer.placement import HostSwap

    monkeypatch.setattr(virtual_optimizer, "_swaps", lambda: True)
    seams = Kernels()
    with caplog.at_level(logging.WARNING, "mindspeed"):
        VirtualOptimizer(("all",)).attach(seams, {})
    assert isinstance(seams.state_placement("exp_avg"), HostSwap)
    assert "states are swapped" in caplog.text
