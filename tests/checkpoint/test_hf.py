"""Hugging Face directories: byte for byte there and back, in every layout, nothing half-written."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch

from tests.support import commands_job
from tests.support.lazy import Lazy, needs

needs("megatron.core", "transformers")

from safetensors.torch import load_file, save_file

from mindspeed.errors import CheckpointError, ConfigError
from mindspeed.models.hf_reader import HFReader
from tests.checkpoint import hf_ranks
from tests.support.tiny import batch, folders

latest = Lazy("mindspeed.checkpoint.find", "latest")
saved_args = Lazy("mindspeed.checkpoint.find", "saved_args")
Target = Lazy("mindspeed.checkpoint.weights.convert", "Target")
convert = Lazy("mindspeed.checkpoint.weights.convert", "convert")
HFWeights = Lazy("mindspeed.checkpoint.weights.hugging_face", "HFWeights")
family_like = Lazy("mindspeed.checkpoint.weights.hugging_face", "family_like")
TorchDistWeights = Lazy("mindspeed.checkpoint.weights.torch_dist", "TorchDistWeights")


SETUP = "tests.support.warm"
TP = "--tensor-model-parallel-size=2"
PP = "--pipeline-model-parallel-size=2"
EP = "--expert-model-parallel-size=2"


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """``directories(name)``: a tiny model of that family, as its files are."""
    return folders(tmp_path_factory)


@pytest.fixture
def command(ranks):
    """``command(*words)``: standard output of our command, in a fork that has imported it."""

    def run(*words):
        words = [str(word) for word in words]
        ((status, text, errors),) = ranks(1, commands_job.run, words, setup=SETUP, backend=None)
        assert status == 0, errors
        return text

    return run


def import_hf(folder, output, **options):
    """Convert a directory to ``torch_dist``; returns the tensors that the model does not use."""
    target = Target("torch_dist", **{"vocab_multiple": 128, **options})
    return convert(HFWeights(folder), output, target).unused


def export_hf(checkpoint, args, output, like=None, **options):
    """Convert a ``torch_dist`` checkpoint to a directory."""
    source = TorchDistWeights(checkpoint, args, family_like(args, like))
    convert(source, output, Target("hf", like=like, **options))


def files(folder):
    """All tensors of a directory."""
    return {k: v for file in Path(folder).glob("*.safetensors") for k, v in load_file(file).items()}


def assert_same(ours, theirs):
    """The same names, types and bytes."""
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["transformer_engine", "local"])
@pytest.mark.parametrize(
    "name", ["llama2-gqa", "internlm", "baichuan2-13b", "bloom", "qwen3", "mixtral", "deepseek-v3"]
)
def test_round_trip_is_byte_identical(directories, tmp_path, name, implementation):
    source = directories(name)
    target = {"transformer_impl": implementation, "max_file_bytes": 20_000}
    assert import_hf(str(source), str(tmp_path / "ck"), **target) == []
    export_hf(
        latest(str(tmp_path / "ck")),
        saved_args(str(tmp_path / "ck")),
        str(tmp_path / "hf"),
        like=str(source),
        max_file_bytes=30_000,
    )
    assert_same(files(tmp_path / "hf"), files(source))
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    ours, theirs = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "hf", source))
    assert ours["model_type"] == theirs["model_type"]


@pytest.mark.weekly_cases("llama2-gqa-2-*", "qwen3-moe-1-*", "llama-3-flags2")
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "size", "flags"),
    [
        ("llama2-gqa", 1, ()),
        ("llama2-gqa", 2, (TP,)),
        ("llama", 3, ("--tensor-model-parallel-size=3", "--unaligned-linear")),
        ("llama3.2-tied", 2, (PP,)),
        ("bloom", 2, (TP,)),
        ("qwen3-moe", 2, (EP, "--moe-grouped-gemm")),
        ("qwen3-moe", 1, ("--transformer-impl=local",)),
        ("deepseek-v3", 2, (EP, PP, "--decoder-first-pipeline-num-layers=1")),
    ],
)
def test_a_converted_checkpoint_is_the_model_in_every_layout(
    directories, ranks, tmp_path, name, size, flags
):
    source, output = str(directories(name)), str(tmp_path / "ck")
    local = "--transformer-impl=local" in flags
    size = size * (2 if PP in flags and EP in flags else 1)
    scheme = "local" if local else "transformer_engine"
    import_hf(source, output, transformer_impl=scheme, vocab_multiple=64)
    run = hf_ranks.weights
    converted = ranks(size, run, source, output, flags, setup=SETUP, timeout=120)
    direct = ranks(size, run, source, f"hf:{source}", flags, setup=SETUP, timeout=120)
    for ours, theirs in zip(converted, direct, strict=True):
        assert len(ours) == len(theirs) > 5
        for (name, start, tensor), (name_, start_, tensor_) in zip(ours, theirs, strict=True):
            assert (name, start) == (name_, start_) and torch.equal(tensor, tensor_), name


def test_transformers_loads_what_tp_2_trained(directories, ranks, command, tmp_path):
    source, run, out = directories("qwen3"), str(tmp_path / "run"), str(tmp_path / "hf")
    ranks(2, hf_ranks.save_trained, str(source), run, (TP,), setup=SETUP, timeout=120)
    assert "qwen3" in command("export", "--hf", "--load", run, "--output", out)
    from transformers import AutoModelForCausalLM

    original = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.mul_(1.5)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert type(loaded).__name__ == "Qwen3ForCausalLM"
    tokens, _ = batch()
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, original(tokens).logits)


def test_memory_holds_one_file_and_one_tensor(directories, tmp_path, monkeypatch):
    live, peak, limit = 0, 0, 20_000
    read = HFReader.read

    def counted(self, parameter, *args, **kwargs):
        nonlocal live, peak
        tensor = read(self, parameter, *args, **kwargs)
        live += tensor.nbytes
        peak = max(peak, live)

        def gone(size=tensor.nbytes):
            nonlocal live
            live -= size

        weakref.finalize(tensor.untyped_storage(), gone)
        return tensor

    monkeypatch.setattr(HFReader, "read", counted)
    source = directories("deepseek-v3")
    import_hf(str(source), str(tmp_path), max_file_bytes=limit)
    largest = max(tensor.nbytes for tensor in files(source).values())
    assert 0 < peak <= limit + 2 * largest < sum(t.nbytes for t in files(source).values()) / 2


def damaged(source, folder, change):
    tensors = files(source)
    change(tensors)
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def test_bad_input_is_refused_before_writing(directories, tmp_path):
    source, out = directories("llama2-gqa"), tmp_path / "out"
    name = "model.layers.1.mlp.up_proj.weight"
    missing = damaged(source, tmp_path / "a", lambda t: t.pop(name))
    wrong = damaged(source, tmp_path / "b", lambda t: t.update({name: torch.zeros(4, 32)}))
    with pytest.raises(CheckpointError, match=rf"{name} is missing.*mlp\.linear_fc1"):
        import_hf(missing, str(out))
    with pytest.raises(
        CheckpointError, match=rf"{name} has shape \[4, 32\].*\[48, 32\].*intermediate_size"
    ):
        import_hf(wrong, str(out))
    short = Path(damaged(source, tmp_path / "c", lambda t: None)) / "model.safetensors"
    short.write_bytes(short.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        import_hf(str(short.parent), str(out))
    (tmp_path / "d").mkdir()
    with pytest.raises(ConfigError, match=r"there is no config\.json"):
        import_hf(str(tmp_path / "d"), str(out))
    assert not out.exists()


def test_surplus_tensors_are_named_and_computed_buffers_are_not(directories, tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "x": torch.ones(1)}
    folder = damaged(directories("llama2-gqa"), tmp_path / "a", lambda t: t.update(extra))
    assert import_hf(folder, str(tmp_path / "out")) == ["x"]
    with pytest.raises(CheckpointError, match="holds checkpoints already"):
        import_hf(folder, str(tmp_path / "out"))


def test_a_wrong_vocabulary_and_quantized_weights_name_the_field(directories, tmp_path):
    source = directories("llama2-gqa")
    rows = {"model.embed_tokens.weight": torch.zeros(120, 32)}
    folder = damaged(source, tmp_path / "a", lambda t: t.update(rows))
    with pytest.raises(CheckpointError, match=r"\[120, 32\].*\[99, 32\].*look at vocab_size$"):
        import_hf(folder, str(tmp_path / "out"))
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    Path(folder, "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="quantized"):
        import_hf(folder, str(tmp_path / "out"))


def test_ignored_mtp_layers_are_reported_once(directories, tmp_path):
    names = ("enorm.weight", "eh_proj.weight", "mlp.gate_proj.weight")
    extra = {f"model.layers.2.{name}": torch.ones(1) for name in names}
    folder = damaged(directories("deepseek-v3"), tmp_path / "a", lambda t: t.update(extra))
    unused = import_hf(folder, str(tmp_path / "out"))
    assert unused == ["model.layers.2.* (multi-token prediction)"]


def test_an_index_that_names_a_missing_file(directories, tmp_path):
    source = directories("llama2-gqa")
    index = {"weight_map": dict.fromkeys(files(source), "model-00001-of-00002.safetensors")}
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"-00001-of-00002\.safetensors, which is missing"):
        import_hf(str(tmp_path), str(tmp_path / "out"))


def test_bin_files_are_read_too(directories, tmp_path):
    source = directories("bloom")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    plain = {name.removeprefix("transformer."): t for name, t in files(source).items()}
    torch.save(plain, tmp_path / "pytorch_model.bin")
    import_hf(str(tmp_path), str(tmp_path / "ck"))
    checkpoint = str(tmp_path / "ck")
    export_hf(latest(checkpoint), saved_args(checkpoint), str(tmp_path / "hf"))
    assert_same(files(tmp_path / "hf"), files(source))


@pytest.mark.slow
def test_the_commands_convert_both_ways_and_list_models(directories, command, tmp_path):
    source, checkpoint, out = directories("mistral-window"), tmp_path / "ck", tmp_path / "hf"
    assert "release" in command("convert", "--input", source, "--output", checkpoint)
    assert "mistral" in command("convert", "--input", checkpoint, "--output", out)
    assert_same(files(out), files(source))
    assert '"rotary_base": 1000000' in command("models", "qwen3-8b", "--json")


def test_an_exported_config_equals_the_source(directories, tmp_path):
    """Special tokens, the spread of initial weights, the type; no stale key wins over a written
    one; and an export without a tokenizer claims no special tokens."""
    from transformers import AutoConfig, GenerationConfig

    source = tmp_path / "source"
    shutil.copytree(directories("qwen3"), source)
    config = json.loads((source / "config.json").read_text())
    special = {"bos_token_id": 3, "eos_token_id": [4, 5], "pad_token_id": 6}
    stale = {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    config |= {**special, **stale, "initializer_range": 0.0125, "use_cache": False}
    (source / "config.json").write_text(json.dumps(config))
    import_hf(str(source), str(tmp_path / "ck"))
    found, saved = latest(str(tmp_path / "ck")), saved_args(str(tmp_path / "ck"))
    export_hf(found, saved, str(tmp_path / "like"), like=str(source))
    again = AutoConfig.from_pretrained(tmp_path / "like")
    assert {name: getattr(again, name) for name in special} == special
    assert again.initializer_range == 0.0125 and again.use_cache is False
    assert getattr(again, "rope_parameters", vars(again))["rope_theta"] == 5e5
    assert again.dtype == torch.float32
    generation = GenerationConfig.from_model_config(again)
    assert {name: getattr(generation, name) for name in special} == special
    export_hf(found, saved, str(tmp_path / "bare"))
    bare = json.loads((tmp_path / "bare" / "config.json").read_text())
    assert [bare[name] for name in special] == [None] * 3 and bare["initializer_range"] == 0.0125


def test_special_tokens_of_our_own_tokenizer_are_exported(directories, tmp_path):
    from mindspeed.data.tokenizer import save_tokenizer, train_bpe

    import_hf(str(directories("llama2-gqa")), str(tmp_path / "ck"))
    saved = saved_args(str(tmp_path / "ck"))
    (tmp_path / "own").mkdir()
    save_tokenizer(train_bpe(["one two three"] * 9, 260), tmp_path / "own")
    saved.tokenizer_model = str(tmp_path / "own")
    export_hf(latest(str(tmp_path / "ck")), saved, str(tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    ids = [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")]
    assert ids == [0, 0, 1]


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama2-gqa", "mistral-window", "bloom"])
def test_an_exported_tokenizer_gives_transformers_the_same_ids(directories, tmp_path, name):
    """Also where transformers has a class of its own for that kind of model (Qwen2)."""
    from transformers import AutoTokenizer

    from mindspeed.data.tokenizer import build_tokenizer, save_tokenizer, train_bpe
    from mindspeed.data.tokenizer_types import TokenizerOptions

    text = "It's 1234 o'clock;\tDON'T  panic\n\n  caf\u0065\u0301 2026!"
    import_hf(str(directories(name)), str(tmp_path / "ck"))
    saved = saved_args(str(tmp_path / "ck"))
    (tmp_path / "own").mkdir()
    save_tokenizer(train_bpe([text] * 9, 300), tmp_path / "own")
    saved.tokenizer_model = str(tmp_path / "own")
    export_hf(latest(str(tmp_path / "ck")), saved, str(tmp_path / "out"))
    expected = build_tokenizer(TokenizerOptions(tokenizer_model=saved.tokenizer_model))
    again = build_tokenizer(TokenizerOptions(tokenizer_model=str(tmp_path / "out")))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.tokenize(text) == expected.tokenize(text)
    assert theirs(text, add_special_tokens=False)["input_ids"] == expected.tokenize(text)
