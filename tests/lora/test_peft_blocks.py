"""PEFT files where one tensor has the adapters of several parts or of all experts."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.support.lazy import Lazy, needs

needs("megatron.core")

from mindspeed.lora import LoraConfig, export, peft
from mindspeed.lora.hf_names import table_of, whole_parts
from mindspeed.models import transformers_versions
from mindspeed.models.families import FAMILIES
from mindspeed.models.shape import Shape
from tests.lora import oracle

real_peft = Lazy("peft")
hf = Lazy("transformers")


SIZES = {"hidden": 32, "ffn": 48, "vocab": 99, "padded_vocab": 99, "head": 8, "query": 32}
SIZES |= {"key": 32, "qkv": 96, "fc1": 96, "mtp": 0, "two_hidden": 64, "positions": 64}
DENSE = Shape({**SIZES, "experts": 0}, frozenset({"untied", "gated"}), (False,) * 2, (False,) * 2)
MOE = Shape(
    {**SIZES, "key": 16, "qkv": 64, "experts": 4, "expert_ffn": 48, "expert_fc1": 96},
    frozenset({"untied", "gated"}),
    (True, True),
    (False, False),
)
R, ALPHA = 4, 8.0


def random_adapter(family, shape, layers, parts_of):
    """Matrices of our own checkpoints for some layers; ``parts_of``: which parts have an A."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for layer, parameter in table_of(FAMILIES[family], shape).items():
        if not layer.endswith(layers):
            continue
        parts = whole_parts(layer, parameter, shape)
        asked = parts_of(parts)
        for name in asked:
            size = (R, parameter.shape[1])
            tensors[f"{layer}.lora_A.{name}"] = torch.randn(size, generator=generator)
        for name in parts if asked == ["all"] else asked:
            size = (parts[name], R)
            tensors[f"{layer}.lora_B.{name}"] = torch.randn(size, generator=generator)
    return tensors


def delta(tensors, layer, parts):
    """Correction of a layer's parts, one below the other."""
    shared = tensors.get(f"{layer}.lora_A.all")
    rows = []
    for name, count in parts.items():
        a = tensors.get(f"{layer}.lora_A.{name}", shared)
        if a is None:
            rows.append(torch.zeros(count, 32))
        else:
            rows.append(tensors[f"{layer}.lora_B.{name}"] @ a)
    return torch.cat(rows) * ALPHA / R


def same(ours, theirs):
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


class Packed(torch.nn.Module):
    """Only the names and shapes of a Baichuan."""

    def __init__(self):
        super().__init__()
        attention = lambda: torch.nn.ModuleDict({"W_pack": torch.nn.Linear(32, 96)})  # noqa: E731
        layer = lambda: torch.nn.ModuleDict({"self_attn": attention()})  # noqa: E731
        self.prepare_inputs_for_generation = None  # peft asks causal language models for it
        self.model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer(), layer()])})


@pytest.mark.parametrize(
    "names", [("q_proj", "k_proj", "v_proj"), ("q_proj", "v_proj"), ("W_pack",)]
)
@pytest.mark.parametrize("use_rslora", [False, True])
def test_adapters_of_a_packed_tensor_become_one_of_higher_rank(tmp_path, names, use_rslora):
    wanted = ["all"] if names == ("W_pack",) else [name[0] for name in names]
    tensors = random_adapter("baichuan", DENSE, "linear_qkv", lambda parts: wanted)
    config = LoraConfig(names, r=R, alpha=ALPHA, use_rslora=use_rslora)
    export.write(tmp_path, config, tensors, FAMILIES["baichuan"], DENSE)
    files = peft.read(tmp_path)
    assert set(files.config.target_modules) == set(names) and files.config.r == R
    assert files.config.scale == config.scale
    same(peft.whole_tensors(files, DENSE), tensors)
    model = real_peft.PeftModel.from_pretrained(Packed(), tmp_path)
    for number in range(2):
        module = model.base_model.model.model.layers[number].self_attn.W_pack
        layer = f"decoder.layers.{number}.self_attention.linear_qkv"
        expected = delta(tensors, layer, {"q": 32, "k": 32, "v": 32}) * config.scale * R / ALPHA
        torch.testing.assert_close(module.get_delta_weight("default"), expected)


