"""Files as they are published: experts in one tensor, numbers of eight and of four bits."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from tests.support.lazy import Lazy, needs, needs_transformers

needs("megatron.core", "transformers")

from safetensors.torch import load_file, save_file

from mindspeed.errors import ConfigError
from mindspeed.models import transformers_versions
from mindspeed.models.stored_weights import ExpertStack, Quantization, StoredTensors, mxfp4, pack
from tests.support.tiny import CASES, batch

HFWeights = Lazy("mindspeed.checkpoint.weights.hugging_face", "HFWeights")
write_hf = Lazy("mindspeed.checkpoint.weights.hugging_face", "write_hf")
transformers = Lazy("transformers")
BLOCK = 16


def saved(name, folder):
    model = CASES[name].model()
    CASES[name].save(model, folder)
    return model


def change(folder, tensors, **config):
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


def in_fp8(weight):
    """E4M3 and a scale for each block; rows and columns of the last blocks may be missing."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-6) / 448
    numbers = (blocks / scale[:, None, :, None]).reshape(padded.shape)
    numbers = numbers[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn)
    return numbers.contiguous(), scale


def from_fp8(numbers, scale):
    wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return numbers.float() * wide[: numbers.shape[0], : numbers.shape[1]]


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    """The same model twice: its matrices as blocks of E4M3, and as the fp32 that they mean."""
    quantized, plain = (tmp_path_factory.mktemp(name) for name in ("fp8", "plain"))
    for folder in (quantized, plain):
        saved("deepseek-v3", folder)
    tensors = load_file(quantized / "model.safetensors")
    stored, meant = {}, {}
    for name, tensor in tensors.items():
        stored[name] = meant[name] = tensor
        if tensor.ndim == 2 and "embed" not in name and "lm_head" not in name:
            numbers, scale = in_fp8(tensor)
            stored |= {name: numbers, f"{name}_scale_inv": scale}
            meant[name] = from_fp8(numbers, scale)
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    change(quantized, stored, quantization_config=config)
    change(plain, meant)
    return quantized, plain


@needs_transformers("5")
def test_blocks_of_eight_bits_are_read_as_what_they_mean(fp8):
    ours, truth = (HFWeights(folder) for folder in fp8)
    assert ours.unused == []
    for parameter in ours.table:
        expected = truth.read(parameter).to(ours.dtype(parameter))
        assert torch.equal(ours.read(parameter), expected), parameter.name


@needs_transformers("5")
def test_a_part_of_a_tensor_equals_the_part_of_the_whole(fp8):
    files = StoredTensors(fp8[0], quantization=Quantization("fp8", (BLOCK, BLOCK)))
    name = "model.layers.0.mlp.gate_proj.weight"
    part = files.slice(name)
    whole = part[:]
    assert part.get_shape() == list(whole.shape) == [48, 32] and whole.dtype == torch.float32
    for rows in (slice(0, 48), slice(5, 6), slice(15, 33), slice(47, 48), slice(3, 3)):
        for columns in (slice(None), slice(7, 20), slice(16, 32)):
            assert torch.equal(part[rows, columns], whole[rows, columns])


@needs_transformers("5")
def test_blocks_of_eight_bits_equal_transformers(fp8):
    if not transformers_versions.at_least("5"):
        pytest.skip("dequantized in transformers 5")
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    tensors = load_file(fp8[0] / "model.safetensors")
    name = "model.layers.0.mlp.gate_proj.weight"
    theirs = Fp8Dequantize(None)._dequantize_one(tensors[name], tensors[f"{name}_scale_inv"])
    files = StoredTensors(fp8[0], quantization=Quantization("fp8", (BLOCK, BLOCK)))
    assert torch.equal(files.slice(name)[:], theirs)


def blocks_of(shape, generator):
    """Random MXFP4 of ``[experts, rows, columns]``: blocks and scales."""
    experts, rows, columns = shape
    size = (experts, rows, columns // 32)
    blocks = torch.randint(256, (*size, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(120, 128, size, generator=generator, dtype=torch.uint8)


def test_numbers_of_four_bits_equal_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks, scales = blocks_of((3, 10, 64), generator)
    theirs = convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(mxfp4(blocks, scales).transpose(1, 2), theirs)
    every = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    extremes = torch.full((1, 16), 250, dtype=torch.uint8)
    assert mxfp4(every, extremes).isfinite().all()


@pytest.fixture(scope="module")
def four_bits(tmp_path_factory):
    """gpt-oss twice: its experts as MXFP4, and as the bf16 that they mean."""
    quantized, plain = (tmp_path_factory.mktemp(name) for name in ("mxfp4", "plain"))
    for folder in (quantized, plain):
        saved("gpt-oss", folder)
    generator = torch.Generator().manual_seed(2)
    tensors = load_file(plain / "model.safetensors")
    stored, meant = {}, {}
    for name, tensor in tensors.items():
        tensor = tensor.bfloat16()
        if tensor.ndim == 3 and "down" not in name:  # 48 inner channels are no multiple of 32
            experts, columns, rows = tensor.shape
            blocks, scales = blocks_of((experts, rows, columns), generator)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            meant[name] = mxfp4(blocks, scales).transpose(1, 2).contiguous()
        else:
            stored[name] = meant[name] = tensor
    change(quantized, stored, quantization_config={"quant_method": "mxfp4"}, dtype="bfloat16")
    change(plain, meant, dtype="bfloat16")
    return quantized, plain


def test_experts_of_four_bits_are_read_and_exported_as_what_they_mean(four_bits, tmp_path):
    quantized, plain = four_bits
    ours, truth = HFWeights(quantized), HFWeights(plain)
    assert ours.unused == []
    for parameter in ours.table:
        assert torch.equal(ours.read(parameter), truth.read(parameter)), parameter.name
    write_hf(ours, tmp_path, like=str(quantized), max_shard_bytes=2**30)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    written, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path, plain))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    logits = []
    for folder in (tmp_path, plain):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            logits.append(model.eval()(batch()[0]).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("columns", [(), (5,)], ids=["bias", "matrix"])
def test_a_stack_is_the_inverse_of_its_members(columns, transposed, interleaved):
    names = tuple(f"layers.{{layer}}.experts.{{expert}}.{part}" for part in ("gate", "up"))
    stack = ExpertStack("layers.{layer}.experts.both", names, transposed, interleaved)
    members = {
        name.format(layer=7, expert=expert): torch.randn(4, *columns)
        for expert in range(3)
        for name in names
    }
    shuffled = [*reversed(members.items()), ("other", torch.zeros(1))]
    packed = dict(pack(shuffled, [stack], experts=3))
    assert packed.keys() == {"layers.7.experts.both", "other"}
    tensor = packed["layers.7.experts.both"]
    for (_, member), place in zip(
        members.items(), ((e, m) for e in range(3) for m in range(2)), strict=True
    ):
        assert torch.equal(stack.of(tensor[place[0]], place[1]), member)
        assert stack.shape(tensor.shape) == tuple(member.shape)


@pytest.mark.parametrize(
    "declared",
    [
        {"quant_method": "gptq"},
        {"quant_method": "fp8"},
        {"quant_method": "compressed-tensors"},
        {"bits": 4},
    ],
    ids=str,
)
def test_other_kinds_of_quantization_are_refused_by_name(declared):
    config = SimpleNamespace(quantization_config=declared)
    with pytest.raises(ConfigError, match=r"read are fp8 with weight_block_size, and mxfp4"):
        Quantization.of(vars(config), "config.json")
