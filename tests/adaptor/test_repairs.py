"""Each upstream repair: the defect without it, the right result with it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import sysconfig
import types
from pathlib import Path

import pytest
import torch

from mindspeed.adaptor.importing import PostImportHooks
from mindspeed.adaptor.repairs.attention import layer_comm_types
from mindspeed.adaptor.repairs.data import dataset_helpers, packed_conversations
from mindspeed.adaptor.repairs.layers import bridge_adapters
from mindspeed.adaptor.repairs.scripts import absent_triton, eager_wandb, log_line
from mindspeed.adaptor.versions import at_least, in_range, megatron_version
from mindspeed.errors import DataError
from mindspeed.journal import Journal
from mindspeed.testing import RankError
from tests.adaptor import repair_ranks
from tests.support.installed_repair import with_repair
from tests.support.lazy import needs
from tests.support.release import brought_by, has_defect

ADAPTOR = "tests.support.warm"
MEGATRON = "tests.support.bare_megatron"  # nothing is repaired


@pytest.mark.weekly_cases("False")
@pytest.mark.slow
@pytest.mark.parametrize("repaired", [False, True])
def test_destroy_model_parallel_leaves_only_the_world(ranks, repaired):
    function = repair_ranks.groups_left_after_destroy
    for with_state, left in ranks(2, function, repaired, setup=MEGATRON, timeout=120):
        assert with_state > 20
        assert (left == 1) is repaired


@pytest.mark.slow
def test_yarn_embeddings_are_made_on_the_cpu(ranks):
    ((error, frequencies),) = ranks(1, repair_ranks.yarn_frequencies, timeout=120)
    assert "accelerator device" in error
    expected = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    assert torch.allclose(torch.tensor(frequencies), expected, rtol=1e-6)


@pytest.mark.slow
def test_yarn_rotates_a_share_of_the_channels(ranks):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=1, max_position_embeddings=256, rope_scaling=scaling
    )
    half, _ = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    expected = torch.cat((half, half))
    (found,) = ranks(1, repair_ranks.partial_yarn, True, setup=ADAPTOR)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    (found,) = ranks(1, repair_ranks.partial_yarn, False, setup=ADAPTOR)
    assert len(found) == 2 * len(expected)


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
    function = repair_ranks.megatron_broadcast_of_packed_documents
    if not has_defect(packed_conversations, "get_batch_on_this_tp_rank"):
        pytest.skip("megatron.core broadcasts them")
    adaptor = {"setup": "mindspeed.megatron_adaptor"}
    if in_range(megatron_version(), "~=0.16.0"):  # 0.15 sends none, 0.17 not to the last stage
        with pytest.raises(RankError) as raised:
            ranks(2, function, False, str(megatron_lm), timeout=60, **adaptor)
        assert "in get_batch_on_this_tp_rank" in str(raised.value)
    for batch in ranks(2, function, True, str(megatron_lm), timeout=120, **adaptor):
        check_packed(batch)
        assert batch["labels"].tolist() == [list(range(1, 9))]


@pytest.fixture
def helper_directory(tmp_path, monkeypatch):
    """A copy of Megatron's helper source, and a ``compile_helpers`` that lives next to it."""
    spec = importlib.util.find_spec("megatron.core.datasets")
    source = Path(spec.origin).parent / "helpers.cpp"
    # With one of its functions bound: each further one is half a second of templates.
    others = re.compile(r'^ *m\.def\((?!"build_sample_idx_int32").*\n', re.M)
    (tmp_path / source.name).write_text(others.sub("", source.read_text()))
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
    assert dataset_helpers.build_for_this_python(lambda: None)() is None