@pytest.mark.parametrize("names", [("gate_up_proj", "down_proj"), ("gate_proj", "up_proj")])
def test_expert_adapters_become_one_tensor_of_transformers_5(tmp_path, names):
    whole = "gate_up_proj" in names
    layers = ("linear_fc1", "linear_fc2") if whole else "linear_fc1"
    wanted = (lambda parts: ["all"]) if whole else (lambda parts: ["gate", "up"])
    tensors = random_adapter("mixtral", MOE, layers, wanted)
    config = LoraConfig(tuple(f"experts.{name}" for name in names), r=R, alpha=ALPHA)
    export.write(tmp_path / "adapter", config, tensors, FAMILIES["mixtral"], MOE)
    files = peft.read(tmp_path / "adapter")
    assert set(files.config.target_modules) == set(config.target_modules)
    same(peft.whole_tensors(files, MOE), tensors)

    if not transformers_versions.at_least("5"):
        return  # the model has a parameter for each expert, and peft nothing to merge into
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    base = oracle.save_base(tmp_path / "base", "Mixtral", **sizes)
    model = hf.AutoModelForCausalLM.from_pretrained(base)
    before = {n: p.clone() for n, p in model.named_parameters() if ".experts." in n}
    merged = real_peft.PeftModel.from_pretrained(model, tmp_path / "adapter").merge_and_unload()
    after = dict(merged.named_parameters())
    for number in range(2):
        experts = [f"decoder.layers.{number}.mlp.experts.local_experts.{e}" for e in range(4)]
        expected = {
            "gate_up_proj": [
                delta(tensors, f"{e}.linear_fc1", {"gate": 48, "up": 48}) for e in experts
            ]
        }
        if whole:
            expected["down_proj"] = [
                delta(tensors, f"{e}.linear_fc2", {"all": 32}) for e in experts
            ]
        for name, deltas in expected.items():
            key = f"model.layers.{number}.mlp.experts.{name}"
            torch.testing.assert_close(
                after[key] - before[key], torch.stack(deltas), atol=1e-4, rtol=1e-4
            )


def test_base_weights_in_an_adapter_file_are_left_out(tmp_path):
    """peft saves the output layer itself when it has an adapter."""
    base = oracle.save_base(tmp_path / "base", num_hidden_layers=2)
    model = oracle.adapted(base, target_modules=["lm_head"])
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    assert any("base_layer" in key for key in load_file(tmp_path / "adapter" / peft.WEIGHTS))
    files = peft.read(tmp_path / "adapter")
    assert list(files.pairs) == ["lm_head"] and not files.whole


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.full((4, 8), float("nan")), r"values that are not finite"),
        (torch.ones(4), r"is torch.float32 \[4\]; weights of an adapter are matrices"),
        (torch.ones(4, 8, dtype=torch.int32), r"is torch.int32 \[4, 8\]"),
    ],
)
def test_tensors_of_an_adapter_are_matrices_of_finite_numbers(tmp_path, tensor, message):
    from safetensors.torch import save_file

    from mindspeed.errors import CheckpointError
    from mindspeed.lora import peft

    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (tmp_path / peft.CONFIG).write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {name.format("A"): tensor, name.format("B"): torch.zeros(8, 4)}
    save_file(tensors, tmp_path / peft.WEIGHTS)
    with pytest.raises(CheckpointError, match=message) as error:
        peft.read(tmp_path)
    assert "q_proj.lora_A" in str(error.value) and peft.WEIGHTS in str(error.value)
