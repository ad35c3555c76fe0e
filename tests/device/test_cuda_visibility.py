"""``torch.cuda`` reports a device to Megatron's modules only; other callers see the real state."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from mindspeed import device
from mindspeed.device.torch_cuda_shim import callers
from mindspeed.journal import Journal

QUESTIONS = {
    "torch.cuda.is_available()": (True, False),
    "torch.cuda.is_initialized()": (True, False),
    "torch.cuda.device_count()": (1, 0),
    "torch.cuda.is_bf16_supported()": (True, False),
    "x.is_cuda": (True, False),
    "x.type()": ("torch.cuda.HalfTensor", "torch.HalfTensor"),
    "torch.nn.Parameter(x).type()": ("torch.cuda.HalfTensor", "torch.HalfTensor"),
    "isinstance(x, torch.cuda.HalfTensor)": (True, False),
    "isinstance(x, torch.cuda.FloatTensor)": (False, False),
    "x.get_device()": (0, -1),
    "x.cpu() is x": (False, True),
    "x.to('cpu') is x": (False, True),
    "x.to(torch.device('cpu'), non_blocking=True) is x": (False, True),
    "x.to(x.dtype) is x": (True, True),
    "torch.ones(1, device='meta').is_cuda": (False, False),
    "torch.compile(print) is print": (True, False),
}


@pytest.fixture
def cpu_world(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    journal = Journal()
    device.install(journal, device.named("cpu"))
    yield
    journal.undo()


def ask(expression: str, module: str, **extra: Any) -> Any:
    """The value of ``expression`` in a module of this name."""
    x = torch.ones(2, dtype=torch.float16)
    return eval(expression, {"__name__": module, "torch": torch, "x": x, **extra})


@pytest.mark.parametrize("expression", QUESTIONS)
def test_cuda_availability_depends_on_the_calling_module(cpu_world, expression):
    for_megatron, truth = QUESTIONS[expression]
    assert ask(expression, "megatron.core.optimizer") == for_megatron
    for other in ("transformers.utils", "peft", "accelerate.state", "torch.amp", "megatronic"):
        assert ask(expression, other) == truth


@pytest.fixture
def forget_packages(monkeypatch):
    monkeypatch.setattr(callers, "_roots", set(callers._roots))
    monkeypatch.setattr(callers, "_known", {})


def test_a_framework_can_ask_to_be_treated_as_megatron(cpu_world, forget_packages):
    assert ask("torch.cuda.is_available()", "somerl.workers") is False
    device.treat_as_megatron("somerl.workers.actor")
    assert ask("torch.cuda.is_available()", "somerl.workers") is True


def test_the_main_script_is_treated_as_megatron_once_it_imported_it(cpu_world, forget_packages):
    namespace = {"__name__": "__main__", "torch": torch}
    assert eval("torch.cuda.is_available()", namespace) is False
    namespace["parallel_state"] = ModuleType("megatron.core.parallel_state")
    assert eval("torch.cuda.is_available()", namespace) is True


HELD = {
    "a module": "from megatron.core import parallel_state",
    "a class": "from megatron.core.transformer import TransformerConfig as Config",
    "a function": "from megatron.core.utils import divide",
    "nothing": "import json",
}


@pytest.mark.parametrize("held", HELD)
def test_a_module_sees_a_device_as_soon_as_it_imported_from_megatron(
    cpu_world, forget_packages, tmp_path, monkeypatch, held
):
    asked, package = "torch.cuda.device_count()", tmp_path.name
    (tmp_path / "actor.py").write_text(
        f"import torch\nbefore = {asked}\n{HELD[held]}\nafter = {asked}\n"
        f"def later():\n    return {asked}\n"
    )
    (tmp_path / "data.py").write_text(
        f"import torch\nfrom {package} import actor\ndef seen():\n    return {asked}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path.parent))
    data = importlib.import_module(f"{package}.data")
    sees = held != "nothing"
    assert (data.actor.before, data.actor.after, data.actor.later()) == (0, sees, sees)
    assert data.seen() == 0


def test_this_library_asks_its_device_layer(cpu_world, forget_packages):
    held = {"parallel_state": ModuleType("megatron.core.parallel_state")}
    assert ask("torch.cuda.is_available()", "mindspeed.adaptor.x", **held) is False


def test_files_in_the_root_of_a_checkout_are_treated_as_megatron(cpu_world, tmp_path):
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    file = str(tmp_path / "model_provider_x.py")
    asked = "torch.cuda.is_available()"
    assert ask(asked, "six_like_module", __file__=file) is False
    (tmp_path / "pretrain_gpt.py").touch()
    assert ask(asked, "model_provider_x", __file__=file) is True


def test_names_imported_by_megatron_are_independent(cpu_world):
    namespace = {"__name__": "megatron.core.x", "torch": torch, "x": torch.ones(2)}
    copy = eval("x.cpu()", namespace)
    namespace["x"].zero_()
    assert copy.tolist() == [1, 1]


def test_other_libraries_keep_working_in_the_same_process(cpu_world, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")

    assert accelerate.PartialState().device == torch.device("cpu")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    ids = torch.randint(0, 32, (1, 5))
    model(input_ids=ids, labels=ids).loss.backward()
    assert model.generate(input_ids=ids, min_new_tokens=2, max_new_tokens=2).shape == (1, 7)
    model.save_pretrained(tmp_path)
    weights = safetensors.load_file(tmp_path / "adapter_model.safetensors")
    assert {tensor.device.type for tensor in weights.values()} == {"cpu"}
    with accelerate.init_empty_weights():
        assert torch.nn.Linear(2, 2).weight.device.type == "meta"


def test_torch_jit_script_and_export_know_the_wrapped_factories(cpu_world):
    def body(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(2, device=x.device) + torch.ones_like(x)

    assert torch.jit.script(body)(torch.ones(2)).tolist() == [1, 1]
    exported = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    assert exported.module()(torch.ones(1, 2)).shape == (1, 2)


def test_compilation_is_left_to_other_libraries(cpu_world):
    def body(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + torch.arange(3, device=x.device).to(x.dtype) * torch.ones_like(x).cpu()

    compiled = torch.compile(body, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(3)), body(torch.ones(3)))


@pytest.mark.slow
def test_installing_imports_neither_megatron_nor_the_compiler():
    script = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "from mindspeed import device\n"
        "from mindspeed.journal import Journal\n"
        "device.install(Journal(), device.named('cpu'))\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert not new & {'megatron', 'torch_npu', 'triton', 'transformers'}, new\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "assert 'torch.distributed.tensor' not in sys.modules\n"
    )
    import subprocess

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
