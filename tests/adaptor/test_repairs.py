"""Each upstream repair: the defect without it, the right result with it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import types
from pathlib import Path

import pytest
import torch

from mindspeed.adaptor.importing import PostImportHooks
from mindspeed.adaptor.repairs import absent_triton, dataset_helpers
from mindspeed.errors import DataError
from mindspeed.testing import RankError
from tests.adaptor import repair_ranks
from tests.support.lazy import needs

ADAPTOR = "tests.support.warm"
MEGATRON = "megatron.core.parallel_state"  # imported alone: nothing is repaired


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("repaired", [False, True])
def test_destroy_model_parallel_leaves_only_the_world(ranks, repaired):
    function = repair_ranks.groups_left_after_destroy
    for with_state, left in ranks(2, function, repaired, setup=MEGATRON, timeout=120):
        assert with_state > 20
        assert (left == 1) is repaired


def test_yarn_embeddings_are_made_on_the_cpu(ranks):
    ((error, frequencies),) = ranks(1, repair_ranks.yarn_frequencies, timeout=120)
    assert "accelerator device" in error
    expected = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    assert torch.allclose(frequencies, expected, rtol=1e-6)


@pytest.mark.slow
def test_enums_pickled_by_early_python_3_11_load(ranks):
    function = repair_ranks.enumeration_of_an_early_python_311
    with pytest.raises(RankError, match="GLOBAL getattr was not an allowed global"):
        ranks(1, function, setup=MEGATRON)
    assert ranks(1, function, setup=ADAPTOR) == ["flash"]


def check_packed(batch):
    assert batch["tokens"].tolist() == [list(range(8))]
    assert batch["cu_seqlens"].tolist() == [[0, 3, 8]]
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["max_seqlen"].tolist() == [5]


def test_packed_documents_reach_every_tensor_parallel_rank(ranks):
    for batch in ranks(2, repair_ranks.broadcast_of_packed_documents, setup=MEGATRON):
        check_packed(batch)


@pytest.mark.megatron_lm
@pytest.mark.slow
def test_packed_documents_through_megatron_lm(ranks, megatron_lm):
    env = {"PYTHONPATH": f"{megatron_lm}{os.pathsep}{Path.cwd()}"}
    function = repair_ranks.megatron_broadcast_of_packed_documents
    with pytest.raises(RankError):
        ranks(2, function, False, timeout=60, env=env)
    for batch in ranks(2, function, True, timeout=120, env=env):
        check_packed(batch)
        assert batch["labels"].tolist() == [list(range(1, 9))]


@pytest.fixture
def helper_directory(tmp_path, monkeypatch):
    """A copy of Megatron's helper source, and a ``compile_helpers`` that lives next to it."""
    spec = importlib.util.find_spec("megatron.core.datasets")
    source = Path(spec.origin).parent / "helpers.cpp"
    shutil.copy(source, tmp_path)
    original = compile("def compile_helpers(): ...", str(tmp_path / "utils.py"), "exec")
    namespace = {}
    exec(original, namespace)
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name.endswith("helpers_cpp") else real(name, *a),
    )
    return tmp_path, dataset_helpers.build_for_this_python(namespace["compile_helpers"])


