"""``setup=`` of ranks that use the suite: everything that they would import is imported once.

The server that forks ranks imports this module; a rank then starts with the suite, Megatron and
transformers loaded. Without it each rank of each test spends a second or two of processor time on
imports, most of what a small model costs. The adaptor comes before anything of Megatron.
"""

import contextlib
import importlib
import pkgutil

import mindspeed.compare.digest_rows
import mindspeed.megatron_adaptor
import mindspeed.plugins
import mindspeed.training.arguments

ROOMS = (
    *("adaptor", "attention", "checkpoint", "cli", "compare", "data", "evaluation", "features"),
    *("guard", "inference", "lora", "memory", "models", "moe", "ops", "optimizer", "pipeline"),
    *("planner", "te", "tensor_parallel", "training"),
)
OTHERS = (
    "megatron.core.tokenizers.text",
    "matplotlib.figure",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)


def modules_of(room: str) -> list[str]:
    """All modules of a package of ours."""
    package = importlib.import_module(f"mindspeed.{room}")
    found = [package.__name__]
    for module in pkgutil.iter_modules(package.__path__):
        name = f"{room}.{module.name}"
        if not module.name.startswith("lm_eval"):  # datasets and pyarrow: a thread, unfit to fork
            found += modules_of(name) if module.ispkg else [f"mindspeed.{name}"]
    return found


for name in (*(name for room in ROOMS for name in modules_of(room)), *OTHERS):
    with contextlib.suppress(ImportError):  # of an optional dependency
        importlib.import_module(name)
mindspeed.training.arguments.build_parser()
mindspeed.compare.digest_rows.library()  # else every rank that records compiles it
# Of --mock-data: to shuffle 100,000 documents is a sixth of what a tiny training costs.
importlib.import_module("megatron.core.datasets.gpt_dataset").MockGPTLowLevelDataset.size = 1000
mindspeed.plugins.installed()  # reads the metadata of every installed package
