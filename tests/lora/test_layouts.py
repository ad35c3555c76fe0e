"""Adapters under every parallelism: losses and gradients of the peft package in fp64."""

from __future__ import annotations

import pytest
import torch

from tests.support.lazy import needs, needs_transformers

needs("megatron.core", "peft")

from safetensors.torch import load_file

from mindspeed.lora import LoraConfig, export, peft
from mindspeed.models import transformers_versions
from mindspeed.models.families import FAMILIES
from mindspeed.models.shape import shape_of
from tests.lora import lora_ranks, oracle
from tests.support import trainer_job

SETUP = "tests.support.warm"
TARGETS = f"--lora-target-modules {' '.join(oracle.TARGETS)} --lora-r 4 --lora-alpha 8".split()
TP2, TP4 = "--tensor-model-parallel-size=2", "--tensor-model-parallel-size=4"
SP, PP2 = "--sequence-parallel", "--pipeline-model-parallel-size=2"
VPP = "--num-virtual-stages-per-pipeline-rank=2"
LOCAL = "--transformer-impl=local"
FULL = ("--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1")
BLOCK = ("--recompute-granularity=full", "--recompute-method=block", "--recompute-num-layers=1")
SELECTIVE = ("--recompute-granularity=selective", "--recompute-modules", "core_attn", "layernorm")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Directories of base model and PEFT adapter, and what peft computes."""
    root = tmp_path_factory.mktemp("lora")
    folder = oracle.save_base(root / "base")
    model = oracle.adapted(folder)
    model.save_pretrained(root / "adapter")
    return folder, root / "adapter", *oracle.truth(model)


@pytest.mark.weekly_cases(
    "tp4-sp",
    "tp2",
    "recompute-block",
    "tp2-sp-local",
    "tp2-sp-recompute-selective",
    "pp2-vpp2-recompute-full",
)
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "size, flags",
    [
        pytest.param(1, (), id="one-rank"),
        pytest.param(1, FULL, id="recompute-full"),
        pytest.param(1, BLOCK, id="recompute-block"),
        pytest.param(2, (TP2,), id="tp2"),
        pytest.param(2, (TP2, SP), id="tp2-sp"),
        pytest.param(2, (TP2, SP, LOCAL), id="tp2-sp-local"),
        pytest.param(2, (TP2, LOCAL, *FULL), id="tp2-local-recompute-full"),
        pytest.param(2, (TP2, SP, *SELECTIVE), id="tp2-sp-recompute-selective"),
        pytest.param(2, (PP2, VPP, *FULL), id="pp2-vpp2-recompute-full"),
        pytest.param(2, (PP2, "--pipeline-schedule=zb-v"), id="pp2-v-shape"),
        pytest.param(2, ("--overlap-grad-reduce",), id="dp2-overlap"),
        pytest.param(4, (TP4, SP), id="tp4-sp"),
        pytest.param(4, (TP2, PP2, SP), id="tp2-pp2-sp"),
    ],
)
def test_adapter_gradients_equal_pefts(size, flags, base, ranks, tmp_path):
    compare(
        ranks, size, [*TARGETS, *flags], base, LoraConfig(oracle.TARGETS, r=4, alpha=8), tmp_path
    )


@pytest.mark.slow
def test_modules_to_save_are_fully_trained_and_saved(ranks, tmp_path):
    """A grown vocabulary: embedding and output layer, on two pipeline stages of two ranks each."""
    folder, saved = oracle.save_base(tmp_path / "base"), ("embed_tokens", "lm_head")
    model = oracle.adapted(folder, target_modules=["q_proj"], modules_to_save=list(saved))
    model.save_pretrained(tmp_path / "adapter")
    truth = (folder, tmp_path / "adapter", *oracle.truth(model))
    config = LoraConfig(("q_proj",), r=4, alpha=8, modules_to_save=saved)
    flags = ["--lora-target-modules=q_proj", "--lora-modules-to-save", *saved, TP2, PP2]
    compare(ranks, 4, [*flags, "--lora-r=4", "--lora-alpha=8"], truth, config, tmp_path / "out")


def test_experts_stay_frozen_on_expert_parallel_ranks(ranks, tmp_path):
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    folder = oracle.save_base(tmp_path / "base", "Mixtral", **sizes)
    model = oracle.adapted(folder, target_modules=["q_proj", "o_proj"])
    model.save_pretrained(tmp_path / "adapter")
    truth = (folder, tmp_path / "adapter", *oracle.truth(model, torch.float32))
    config = LoraConfig(("q_proj", "o_proj"), r=4, alpha=8)
    flags = ["--lora-target-modules", "q_proj", "o_proj", "--lora-r=4", "--lora-alpha=8"]
    flags += ["--expert-model-parallel-size=2", "--moe-aux-loss-coeff=0"]
    compare(ranks, 2, flags, truth, config, tmp_path / "out", "mixtral")


LATENT = {
    "first_k_dense_replace": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "rms_norm_eps": 1e-6,
}
MLA = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


@pytest.mark.parametrize("more", [(), pytest.param((LOCAL,), marks=pytest.mark.slow)])
def test_latent_attention_has_adapters(more, ranks, tmp_path):
    folder = oracle.save_base(tmp_path / "base", "DeepseekV3", **LATENT)
    model = oracle.adapted(folder, target_modules=list(MLA))
    model.save_pretrained(tmp_path / "adapter")
    truth = (folder, tmp_path / "adapter", *oracle.truth(model))
    flags = ["--lora-target-modules", *MLA, "--lora-r=4", "--lora-alpha=8", TP2, SP, *more]
    config = LoraConfig(MLA, r=4, alpha=8)
    compare(ranks, 2, flags, truth, config, tmp_path / "out", "deepseek_v3")


HYBRID = {
    "head_dim": 16,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "linear_attention"],
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rms_norm_eps": 1e-6,
}


@needs_transformers("5")
@pytest.mark.parametrize("size, flags", [(1, ()), pytest.param(2, (TP2,), marks=pytest.mark.slow)])
def test_gated_attention_and_delta_nets_have_adapters(size, flags, ranks, tmp_path):
    """Rows of ``q_proj`` hold the gates of the heads, too."""
    folder = oracle.save_base(tmp_path / "base", "Qwen3_5Text", of="Qwen3_5", **HYBRID)
    targets = (*oracle.TARGETS, "out_proj")
    model = oracle.adapted(folder, target_modules=list(targets))
    model.save_pretrained(tmp_path / "adapter")
    # Their gated delta rule and norms compute in fp32 whatever the model's type.
    truth = (folder, tmp_path / "adapter", *oracle.truth(model, torch.float32))
    flags = ["--lora-target-modules", *targets, "--lora-r=4", "--lora-alpha=8", *flags]
    config = LoraConfig(targets, r=4, alpha=8)
    compare(ranks, size, flags, truth, config, tmp_path / "out", "qwen3_5_text")


def test_tied_embeddings_on_two_pipeline_stages(ranks, tmp_path):
    folder = oracle.save_base(tmp_path / "base", tie_word_embeddings=True)
    model = oracle.adapted(folder, use_rslora=True)
    model.save_pretrained(tmp_path / "adapter")
    truth = (folder, tmp_path / "adapter", *oracle.truth(model))
    config = LoraConfig(oracle.TARGETS, r=4, alpha=8, use_rslora=True)
    flags = [*TARGETS, "--lora-use-rslora", PP2]
    compare(ranks, 2, flags, truth, config, tmp_path / "out")


@pytest.mark.slow
def test_additional_predicted_tokens_have_adapters(rank_pool, tmp_path):
    """Multi-token prediction: a base of one rank and of two stages; the adapter in either."""
    metrics_file = tmp_path / "metrics.jsonl"
    named = ("lm_loss", "mtp_1 loss", "grad_norm")

    def train(size, flags):
        metrics_file.unlink(missing_ok=True)
        words = f"--mtp-num-layers 1 --no-load-rng --metrics-file {metrics_file} {flags}"
        results = rank_pool.run(
            size, trainer_job.train, words.split(), setup=SETUP, backend=None, timeout=240
        )
        assert {result["error"] for result in results} == {None}, results
        return [[record[name] for name in named] for record in trainer_job.metrics(metrics_file)]

    train(1, f"--train-iters 1 --lr 0 --save {tmp_path / 'one'}")
    one = f"--load {tmp_path / 'one'} --no-load-optim"
    train(2, f"{one} --finetune {PP2} --train-iters 1 --lr 0 --save {tmp_path / 'two'}")
    two = f"--load {tmp_path / 'two'} --no-load-optim"

    adapters = "--lora-target-modules all-linear --lora-r 4 --lr 0.01 --train-iters 3"
    expected = train(1, f"{one} {adapters}")
    assert len(expected) == 3 and expected[2][1] < expected[0][1] - 1e-3  # it learns
    save = f"--save {tmp_path / 'adapter'} --save-interval 2"
    for found in (train(2, f"{one} {adapters} {PP2} {save}"), train(2, f"{two} {adapters} {PP2}")):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=0)
    load = f"--load {tmp_path / 'one'} --lora-load {tmp_path / 'adapter' / 'iter_0000002'}"
    words = f"merge-lora --load {tmp_path / 'one'} --lora-load {tmp_path / 'adapter'}"
    words = f"{words} --save {tmp_path / 'merged'}".split()
    ((status, message),) = rank_pool.run(1, lora_ranks.command, words, setup=SETUP, backend=None)
    assert status != 0 and "files of the family llama have no multi-token prediction" in message
    resumed = train(1, f"{load} {adapters}")
    torch.testing.assert_close(torch.tensor(resumed), torch.tensor(expected[2:]), rtol=1e-5, atol=0)


EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
EP2, GROUPED = "--expert-model-parallel-size=2", "--moe-grouped-gemm"


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A Mixtral whose experts have adapters, as transformers 5 and peft keep them: fused."""
    if not transformers_versions.at_least("5"):
        pytest.skip("transformers 4 keeps experts apart")
    root = tmp_path_factory.mktemp("experts")
    folder = oracle.save_base(root / "base", "Mixtral", **MOE)
    parameters = [f"mlp.{name}" for name in EXPERTS]
    model = oracle.adapted(folder, target_modules=["o_proj"], target_parameters=parameters)
    model.save_pretrained(root / "adapter")
    return folder, root / "adapter", *oracle.truth(model, torch.float32)


