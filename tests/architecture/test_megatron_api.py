"""Who may use which names of Megatron.

Megatron's *internals* are

* modules and names that are not in :data:`PUBLIC` (an explicit list, a reason for each module);
* private names: ``_name`` imported, read from an imported object, or overridden in a subclass;
* assignments to attributes of what is imported, ``setattr`` included: monkey patches;
* a patch target written out, ``"megatron.core.x:Class.method"``.

They are for ``adaptor/``, ``te/`` and files named ``megatron*.py``. The others are a trainer on
megatron.core as Megatron-LM's own is, and use what :data:`PUBLIC` lists. Below the suite even that
is refused: ``test_rooms``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from mindspeed.adaptor.versions import megatron_root
from tests.architecture.source import ROOT, imports_of, parsed, room, sources

PUBLIC: dict[str, tuple[str, str]] = {
    "megatron.core": ("parallel_state dist_checkpointing", "process groups; checkpoints"),
    "megatron.core.activations": ("squared_relu", "a value of TransformerConfig"),
    "megatron.core.datasets.blended_megatron_dataset_builder": (
        "BlendedMegatronDatasetBuilder",
        "builds data sets",
    ),
    "megatron.core.datasets.blended_megatron_dataset_config": (
        "BlendedMegatronDatasetConfig parse_and_normalize_split",
        "configures data sets",
    ),
    "megatron.core.datasets.gpt_dataset": (
        "GPTDataset GPTDatasetConfig MockGPTDataset",
        "text as samples",
    ),
    "megatron.core.datasets.indexed_dataset": ("IndexedDataset", "tokens in files"),
    "megatron.core.datasets.megatron_dataset": ("MegatronDataset", "base class of data sets"),
    "megatron.core.datasets.utils": ("Split get_blend_from_list", "train, valid, test; blends"),
    "megatron.core.dist_checkpointing.core": ("CheckpointingException", "its errors"),
    "megatron.core.dist_checkpointing.dict_utils": ("nested_values", "walks sharded state dicts"),
    "megatron.core.dist_checkpointing.mapping": (
        "ShardedObject ShardedTensor apply_factories is_main_replica",
        "what a sharded state dict holds",
    ),
    "megatron.core.dist_checkpointing.strategies.async_utils": (
        "AsyncRequest",
        "what dist_checkpointing.save returns",
    ),
    "megatron.core.dist_checkpointing.strategies.fully_parallel": (
        "FullyParallelSaveStrategyWrapper",
        "the strategy that dist_checkpointing.save takes",
    ),
    "megatron.core.dist_checkpointing.strategies.torch": (
        "TorchDistSaveShardedStrategy",
        "the strategy that dist_checkpointing.save takes",
    ),
    "megatron.core.distributed": (
        "DistributedDataParallel DistributedDataParallelConfig finalize_model_grads",
        "data parallelism",
    ),
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter": (
        "FullyShardedDataParallel",
        "Megatron-FSDP, imported so by Megatron-LM's trainer",
    ),
    "megatron.core.enums": ("ModelType", "what kind a model is"),
    "megatron.core.extensions": (
        "transformer_engine",
        "classes of linear layers, which LoRA has to tell apart",
    ),
    "megatron.core.fusions.fused_bias_geglu": ("quick_gelu", "a value of TransformerConfig"),
    "megatron.core.inference.contexts": ("StaticInferenceContext", "keys and values of a decoder"),
    "megatron.core.model_parallel_config": ("ModelParallelConfig", "fields that become flags"),
    "megatron.core.models.gpt": ("GPTModel", "the model"),
    "megatron.core.models.gpt.gpt_layer_specs": (
        "get_gpt_decoder_block_spec get_gpt_layer_local_spec "
        "get_gpt_layer_with_transformer_engine_spec get_gpt_mtp_block_spec",
        "layers of the model",
    ),
    "megatron.core.num_microbatches_calculator": (
        "get_current_global_batch_size get_num_microbatches init_num_microbatches_calculator "
        "unset_num_microbatches_calculator update_num_microbatches "
        "RampupBatchsizeNumMicroBatchesCalculator",
        "batch size ramp-up",
    ),
    "megatron.core.optimizer": (
        "OptimizerConfig get_megatron_optimizer",
        "the optimizer",
    ),
    "megatron.core.optimizer.optimizer": (
        "MegatronOptimizer param_group_identifier_keys",
        "type of the optimizer; what names a parameter group in checkpoints",
    ),
    "megatron.core.optimizer_param_scheduler": (
        "OptimizerParamScheduler",
        "learning rate schedule",
    ),
    "megatron.core.pipeline_parallel": ("get_forward_backward_func", "pipeline schedules"),
    "megatron.core.tensor_parallel": (
        "ColumnParallelLinear RowParallelLinear get_cuda_rng_tracker "
        "model_parallel_cuda_manual_seed set_defaults_if_not_set_tensor_model_parallel_attributes",
        "linear layers of the local spec, random number generators, marks of parameters",
    ),
    "megatron.core.tokenizers": (
        "MegatronTokenizer",
        "the tokenizer classes of data sets",
    ),
    "megatron.core.transformer": (
        "MLATransformerConfig TransformerConfig TransformerLayer",
        "the configuration; layers, whose costs are counted one by one",
    ),
    "megatron.core.transformer.attention": (
        "Attention",
        "finds attention modules to decode sequences of different lengths together",
    ),
    "megatron.core.transformer.module": ("Float16Module", "16-bit models"),
    "megatron.core.transformer.multi_token_prediction": (
        "MTPLossLoggingHelper",
        "multi-token prediction: losses, logged",
    ),
    "megatron.core.transformer.pipeline_parallel_layer_layout": (
        "PipelineParallelLayerLayout",
        "--pipeline-model-parallel-layout",
    ),
    "megatron.core.transformer.torch_norm": ("WrappedTorchNorm", "a norm for layer specs"),
}
pytestmark = pytest.mark.skipif(megatron_root() is None, reason="needs megatron-core")
WITH_INTERNALS = {"adaptor", "te"}
TARGET = re.compile(r"megatron\.[\w.]+:[\w.]+")


def suite() -> list[Path]:
    return [
        path
        for path in sources()
        if room(path) not in WITH_INTERNALS and not path.name.startswith("megatron")
    ]


def is_public(name: str) -> bool:
    module, _, leaf = name.rpartition(".")
    return leaf in PUBLIC.get(module, ("", ""))[0].split()


def used() -> Iterator[tuple[Path, int, str]]:
    """Every import from Megatron outside the places that may know its internals."""
    for path in suite():
        for line, name, _ in imports_of(path):
            if name.partition(".")[0] == "megatron":
                yield path, line, name


def internals(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Private names, monkey patches and patch targets in a file, with their lines."""
    known = dict(_names_of_megatron(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in known and (_is_private(node.attr) or _is_stored(node)):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            if ast.unparse(node.args[0]).partition(".")[0] in known:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if TARGET.fullmatch(node.value):
                yield node.lineno, node.value
        elif isinstance(node, ast.ClassDef):
            yield from _overridden(node, known)


def _names_of_megatron(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Local name -> module, or module and name, of Megatron."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "megatron":
            yield from ((alias.asname or alias.name, node.module or "") for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "megatron":
                    yield alias.asname or "megatron", alias.name


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_stored(node: ast.Attribute) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _overridden(node: ast.ClassDef, known: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Private methods of a class that a base class of Megatron has, too."""
    for base in node.bases:
        if not isinstance(base, ast.Name) or base.id not in known:
            continue
        inherited = _private_methods(known[base.id].rpartition(".")[0])
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name in inherited:
                yield part.lineno, f"{node.name}.{part.name}"


@cache
def _private_methods(package: str) -> frozenset[str]:
    """Private functions and methods of all modules of a package, read from its files."""
    root = megatron_root()
    assert root is not None
    texts = [path.read_text() for path in root.joinpath(*package.split(".")).glob("*.py")]
    return frozenset(n for text in texts for n in re.findall(r"def (_[a-z]\w*)\(", text))


def test_the_reader_finds_every_kind_of_internal() -> None:
    tree = ast.parse(
        "from megatron.core import parallel_state as ps\n"
        "from megatron.core.datasets.gpt_dataset import GPTDataset\n"
        "ps._GROUP\n"
        "ps.get_rank = 3\n"
        "setattr(ps, 'get_rank', 3)\n"
        "'megatron.core.utils:get_attr'\n"
        "class Mine(GPTDataset):\n"
        "    def _query_document_sample_shuffle_indices(self): ...\n"
        "    def _own(self): ...\n"
        "    def __len__(self): ...\n"
        "ps.get_rank()\n"
        "ps.__file__\n"
    )
    assert {line for line, _ in internals(tree)} == {3, 4, 5, 6, 8}


def test_only_adaptor_te_and_files_named_megatron_know_its_internals() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path, line, name in used()
        if not is_public(name)
    ]
    wrong += [
        f"{path.relative_to(ROOT)}:{line} {text}"
        for path in suite()
        for line, text in internals(parsed(path))
    ]
    assert wrong == []


def test_every_public_name_of_the_list_is_used_and_has_a_reason() -> None:
    names = {name for _, _, name in used()}
    listed = {f"{module}.{name}" for module, (all_, _) in PUBLIC.items() for name in all_.split()}
    assert listed - names == set()
    assert all(reason for _, reason in PUBLIC.values())