def test_kernels_that_import_triton_load_without_it_and_refuse_to_run(tmp_path, monkeypatch):
    package = tmp_path / "kernels_of_triton"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "optional.py").write_text("try: import triton\nexcept ImportError: HAVE = 0\n")
    (package / "needed.py").write_text(
        "import triton\nimport triton.language as tl\n"
        "from kernels_of_triton.optional import HAVE\n"
        "@triton.jit\ndef plain(x, N: tl.constexpr): ...\n"
        "@triton.jit(launch_metadata=None)\ndef called(x): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = {name: sys.modules.get(name) for name in ("triton", "triton.language")}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    hooks = PostImportHooks()
    hooks.install()
    try:
        absent_triton.install(hooks, "kernels_of_triton")
        from kernels_of_triton import needed
    finally:
        hooks.uninstall()
        for name in [name for name in sys.modules if name.startswith("kernels_of_triton")]:
            del sys.modules[name]
    assert {name: sys.modules.get(name) for name in before} == before
    assert needed.HAVE == 0
    for kernel, name in ((needed.plain, "plain"), (needed.called, "called")):
        with pytest.raises(RuntimeError, match=f"kernel {name} needs Triton"):
            kernel[(1,)](torch.ones(1))


def test_a_package_that_megatron_imports_for_nothing_is_loaded_at_its_first_use(
    tmp_path, monkeypatch
):
    package = tmp_path / "recorder"
    package.mkdir()
    (package / "__init__.py").write_text("from recorder.sdk import init\n")
    (package / "sdk.py").write_text("def init(): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        for use in ("module.init()", "__import__('recorder.sdk').init()"):
            eager_wandb.load_at_first_use("recorder")
            module = sys.modules["recorder"]
            inspect.getmodule(sys.exit)  # asks every module for its file
            assert importlib.util.find_spec("recorder") is module.__spec__
            assert "recorder.sdk" not in sys.modules
            assert eval(use) == 1 and sys.modules["recorder"] is module
            assert type(module) is types.ModuleType
            del sys.modules["recorder"], sys.modules["recorder.sdk"]
        eager_wandb.load_at_first_use("no_such_recorder")
        assert "no_such_recorder" not in sys.modules
    finally:
        for name in ("recorder", "recorder.sdk"):
            sys.modules.pop(name, None)


def test_adapters_of_mcore_bridge_are_those_of_a_transformer_engine(monkeypatch):
    module = types.ModuleType("mcore_bridge.tuners.lora")
    module.is_torch_npu_available = lambda: True
    monkeypatch.setitem(sys.modules, module.__name__, module)
    journal = Journal()
    bridge_adapters.install(PostImportHooks(), journal)
    assert not module.is_torch_npu_available()
    journal.undo()
    assert module.is_torch_npu_available()


@pytest.mark.slow
def test_megatron_starts_without_weights_and_biases(ranks):
    loaded = ranks(
        1, repair_ranks.loaded_with_megatron, "wandb.sdk", setup="mindspeed.megatron_adaptor"
    )
    assert loaded == [False]


WITHOUT_TRITON = {
    "fusions/fused_pad_routing_map.py": "repairs/layers/cuda_kernels.py",
    "fusions/fused_mla_yarn_rope_apply.py": "repairs/layers/cuda_kernels.py",
    "fusions/fused_indices_converter.py": "refused: --moe-token-dispatcher-type flex",
    "transformer/custom_layers/batch_invariant_kernels.py": "refused: --batch-invariant-mode",
    "inference/contexts/attention_context/triton/tensor_ops.py": "kernels of Mamba's inference",
    "inference/contexts/fused_kv_append_kernel.py": "Megatron's plain way",
    "inference/communication/torch_symm_triton/": "asked for by utils.py where it is there",
    "inference/moe/": "of NVIDIA's inference, says whether Triton is there",
    "inference/quantization/mxfp8_quantize.py": "of NVIDIA's inference, says so too",
    "inference/symmetric_memory.py": "of NVIDIA's inference, says so too",
    "inference/text_generation_controllers/mtp_utils_triton.py": "Megatron's plain way",
    "ssm/ops/": "kernels of Mamba, which refuse to run",
    "transformer/moe/moe_layer.py": "says whether Triton is there",
    "transformer/moe/inference_routing_mask_kernel.py": "inference, on a stub of its own",
    "transformer/moe/paged_stash.py": "kernels of --moe-paged-stash, which refuse to run",
    "transformer/moe/ops/paged_stash.py": "the same since 0.19",
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
    # Of appending to the KV cache: the plain way runs; since 0.17 one that refuses the CPU.
    assert kernel is None or at_least("0.17")


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
    if has_defect(layer_comm_types):
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


@brought_by("0.16")
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


def test_an_offloaded_optimizer_uses_the_gradients_of_its_step(ranks):
    (found,) = ranks(1, repair_ranks.offloaded_steps, True, setup=ADAPTOR)
    assert found == [[[1.0, 1.0], [2.0, 1.0], [3.0, 2.0]]] * 3
    (found,) = ranks(1, repair_ranks.offloaded_steps, False, setup=ADAPTOR)
    stale, never = [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]], [[0.0, 0.0]] * 3
    assert found == [stale, stale, never]


def test_mtp_loss_is_averaged_over_the_whole_sequence(ranks):
    count = repair_ranks.counted_tokens
    # Rank 0 of the zigzag holds the two ends of the sequence.
    assert ranks(2, count, False, setup=ADAPTOR, timeout=120) == [[3.0, 2.0], [4.0, 4.0]]
    assert ranks(2, count, True, setup=ADAPTOR, timeout=120) == [[3.5, 3.0]] * 2


def test_the_only_target_of_a_sequence_has_the_whole_mtp_loss(ranks):
    """Data parallelism averages over the two ranks."""
    weights = ranks(2, repair_ranks.weights_of_one_target, setup=ADAPTOR, timeout=120)
    assert sorted(weights) == [0.0, 2.0]


@pytest.mark.parametrize(
    ("interval", "started", "printed"),
    [
        (1, 0, {1: 10, 2: 20, 3: 30, 4: 40, 5: 50, 6: 60}),
        (3, 0, {1: 10, 3: 20, 6: 50}),  # the first report lies within an interval
        (3, 2, {3: 30, 6: 50}),
    ],
)
def test_every_report_has_the_iterations_of_its_interval(interval, started, printed, monkeypatch):
    global_vars = types.ModuleType("megatron.training.global_vars")
    global_vars.get_args = lambda: types.SimpleNamespace(log_interval=interval)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", global_vars)

    def run(training_log):
        sums = {"loss": 0, "advanced iterations": 0}
        values = (
            training_log(
                {"loss": 10 * number}, sums, number, is_first_iteration=number == started + 1
            )
            for number in range(started + 1, 7)
        )
        return {number: mean for number, mean in values if mean is not None}

    def training_log(loss_dict, total_loss_dict, iteration, is_first_iteration=False):
        """Sums and resets as Megatron-LM's does; returns what it prints."""
        total_loss_dict["advanced iterations"] += 1
        total_loss_dict["loss"] += loss_dict["loss"]
        if iteration % interval and not is_first_iteration:
            return iteration, None
        mean = total_loss_dict["loss"] / total_loss_dict["advanced iterations"]
        if not is_first_iteration:
            total_loss_dict.update({"loss": 0, "advanced iterations": 0})
        return iteration, mean

    assert run(log_line.reset_at_the_end_of_an_interval(training_log)) == printed
    unrepaired = run(training_log)
    assert (unrepaired == printed) == (interval == 3 and started == 0)


@pytest.mark.parametrize("reset", [True, False])
def test_losses_of_zero_and_below_are_printed(reset, monkeypatch):
    training = types.ModuleType("megatron.training.training")
    package = types.ModuleType("megatron.training")
    package.training, lines = training, []
    training.print_rank_last = lines.append
    monkeypatch.setitem(sys.modules, "megatron.training", package)

    def training_log(loss_dict, total_loss_dict, learning_rate):
        """Sums, prints and resets as Megatron-LM's does."""
        total_loss_dict["advanced iterations"] = total_loss_dict.get("advanced iterations", 0) + 1
        total_loss_dict["nan iterations"] = 0
        for key, value in loss_dict.items():
            total_loss_dict[key] = total_loss_dict.get(key, torch.zeros(1)) + value
        line = " iteration 2 |"
        for key in loss_dict:
            mean = total_loss_dict[key].item() / total_loss_dict["advanced iterations"]
            if mean > 0.0:
                line += f" {key}: {mean:.6E} |"
            if reset:
                total_loss_dict[key] = torch.zeros(1)
        if reset:
            total_loss_dict["advanced iterations"] = 0
        training.print_rank_last(line + " loss scale: 1.0 |")

    losses = {"lm loss": 3.0, "load_balancing_loss": 0.0, "reward": -2.0}
    sums = {"advanced iterations": 1, "lm loss": torch.ones(1), "reward": -torch.ones(1)}
    log_line.print_every_loss(training_log)(losses, sums, 1e-3)
    assert lines == [
        " iteration 2 | lm loss: 2.000000E+00 | reward: -1.500000E+00 |"
        " load_balancing_loss: 0.000000E+00 | loss scale: 1.0 |"
    ]
    assert sums["reward"].item() == (0 if reset else -3)
    assert training.print_rank_last == lines.append


def test_a_checkpointed_function_may_return_a_parameter(ranks):
    x, linear = repair_ranks.layer_with_bias()
    ((x @ linear.weight).tanh() + linear.bias).square().sum().backward()
    ((leaf, gradients),) = ranks(1, repair_ranks.checkpointed_bias, True, setup=ADAPTOR)
    assert leaf
    for found, parameter in zip(gradients, (x, linear.weight, linear.bias), strict=True):
        torch.testing.assert_close(found, parameter.grad)
    ((leaf, _),) = ranks(1, repair_ranks.checkpointed_bias, False, setup=ADAPTOR)
    assert not leaf  # its history leads back into the checkpoint


def test_vocabulary_parallel_losses_are_those_of_the_whole_vocabulary(ranks):
    for found in ranks(2, repair_ranks.vocabulary_losses, setup=ADAPTOR, timeout=120):
        for name, (value, right) in found.items():
            torch.testing.assert_close(value, right, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.slow
def test_the_fused_loss_does_not_round_gradients_of_fp32_logits(ranks):
    for found, right in ranks(2, repair_ranks.fused_loss, setup=ADAPTOR, timeout=120):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


def test_strided_tensors_are_reduced(ranks):
    for found in ranks(2, repair_ranks.strided_sums, setup=ADAPTOR, timeout=120):
        assert all(bool((value == 3).all()) for value in found)


def test_what_one_rank_reduces_can_be_changed_in_place(ranks):
    (found,) = ranks(1, repair_ranks.changed_in_place, setup=ADAPTOR, timeout=120)
    assert [bool((gradient == 12).all()) for gradient in found] == [True, True]  # 2 * 2 * (2 + 1)


@pytest.mark.parametrize("counts", [(), (torch.tensor(5),)], ids=["mean", "sum"])
def test_a_report_is_not_divided_with_its_loss(counts):
    def divide_in_place(model, output, loss_func, config):
        loss, *_, report = loss_func(output)
        loss /= 4
        return loss, report

    calculate = with_repair("losses", divide_in_place, "forward_step_calc_loss")
    config = types.SimpleNamespace(calculate_per_token_loss=False)
    reports = []

    def loss_func(output):
        loss = output.sum()
        reports.append(loss.detach())
        return (loss, *counts, reports[0])

    loss, _ = calculate(None, torch.full((4,), 3.0, requires_grad=True), loss_func, config)
    assert (loss.item(), reports[0].item()) == (3, 12)


def test_context_parallel_losses_are_means_over_all_tokens(ranks):
    counts = [(1, 3), (3, 3), (0, 4), (1, 0), (0, 0), (5, 5)]
    found = ranks(2, repair_ranks.context_parallel_losses, counts, setup=ADAPTOR, timeout=120)
    for of_ranks, *results in zip(counts, *found, strict=True):
        total = max(sum(of_ranks), 1)
        for rank, (loss, weight) in enumerate(results):
            number = of_ranks[rank]
            sum_of_losses = sum(i + 1 + rank for i in range(number))
            # Data parallelism averages over the two ranks.
            assert loss / 2 == pytest.approx(sum_of_losses / total)
            assert weight / 2 == pytest.approx(bool(number) / total)
            if of_ranks[0] == of_ranks[1] and number:
                assert torch.tensor(loss) == torch.tensor(float(sum_of_losses)) / number


def test_a_loss_of_two_values_is_refused_where_losses_are_per_token(ranks):
    assert ranks(1, repair_ranks.two_values, False, setup=ADAPTOR, timeout=120) == [1.0]
    with pytest.raises(RankError, match="calculate-per-token-loss needs a loss function that"):
        ranks(1, repair_ranks.two_values, True, setup=ADAPTOR, timeout=120)


@brought_by("0.16")
def test_multi_token_prediction_stays_within_padded_documents(ranks):
    for context_parallel in (False, True):
        for found, right in ranks(
            2, repair_ranks.rolled_documents, context_parallel, setup=ADAPTOR
        ):
            assert found == right


@brought_by("0.16")
def test_gradients_of_a_norm_of_one_ranks_heads_are_summed(ranks):
    assert ranks(2, repair_ranks.norm_of_heads, setup=ADAPTOR, timeout=240) == [3.0, 3.0]


def test_router_losses_are_logged_by_stages_without_experts(ranks):
    """Without the repair tensors of 3 and of 2 values are summed, which does not end."""
    assert ranks(2, repair_ranks.logged_router_losses, setup=ADAPTOR, timeout=120) == [2.0, 2.0]


LAYOUTS = {
    # Sizes of tensor, expert, expert-tensor and context parallelism -> files, of four ranks.
    (4, 2, 1, 1): 4,
    (2, 1, 1, 1): 2,
    (2, 1, 1, 2): 2,
    (1, 2, 1, 1): 2,
    (2, 2, 2, 1): 4,
}


def test_legacy_checkpoints_have_every_shard_once(ranks):
    """Also where context-parallel ranks would write the same file."""
    written = ranks(4, repair_ranks.writers_of_shards, list(LAYOUTS), setup=MEGATRON, timeout=120)
    for layout, number in LAYOUTS.items():
        names = [of_rank[layout][1] for of_rank in written]
        writers = [of_rank[layout][1] for of_rank in written if of_rank[layout][0]]
        assert sorted(writers) == sorted(set(names)) and len(writers) == number, layout


def test_a_job_continues_after_a_transient_fault(ranks):
    function = repair_ranks.steps_after_a_transient_fault
    with pytest.raises(RankError, match="TypeError"):
        ranks(1, function, False, False, setup=MEGATRON, timeout=120)
    for repaired in ((True, False), (False, True)):
        (found,) = ranks(1, function, *repaired, setup=MEGATRON, timeout=120)
        assert found == (not at_least("0.18"), 1)  # which does not save it


def test_a_checkpoint_of_a_step_to_run_again_is_complete(ranks, tmp_path):
    function = repair_ranks.rerun_state_of_a_constant_structure
    for name in ("as-is", "repaired"):
        (tmp_path / name).mkdir()
    with pytest.raises(RankError, match="rerun_state_machine_state"):
        ranks(1, function, str(tmp_path / "as-is"), False, setup=MEGATRON, timeout=120)
    found = ranks(1, function, str(tmp_path / "repaired"), True, setup=MEGATRON, timeout=120)
    assert found == ["state"]


def test_printed_objects_tell_the_truth(ranks):
    (texts,) = ranks(1, repair_ranks.printed_objects, setup=ADAPTOR, timeout=120)
    if at_least("0.16"):
        assert texts.pop("groups") == "ProcessGroupCollection(tp(1), hcp([1, 1]))"
    for name, text in texts.items():
        assert f"bias={name.split()[1]}," in text


def test_energy_is_read_of_a_device_only(ranks):
    assert ranks(1, repair_ranks.energy_without_a_device, setup=ADAPTOR) == [["device"]]


def test_the_worker_of_checkpoints_ends_without_process_groups(ranks):
    """Megatron asks for the rank first, which raises."""
    ended = ranks(1, repair_ranks.ended_workers, setup=MEGATRON, backend=None)
    assert ended == [[["queue.put", "queue.join", "process.join"], ["process.kill"]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_params_without_more_digits_are_reported(dtype, monkeypatch, caplog):
    fp8_utils = types.ModuleType("megatron.core.fp8_utils")
    fp8_utils.is_float8tensor = lambda tensor: False
    monkeypatch.setitem(sys.modules, fp8_utils.__name__, fp8_utils)
    model = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    optimizer = types.SimpleNamespace(model_chunks=[model])
    state = {name: value.to(dtype) for name, value in model.state_dict().items()}
    function = "_build_model_param_to_state_dict_param_map"
    find = with_repair("main-params", None, function, load_main_params_from_ckpt=True)
    found = find(optimizer, {"model": state})
    assert found == {model.weight: state["weight"], model.bias: state["bias"]}
    assert ("--load-main-params-from-ckpt has no effect" in caplog.text) is (dtype != torch.float32)


def test_the_warm_up_of_fused_functions_leaves_the_generator_of_the_host():
    """Routers draw their initial weights from it."""
    before = torch.get_rng_state()
    with_repair("jit-warmup", lambda: torch.rand(8), "_warmup_jit_function")()
    assert torch.equal(torch.get_rng_state(), before)