@pytest.mark.slow
def test_dataset_helper_is_built_for_the_running_python(helper_directory, tmp_path, monkeypatch):
    directory, build = helper_directory
    compiler = tmp_path / "compiler"  # that does not optimise: half the time
    compiler.write_text('#!/bin/sh\nexec c++ "$@" -O0\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    build()
    library = directory / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    spec = importlib.util.spec_from_file_location("helpers_cpp", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert hasattr(module, "build_sample_idx_int32")
    assert [path.name for path in directory.glob("*helpers_cpp*")] == [library.name]


def test_missing_compiler_is_one_clear_message(helper_directory, monkeypatch):
    _, build = helper_directory
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        DataError, match=r"helpers_cpp is not built and a C\+\+ compiler is missing"
    ):
        build()


def test_dataset_helper_is_not_compiled_when_it_is_there(monkeypatch):
    monkeypatch.setattr(dataset_helpers, "_build", lambda directory: pytest.fail("compiled"))
    dataset_helpers.build_for_this_python(lambda: None)()


def test_kernels_that_import_triton_load_without_it_and_refuse_to_run(tmp_path, monkeypatch):
    (tmp_path / "kernels_of_triton.py").write_text(
        "import triton\nimport triton.language as tl\n"
        "@triton.jit\ndef plain(x, N: tl.constexpr): ...\n"
        "@triton.jit(launch_metadata=None)\ndef called(x): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = {name: sys.modules.get(name) for name in ("triton", "triton.language")}
    monkeypatch.setattr(absent_triton, "MODULES", ("kernels_of_triton",))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    hooks = PostImportHooks()
    hooks.install()
    try:
        absent_triton.install(hooks)
        import kernels_of_triton
    finally:
        hooks.uninstall()
        sys.modules.pop("kernels_of_triton", None)
    assert {name: sys.modules.get(name) for name in before} == before
    for kernel, name in ((kernels_of_triton.plain, "plain"), (kernels_of_triton.called, "called")):
        with pytest.raises(RuntimeError, match=f"kernel {name} needs Triton"):
            kernel[(1,)](torch.ones(1))
    assert isinstance(kernels_of_triton, types.ModuleType)


WITHOUT_TRITON = {
    "fusions/fused_pad_routing_map.py": "repairs/fused_routing_map.py",
    "fusions/fused_mla_yarn_rope_apply.py": "repairs/mla_rope_fusion.py",
    "fusions/fused_indices_converter.py": "refused: --moe-token-dispatcher-type flex",
    "transformer/custom_layers/batch_invariant_kernels.py": "refused: --batch-invariant-mode",
    "inference/contexts/attention_context/triton/tensor_ops.py": "kernels of Mamba's inference",
    "inference/contexts/fused_kv_append_kernel.py": "Megatron's plain way",
    "inference/communication/torch_symm_triton/": "asked for by utils.py where it is there",
    "ssm/triton_cache_manager.py": "of mamba_ssm, which needs CUDA",
    "utils.py": "says whether Triton is there",
}
"""Files of megatron.core that import Triton, and what happens where it is absent."""


def test_every_module_that_imports_triton_has_a_way_without_it():
    needs("megatron.core")
    core = Path(importlib.util.find_spec("megatron.core").origin).parent
    files = [str(path.relative_to(core)) for path in core.rglob("*.py")]
    line = re.compile(r"^\s*(?:import|from) triton", re.M)
    found = {file for file in files if line.search((core / file).read_text())}
    unknown = {file for file in found if not file.startswith(tuple(WITHOUT_TRITON))}
    assert not unknown, "give each a way without Triton, or a refusal"
    assert "fusions/fused_pad_routing_map.py" in found


def test_fused_padding_of_the_routing_map_pads_without_triton(ranks):
    """Padded to multiples by the first rows that an expert does not have, as fp8 products need."""
    ((padded, routing_map, kernel),) = ranks(1, repair_ranks.padded_routing_map, setup=ADAPTOR)
    counts = routing_map.sum(0)
    assert torch.equal(padded.sum(0), (counts + 15) // 16 * 16) and (counts % 16).any()
    assert (padded >= routing_map).all() and padded.dtype == torch.bool
    for before, after in zip(routing_map.T, padded.T, strict=True):
        added = (after & ~before).nonzero().flatten().tolist()
        assert added == (~before).nonzero().flatten()[: len(added)].tolist()
    assert kernel is None  # of appending to the KV cache: Megatron's plain way runs


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("impl", ["te", "local"])
def test_mla_gradients_are_reduced_under_tensor_parallelism(ranks, impl, sequence_parallel):
    run, setup = repair_ranks.latent_attention, ADAPTOR
    (truth,) = ranks(1, run, impl, False, True, setup=setup, timeout=240)
    for gradients in ranks(2, run, impl, sequence_parallel, True, setup=setup, timeout=240):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, truth[name], rtol=1e-9, atol=1e-9, msg=name)
    down = "linear_kv_down_proj.weight"
    broken = ranks(2, run, impl, sequence_parallel, False, setup=setup, timeout=240)
    right = [torch.allclose(gradients[down], truth[down]) for gradients in broken]
    assert all(right) == (impl == "te" and sequence_parallel)


def test_per_layer_comm_types_are_not_off_by_one(ranks):
    with pytest.raises(RankError, match="IndexError"):
        ranks(2, repair_ranks.comm_types_of_layers, False, setup=ADAPTOR, timeout=240)
    for specs in ranks(2, repair_ranks.comm_types_of_layers, True, setup=ADAPTOR, timeout=240):
        assert specs == [["p2p", "all_gather", "a2a"]] * 2


def test_rotary_positions_of_a_context_parallel_rank_on_the_cpu(ranks):
    """Megatron pins the index that it selects them with."""
    function = repair_ranks.positions_of_a_context_parallel_rank
    with pytest.raises(RankError, match=r"RuntimeError|AssertionError"):
        ranks(1, function, False, setup=ADAPTOR, timeout=120)
    assert ranks(1, function, True, setup=ADAPTOR, timeout=120) == [[2, 3, 4, 5]]


def test_a_batch_may_carry_its_own_context_parallel_group(ranks):
    function = repair_ranks.batches_with_groups_of_their_own
    for specs in ranks(4, function, setup=ADAPTOR, timeout=240):
        for spec, differences in specs.items():
            assert max(differences) < 1e-5, spec


@pytest.mark.parametrize("resume", [False, True])
def test_an_offloaded_optimizer_trains_all_weights(ranks, resume):
    weights, gradients = repair_ranks.adam_problem()
    masters = [weight.detach().float() for weight in weights]
    adam = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
    for step in gradients:
        for master, gradient in zip(masters, step, strict=True):
            master.grad = gradient
        adam.step()
    expected = [master.bfloat16().float() for master in masters]
    function = repair_ranks.offloaded_optimizers
    (trained,) = ranks(1, function, True, resume, setup=ADAPTOR, timeout=120)
    for fraction, values in trained.items():
        torch.testing.assert_close(values, expected, rtol=1e-2, atol=1e-6, msg=str(fraction))
    if resume:
        with pytest.raises(RankError, match=r"GLOBAL .*Adam"):
            ranks(1, function, False, resume, setup=ADAPTOR, timeout=120)
    else:
        (untrained,) = ranks(1, function, False, resume, setup=ADAPTOR, timeout=120)
        assert all(map(torch.equal, untrained[1.0], [w.detach().float() for w in weights]))


def test_mtp_loss_is_averaged_over_the_whole_sequence(ranks):
    count = repair_ranks.counted_tokens
    # Rank 0 of the zigzag holds the two ends of the sequence.
    assert ranks(2, count, False, setup=ADAPTOR, timeout=120) == [[3.0, 2.0], [4.0, 4.0]]
    assert ranks(2, count, True, setup=ADAPTOR, timeout=120) == [[3.5, 3.0]] * 2