@pytest.mark.parametrize(
    "size, flags",
    [
        pytest.param(1, (GROUPED,), id="grouped"),
        pytest.param(2, (EP2,), id="ep2"),
        pytest.param(2, (EP2, GROUPED), id="ep2-grouped", marks=pytest.mark.slow),
        pytest.param(2, (EP2, LOCAL), id="ep2-local", marks=pytest.mark.slow),
        pytest.param(2, (TP2, SP, GROUPED), id="etp2-grouped"),
        pytest.param(2, (TP2, SP, LOCAL), id="etp2-local", marks=pytest.mark.slow),
        pytest.param(2, (TP2, SP), id="etp2", marks=pytest.mark.slow),
        pytest.param(4, (TP2, SP, EP2, GROUPED), id="tp2-ep2-grouped", marks=pytest.mark.slow),
    ],
)
def test_every_expert_has_its_own_adapter(size, flags, experts, ranks, tmp_path):
    targets = ("o_proj", *EXPERTS)
    flags = [*flags, "--moe-aux-loss-coeff=0", "--lora-target-modules", *targets]
    flags += ["--lora-r=4", "--lora-alpha=8"]
    compare(ranks, size, flags, experts, LoraConfig(targets, r=4, alpha=8), tmp_path, "mixtral")


def compare(ranks, size, flags, truth, config, out, family="llama"):
    """Loss and gradients on ``size`` ranks against peft's."""
    folder, adapter, loss, gradients = truth
    run = lora_ranks.loss_and_gradients
    results = ranks(size, run, str(folder), str(adapter), flags, setup=SETUP, timeout=120)
    losses = [found for found, _ in results if found is not None]
    assert sum(losses) / len(losses) == pytest.approx(loss, rel=1e-5)
    shape = shape_of(lora_ranks.resolved(str(folder), flags, size))
    export.write(out, config, lora_ranks.assembled(results), FAMILIES[family], shape)
    found = load_file(out / peft.WEIGHTS)
    assert found.keys() == gradients.keys()
    for name, expected in gradients.items():
        largest = expected.abs().max().item()
        assert largest > 1e-4, name
        # fp32 sums whose terms are larger than the sum, in the order of this processor.
        torch.testing.assert_close(
            found[name].double(), expected, rtol=1e-4, atol=1e-4 * largest, msg=name
        )
