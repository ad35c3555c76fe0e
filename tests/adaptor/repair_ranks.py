"""Jobs for the ranks of test_repairs.py."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.adaptor.repairs.data import packed_conversations
from mindspeed.adaptor.repairs.parallel import process_groups
from mindspeed.adaptor.versions import at_least
from mindspeed.journal import Journal
from tests.support.enumerations import Attribute
from tests.support.installed_repair import configured, with_repair
from tests.support.release import stand_in_for_triton


def loaded_with_megatron(name: str) -> bool:
    """Whether Megatron's models bring the module."""
    import megatron.core.models.gpt  # noqa: F401

    return name in sys.modules


def groups_left_after_destroy(repaired: bool) -> tuple[int, int]:
    """Process groups that exist with parallel state, and after it is destroyed."""
    from megatron.core import parallel_state

    from mindspeed import device

    device.install(Journal())
    destroy = parallel_state.destroy_model_parallel
    if repaired:
        destroy = process_groups.destroy_groups(destroy)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    with_state = len(dist.distributed_c10d._world.pg_map)
    destroy()
    return with_state, len(dist.distributed_c10d._world.pg_map)


def broadcast_of_packed_documents() -> dict[str, torch.Tensor]:
    """TP rank 0 reads a packed sample, all ranks get it."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    training = types.ModuleType("megatron.training")
    training.get_args = lambda: types.SimpleNamespace(sft=True, hybrid_context_parallel=False)
    sys.modules["megatron.training"] = training

    def get_batch_on_this_tp_rank(data_iterator, mtp_on_this_rank=False):
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        if dist.get_rank() == 0:
            data = next(data_iterator)
            assert ("cu_seqlens" in data) is at_least("0.17")  # which broadcasts them
            tokens = data["tokens"]
        dist.broadcast(tokens, 0)
        return {"tokens": tokens, "cu_seqlens": None, "max_seqlen": None}

    sample = {
        "tokens": torch.arange(8)[None],
        "cu_seqlens": torch.tensor([[0, 3, 8]], dtype=torch.int32),
        "max_seqlen": torch.tensor([5], dtype=torch.int32),
    }
    get_batch = packed_conversations.broadcast_packing(get_batch_on_this_tp_rank)
    return get_batch(iter([sample]) if dist.get_rank() == 0 else None)


def megatron_broadcast_of_packed_documents(
    repaired: bool, checkout: str
) -> dict[str, torch.Tensor]:
    """The same through Megatron-LM's own function."""
    sys.path.insert(0, checkout)
    from megatron.core import parallel_state
    from megatron.training import global_vars, utils

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    global_vars._GLOBAL_ARGS = types.SimpleNamespace(
        sft=True,
        hybrid_context_parallel=False,
        pipeline_model_parallel_size=1,
        micro_batch_size=1,
        seq_length=8,
        create_attention_mask_in_dataloader=False,
    )
    configured(packed_conversations, {"sft": True}, repaired)
    sample = {
        "tokens": torch.arange(8)[None],
        "labels": torch.arange(8)[None] + 1,
        "loss_mask": torch.ones(1, 8),
        "position_ids": torch.arange(8)[None],
        "cu_seqlens": torch.tensor([[0, 3, 8]], dtype=torch.int32),
        "max_seqlen": torch.tensor([5], dtype=torch.int32),
    }
    data = iter([sample]) if dist.get_rank() == 0 else None
    batch = utils.get_batch_on_this_tp_rank(data)
    return {name: value for name, value in batch.items() if value is not None}


def yarn_frequencies() -> tuple[str, list[float]]:
    """Megatron's error, and frequencies, of a YaRN embedding on the CPU."""
    from mindspeed import device, te

    device.install(Journal())
    te.install(Journal())
    stand_in_for_triton()
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding

    from mindspeed.adaptor.repairs.attention import yarn

    embedding = yarn_rotary_pos_embedding.YarnRotaryEmbedding
    error = ""
    try:
        embedding(16, rotary_base=10000, scaling_factor=4.0)
    except Exception as raised:
        error = str(raised)
    embedding.__init__ = yarn.rotate_a_part(embedding.__init__)
    return error, embedding(16, rotary_base=10000, scaling_factor=4.0).inv_freq_extra.tolist()


def partial_yarn(repaired: bool) -> torch.Tensor:
    """Frequencies of YaRN, factor 4 of 64 positions, for half of the 64 channels of a head."""
    from mindspeed import session
    from mindspeed.adaptor.repairs.attention import yarn

    session.current().configure({"position_embedding_type": "yarn"})
    if not repaired:
        session.current().engine.remove(yarn.PATCHES[0].owner)
    from megatron.core.models.common.embeddings import YarnRotaryEmbedding

    embedding = YarnRotaryEmbedding(
        64,
        rotary_percent=0.5,
        scaling_factor=4.0,
        original_max_position_embeddings=64,
        use_cpu_initialization=True,
    )
    embed = embedding.get_emb if at_least("0.16") else embedding.forward
    frequencies: torch.Tensor = embed(2)[0][1, 0, 0]
    return frequencies


def latent_attention(impl: str, sequence_parallel: bool, repaired: bool) -> dict[str, torch.Tensor]:
    """Gradients of one latent attention layer, assembled over the tensor ranks, in float64."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import MLATransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    from mindspeed import session
    from mindspeed.adaptor.repairs.attention import latent_key_gradient

    if not repaired:
        session.current().engine.remove(latent_key_gradient.PATCHES[0].owner)
    ranks = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(ranks)
    model_parallel_cuda_manual_seed(1)
    spec = {
        "te": gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec,
        "local": gpt_layer_specs.get_gpt_layer_local_spec,
    }[impl](multi_latent_attention=True)
    config = MLATransformerConfig(
        num_layers=1, hidden_size=12, num_attention_heads=2, q_lora_rank=8, kv_lora_rank=6,
        qk_head_dim=4, qk_pos_emb_head_dim=2, v_head_dim=4, rope_type="yarn",
        apply_rope_fusion=True, hidden_dropout=0.0,
        attention_dropout=0.0, add_bias_linear=False, params_dtype=torch.float64,
        tensor_model_parallel_size=ranks, sequence_parallel=sequence_parallel,
    )  # fmt: skip
    attention = build_module(spec.submodules.self_attention, config=config, layer_number=1).double()
    rank, generator = torch.distributed.get_rank(), torch.Generator().manual_seed(5)
    cuts = {}
    for name, parameter in sorted(attention.named_parameters()):
        dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else -1
        cuts[name] = dim
        shape = [n * ranks if i == dim else n for i, n in enumerate(parameter.shape)]
        whole = torch.randn(shape, dtype=torch.float64, generator=generator)
        part = whole if dim < 0 else whole.chunk(ranks, dim)[rank]
        parameter.data.copy_(part)
    x = torch.randn(8, 1, 12, dtype=torch.float64, generator=generator)
    weight = torch.randn(8, 1, 12, dtype=torch.float64, generator=generator)
    if sequence_parallel:
        x, weight = x.chunk(ranks)[rank], weight.chunk(ranks)[rank]
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
    out, _ = attention(x.clone(), mask)
    (out * weight).sum().backward()
    gradients = {}
    for name, parameter in attention.named_parameters():
        grad = parameter.grad
        if cuts[name] >= 0:
            parts = [torch.empty_like(grad) for _ in range(ranks)]
            torch.distributed.all_gather(parts, grad.contiguous())
            grad = torch.cat(parts, cuts[name])
        elif sequence_parallel:
            torch.distributed.all_reduce(grad)
        gradients[name] = grad
    return gradients


def comm_types_of_layers(repaired: bool) -> list[list[str]]:
    """``--cp-comm-type p2p all_gather a2a``: what the layers of both specs are told."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from mindspeed import session
    from mindspeed.adaptor.repairs.attention import layer_comm_types
    from tests.support import gpt_ranks

    types = ["p2p", "all_gather", "a2a"]
    session.current().configure({"context_parallel_size": 2, "cp_comm_type": types})
    if not repaired:
        session.current().engine.remove(layer_comm_types.PATCHES[0].owner)
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    config = gpt_ranks.config(
        "rmsnorm-swiglu-gqa", num_layers=3, context_parallel_size=2, cp_comm_type=types
    )
    models = [gpt_ranks.build(config, spec) for spec in ("te", "local")]
    assert config.cp_comm_type == types
    return [
        [layer.self_attention.core_attention.cp_comm_type for layer in model.decoder.layers]
        for model in models
    ]


def positions_of_a_context_parallel_rank(on_this_device: bool) -> list[float]:
    """Rank 1 of 2: which positions of 8 its rotary embedding has."""
    from mindspeed import session

    if not on_this_device:
        session.undo()
    from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank

    group = types.SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    return get_pos_emb_on_this_cp_rank(torch.arange(8.0), 0, group).tolist()


def batches_with_groups_of_their_own() -> dict[str, list[float]]:
    """Dynamic context parallelism: differences of batches on one rank, on two and on four.

    Megatron's ``--hybrid-context-parallel`` tells with each batch which ranks share it.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(context_parallel_size=4)
    model_parallel_cuda_manual_seed(1)
    pair, _ = dist.new_subgroups(2)
    return {spec: _shared_by_one_two_four(spec, pair) for spec in ("te", "local")}


def _shared_by_one_two_four(spec: str, pair: dist.ProcessGroup) -> list[float]:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    from mindspeed.attention import zigzag
    from tests.support import gpt_ranks

    config = gpt_ranks.config("rmsnorm-swiglu-gqa", context_parallel_size=4)
    attention = gpt_ranks.build(config, spec).decoder.layers[0].self_attention.core_attention
    generator = torch.Generator().manual_seed(2)
    qkv = [torch.randn(16, 1, heads, 8, generator=generator) for heads in (4, 2, 2)]

    def run(size: int, group: dist.ProcessGroup | None, rows: torch.Tensor) -> torch.Tensor:
        params = PackedSeqParams("sbhd", local_cp_size=size, cp_group=group)
        tensors = [x[rows] for x in qkv]
        causal = AttnMaskType.causal
        return attention(*tensors, None, attn_mask_type=causal, packed_seq_params=params)

    alone = run(1, None, torch.arange(16))
    differences = []
    for size, group in ((2, pair), (4, dist.group.WORLD)):
        rows = zigzag(16, size).positions(dist.get_rank(group))
        differences.append(float((run(size, group, rows) - alone[rows]).abs().max()))
    return differences


def enumeration_of_an_early_python_311() -> str:
    """The name of a member that ``torch.load`` reads as Megatron does."""
    import io

    from megatron.core.transformer.enums import AttnBackend

    file = io.BytesIO()
    torch.save(Attribute(AttnBackend, "flash"), file)
    file.seek(0)
    return torch.load(file, weights_only=True).name


def offloaded_optimizers(repaired: bool, resume: bool) -> dict[float, list[torch.Tensor]]:
    """By the fraction of Adam on the host: the weights after six steps."""
    from mindspeed.adaptor.repairs.optimizer import optimizer_offload

    names = ("bf16", "optimizer_cpu_offload", "use_precision_aware_optimizer")
    configured(optimizer_offload, dict.fromkeys(names, True), repaired)
    return {fraction: _offloaded_optimizer(fraction, resume) for fraction in (1.0, 0.4, 0.0)}


def _offloaded_optimizer(fraction: float, resume: bool) -> list[torch.Tensor]:
    """With ``resume`` the state goes through a file after three steps, read without code."""
    import io

    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    from transformer_engine.pytorch.optimizers import FusedAdam

    options = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}

    def build(weights: list[torch.nn.Parameter]) -> HybridDeviceOptimizer:
        return HybridDeviceOptimizer(
            [{"params": weights[:2]}, {"params": weights[2:]}],
            offload_fraction=fraction,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=FusedAdam,
            param_update_in_fp32=True,
            overlap_cpu_optimizer_d2h_h2d=True,
            fused=True,
            **options,
        )

    weights, gradients = adam_problem()
    optimizer = build(weights)
    for number, step in enumerate(gradients):
        if resume and number == len(gradients) // 2:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            optimizer = build(weights)
            optimizer.load_state_dict(torch.load(file, weights_only=True))
        for weight, gradient in zip(weights, step, strict=True):
            weight.decoupled_grad = gradient
        optimizer.step()
    return [weight.detach().float() for weight in weights]


def offloaded_steps(repaired: bool) -> list[list[list[float]]]:
    """By the kind of optimizer: two weights after each step of a rate of one.

    The second weight gets a gradient in the first and the last of three steps. Kinds: on the host,
    with fp32 copies on the device, and fp32 on the device without copies.
    """
    from mindspeed import session

    names = ("bf16", "optimizer_cpu_offload", "use_precision_aware_optimizer")
    session.current().configure(dict.fromkeys(names, True))
    if not repaired:
        from mindspeed.adaptor.repairs.optimizer import optimizer_offload

        engine = session.current().engine
        engine.remove(optimizer_offload.PATCHES[0].owner)
        for patch in optimizer_offload.PATCHES:
            if patch.make is not optimizer_offload.pass_gradients_on:
                engine.add(patch)
    kinds = ((1.0, torch.bfloat16), (0.0, torch.bfloat16), (0.0, torch.float32))
    return [_offloaded_steps(*kind) for kind in kinds]


def _offloaded_steps(fraction: float, dtype: torch.dtype) -> list[list[float]]:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    weights = [torch.nn.Parameter(torch.zeros(1, dtype=dtype)) for _ in range(2)]
    optimizer = HybridDeviceOptimizer(
        [{"params": weights}],
        offload_fraction=fraction,
        cpu_optimizer_cls=torch.optim.SGD,
        gpu_optimizer_cls=torch.optim.SGD,
        param_update_in_fp32=True,
        lr=1.0,
    )
    steps = []
    for second in (1.0, None, 1.0):
        for weight, gradient in zip(weights, (1.0, second), strict=True):
            weight.decoupled_grad = None if gradient is None else torch.full((1,), -gradient)
        optimizer.step()
        steps.append([weight.item() for weight in weights])
    return steps


def adam_problem() -> tuple[list[torch.nn.Parameter], list[list[torch.Tensor]]]:
    """bf16 weights and their gradients of six steps."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(4, 3), (5,), (2, 6), (7,)]

    def draw() -> list[torch.Tensor]:
        return [torch.randn(shape, generator=generator) for shape in shapes]

    weights = [torch.nn.Parameter(value.bfloat16()) for value in draw()]
    return weights, [draw() for _ in range(6)]


def counted_tokens(repaired: bool) -> list[float]:
    """A sequence of 8 on two ranks: the tokens that count once and twice rolled, on this rank."""
    from megatron.core import parallel_state

    from mindspeed.adaptor.repairs.layers import mtp

    configured(mtp, {"context_parallel_size": 2, "mtp_num_layers": 2}, repaired)
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    parallel_state.initialize_model_parallel(context_parallel_size=2)
    group, mask, counts = parallel_state.get_context_parallel_group(), torch.ones(1, 4), []
    for _ in range(2):
        mask, count = roll_tensor(mask, shifts=-1, dims=-1, cp_group=group)
        counts.append(float(count))
    return counts


def weights_of_one_target() -> float:
    """The same sequence with one token that counts: the weight of the losses on this rank."""
    from megatron.core import parallel_state

    from mindspeed import session

    session.current().configure({"context_parallel_size": 2, "mtp_num_layers": 1})
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    parallel_state.initialize_model_parallel(context_parallel_size=2)
    mask = torch.zeros(1, 4)
    mask[0, 1] = float(dist.get_rank() == 1)
    group = parallel_state.get_context_parallel_group()
    rolled, count = roll_tensor(mask, shifts=-1, dims=-1, cp_group=group)
    return float((rolled / count.clamp(min=1)).sum())  # as Megatron divides


def checkpointed_bias(repaired: bool) -> tuple[bool, list[torch.Tensor]]:
    """A checkpointed layer that returns its bias: whether that is a leaf; gradients in float64.

    Without the repair backward would not end, so it is left out.
    """
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from mindspeed import session
    from mindspeed.adaptor.repairs.layers import recompute

    if not repaired:
        session.current().engine.remove(recompute.PATCHES[0].owner)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    x, linear = layer_with_bias()
    out, bias = tensor_parallel.checkpoint(lambda y: (y @ linear.weight, linear.bias), False, x)
    if repaired:
        (out.tanh() + bias).square().sum().backward()
    return linear.bias.is_leaf, [leaf.grad for leaf in (x, linear.weight, linear.bias)]


def layer_with_bias() -> tuple[torch.Tensor, torch.nn.Linear]:
    """An input and a layer, equal in every process."""
    torch.manual_seed(3)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    return x, torch.nn.Linear(4, 4, dtype=torch.float64)


def vocabulary_losses() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Losses and gradients of smoothed labels, and losses of gathered logits: found and right."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.common.language_module.language_module import LanguageModule

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(3, 2, 8, generator=generator).requires_grad_()
    target = torch.randint(0, 8, (3, 2), generator=generator)
    part = whole.detach().chunk(2, -1)[dist.get_rank()].clone().requires_grad_()
    smoothed = tensor_parallel.vocab_parallel_cross_entropy(part.clone(), target, 0.1)
    smoothed.square().sum().backward()
    # Megatron's share is that of the labels that are not the target.
    rows = torch.nn.functional.one_hot(target, 8) * (0.9 - 0.1 / 7) + 0.1 / 7
    right = -(rows * whole.log_softmax(-1)).sum(-1)
    right.square().sum().backward()

    model = types.SimpleNamespace(
        config=types.SimpleNamespace(tensor_model_parallel_size=2, cross_entropy_loss_fusion=False),
        vocab_size=8,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )
    loss = LanguageModule.compute_language_model_loss
    gathered = tensor_parallel.gather_from_tensor_model_parallel_region(part.detach().clone())
    plain = torch.nn.functional.cross_entropy(whole.detach().flatten(0, 1), target.flatten())
    return {
        "smoothed": (smoothed.detach(), right.detach()),
        "gradient": (part.grad, whole.grad.chunk(2, -1)[dist.get_rank()]),
        "gathered": (loss(model, target.t(), gathered).mean(), plain),
    }


def fused_loss() -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the gradient of the fused loss in fp32: found and right."""
    from megatron.core import parallel_state
    from megatron.core.fusions import fused_cross_entropy
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    # As Megatron's on this device: a compiler would be called for it alone.
    assert not hasattr(fused_cross_entropy.calculate_gradients, "_torchdynamo_orig_callable")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    group = parallel_state.get_tensor_model_parallel_group()
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(3, 2, 8, generator=generator).requires_grad_()
    target = torch.randint(0, 8, (3, 2), generator=generator)
    part = whole.detach().chunk(2, -1)[group.rank()].clone().requires_grad_()
    loss = fused_vocab_parallel_cross_entropy(part.clone(), target, group)
    loss.square().sum().backward()
    each = torch.nn.functional.cross_entropy(
        whole.flatten(0, 1), target.flatten(), reduction="none"
    )
    each.square().sum().backward()
    return part.grad, whole.grad.chunk(2, -1)[group.rank()]


def strided_sums() -> list[torch.Tensor]:
    """The sum of a transposed tensor, and of the gradient of a slice, over two ranks."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    mine = torch.full((3, 2), dist.get_rank() + 1.0)
    copied = mine.clone().requires_grad_()
    whole = tensor_parallel.copy_to_tensor_model_parallel_region(copied)
    whole.backward(torch.full((2, 3), dist.get_rank() + 1.0).t())
    return [tensor_parallel.reduce_from_tensor_model_parallel_region(mine.t()), copied.grad]


def changed_in_place() -> list[torch.Tensor]:
    """Gradients of what one rank has reduced, to which something was added in place."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel()
    found = []
    for reduce in (
        tensor_parallel.reduce_from_tensor_model_parallel_region,
        tensor_parallel.reduce_scatter_to_sequence_parallel_region,
    ):
        x = torch.ones(2, 3, requires_grad=True)
        reduced = reduce(x * 2)
        reduced += 1.0
        reduced.square().sum().backward()
        found.append(x.grad)
    return found


def context_parallel_losses(counts: list[tuple[int, int]]) -> list[list[float]]:
    """Loss and weight of a token on this rank for the tokens that count on each of two ranks."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    parallel_state.initialize_model_parallel(context_parallel_size=2)
    found = []
    for of_ranks in counts:
        losses = (torch.arange(8.0) + 1 + dist.get_rank()).requires_grad_()
        mask = (torch.arange(8) < of_ranks[dist.get_rank()]).float()

        def loss_of(output: torch.Tensor, mask: torch.Tensor = mask) -> tuple[Any, ...]:
            return (output * mask).sum(), mask.sum().int(), {}

        loss, number = _calculated(schedules, losses, loss_of, per_token=False)
        loss.backward()
        assert number == of_ranks[dist.get_rank()] and not number.is_floating_point()
        found.append([loss.item(), losses.grad[0].item()])
    return found


def two_values(per_token: bool) -> float:
    """The loss of a loss function of two values."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    parallel_state.initialize_model_parallel()
    loss_of = lambda output: (output.mean(), {})  # noqa: E731
    leaf = torch.ones(4, requires_grad=True)
    return _calculated(schedules, leaf, loss_of, per_token=per_token)[0].item()


def _calculated(schedules: Any, losses: torch.Tensor, loss_of: Any, *, per_token: bool) -> Any:
    config = types.SimpleNamespace(calculate_per_token_loss=per_token, timers=None)
    size = dist.get_world_size()
    return schedules.forward_step_calc_loss(
        None, losses * 1, loss_of, config, None, False, 1, [], size, True
    )


def padded_routing_map() -> tuple[torch.Tensor, torch.Tensor, object]:
    """A routing map padded to multiples of 16, the map, and the kernel of the KV cache."""
    from megatron.core.inference.contexts import dynamic_context
    from megatron.core.transformer.moe import token_dispatcher

    torch.manual_seed(0)
    routing_map = torch.rand(40, 4) < 0.3
    padded = token_dispatcher.fused_pad_routing_map(routing_map, 16)
    return padded, routing_map, dynamic_context.triton_append_key_value_cache


def rolled_documents(context_parallel: bool) -> tuple[list[int], list[int]]:
    """What multi-token prediction makes of two padded documents on this rank, and what is right."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    size = dist.get_world_size() if context_parallel else 1
    parallel_state.initialize_model_parallel(context_parallel_size=size)
    group = parallel_state.get_context_parallel_group()
    tokens = torch.tensor([1, 2, 3, 0, 11, 12, 13, 14, 15, 0, 0, 0])
    right = torch.tensor([2, 3, 0, 0, 12, 13, 14, 15, 0, 0, 0, 0])
    real, padded = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 8], [0, 4, 12]))
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=real, cu_seqlens_kv=real, cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded, max_seqlen_q=5, max_seqlen_kv=5,
    )  # fmt: skip

    def mine(whole: torch.Tensor) -> torch.Tensor:
        """Of each document this rank has one chunk from its front and the mirrored one."""
        if size == 1:
            return whole
        chunks = [document.chunk(2 * size) for document in (whole[:4], whole[4:])]
        here = group.rank()
        return torch.cat([part for own in chunks for part in (own[here], own[-1 - here])])

    rolled, _ = roll_tensor(mine(tokens)[None], -1, -1, group, params)
    return rolled[0].tolist(), mine(right).tolist()


def norm_of_heads() -> float:
    """The gradient of a gated delta net's output norm, partial 1 and 2, without SP."""
    from megatron.core import parallel_state
    from megatron.core.extensions import transformer_engine as te
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm import gated_delta_net
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    # The package of its kernels is not needed to build the layer.
    for name, module in list(sys.modules.items()):  # since 0.19 there are three
        if name.startswith(gated_delta_net.__name__):
            module.HAVE_FLA = True
            module.chunk_gated_delta_rule = module.l2norm = max
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, tensor_model_parallel_size=2,
        normalization="RMSNorm", add_bias_linear=False, activation_func=torch.nn.functional.silu,
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, linear_conv_kernel_dim=4, linear_attention_freq=1,
        experimental_attention_variant="gated_delta_net",
    )  # fmt: skip
    parts = gated_delta_net.GatedDeltaNetSubmodules(
        in_proj=te.TELayerNormColumnParallelLinear,
        out_norm=te.TENorm,
        out_proj=te.TERowParallelLinear,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = gated_delta_net.GatedDeltaNet(config, parts, layer_number=1, pg_collection=groups)
    weight = model.out_norm.weight
    weight.main_grad = torch.full_like(weight, dist.get_rank() + 1.0)
    model.ddp_config = types.SimpleNamespace(use_megatron_fsdp=False)
    finalize = sys.modules["megatron.core.distributed.finalize_model_grads"]
    finalize._allreduce_non_tensor_model_parallel_grads([model], config, groups.tp)
    return weight.main_grad[0].item()


def logged_router_losses() -> float:
    """The loss that two stages log, of which the first one has all routers."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    from mindspeed import session

    session.current().configure({"mtp_num_layers": 1, "num_experts": 2})
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    if dist.get_rank() == 0:
        for layer in (1, 2, 3):  # two of the transformer, one of multi-token prediction
            moe_utils.save_to_aux_losses_tracker("z_loss", torch.tensor(float(layer)), layer, 3)
    found: dict[str, Any] = {}
    moe_utils.track_moe_metrics(
        loss_scale=1.0,
        iteration=1,
        writer=None,
        total_loss_dict=found,
        force_initialize=True,
        track_names=["z_loss"],
        num_layers=2,
        mtp_num_layers=1,
    )
    return float(found["z_loss"])


def writers_of_shards(
    layouts: list[tuple[int, int, int, int]],
) -> dict[tuple[int, int, int, int], tuple[bool, tuple[int, int, int]]]:
    """Whether this rank writes a file, and the ranks in its name, in each layout."""
    from megatron.core import parallel_state

    checkpointing = types.ModuleType("megatron.training.checkpointing")
    checkpointing.mpu = parallel_state
    training = types.ModuleType("megatron.training")
    training.checkpointing = checkpointing
    sys.modules["megatron.training"] = training

    def save_grads(save_dir):
        return checkpointing.mpu.get_expert_data_parallel_rank() == 0, (
            checkpointing.mpu.get_tensor_model_parallel_rank(),
            checkpointing.mpu.get_pipeline_model_parallel_rank(),
            checkpointing.mpu.get_expert_model_parallel_rank(),
        )

    save = with_repair("expert-shards", save_grads, "save_grads", num_experts=2)
    found = {}
    for tensor, expert, expert_tensor, context in layouts:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            context_parallel_size=context,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=expert_tensor,
        )
        found[tensor, expert, expert_tensor, context] = save("")
        parallel_state.destroy_model_parallel()
    return found


def steps_after_a_transient_fault(saved: bool, loaded: bool) -> tuple[bool, int]:
    """Runs of the step that a job resumes at, whose loss was not finite once in the job before.

    Args:
        saved: the first job has the repair.
        loaded: the second has it.

    Returns:
        whether the first saved a checkpoint and ended, and the runs.
    """
    from mindspeed import device

    device.install(Journal())
    from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

    from mindspeed.adaptor.repairs.checkpoints import rerun_checkpoints as repair

    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    losses = iter((1.0, float("nan"), 1.0))  # those of the first step are not checked
    for _ in range(2):
        while machine.should_run_forward_backward(None):
            machine.validate_result(torch.tensor(next(losses)), torch.isnan, "a loss")
        saves, ends, _ = machine.should_checkpoint_and_exit()
    if saved:
        RerunStateMachine.state_dict = repair.without_a_second_run(RerunStateMachine.state_dict)
    state = machine.state_dict(None, "torch_dist")
    if loaded:
        original = RerunStateMachine.validate_state_dict
        RerunStateMachine.validate_state_dict = repair.not_of_a_second_run(original)
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    if machine.validate_state_dict(state):
        machine.load_state_dict({**state, "sharded": state["sharded"].data})
    runs = 0
    while machine.should_run_forward_backward(None):
        runs += 1
    return saves and ends, runs


def rerun_state_of_a_constant_structure(folder: str, repaired: bool) -> Any:
    """What a checkpoint of a step to run again has, after others without its state."""
    from mindspeed import device

    device.install(Journal())
    from megatron.core import dist_checkpointing, rerun_state_machine
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy

    from mindspeed.adaptor.repairs.checkpoints import rerun_checkpoints

    def state(pending):
        key = "rerun_state_machine_state"
        kept = {"rng": ShardedObject("rng", 1, (1,), (0,))}
        return kept | ({"rerun": ShardedObject(key, "state", (1,), (0,))} if pending else {})

    def save_checkpoint(iteration, checkpointing_context=None):
        if "save_strategy" not in checkpointing_context:
            strategy = get_default_save_sharded_strategy("torch_dist")
            strategy.use_cached_ckpt_structure = True
            checkpointing_context["save_strategy"] = strategy
        path = Path(folder) / str(iteration)
        path.mkdir()
        strategy = checkpointing_context["save_strategy"]
        pending = machine.state != rerun_state_machine.RerunState.NOT_RUNNING_YET
        dist_checkpointing.save(state(pending), str(path), strategy)
        return str(path)

    rerun_state_machine.initialize_rerun_state_machine()
    machine = rerun_state_machine.get_rerun_state_machine()
    save = rerun_checkpoints.with_a_plan_of_its_own(save_checkpoint)
    context: dict[str, Any] = {}
    for iteration in range(3):
        path = (save if repaired else save_checkpoint)(iteration, checkpointing_context=context)
    machine.state = rerun_state_machine.RerunState.WILL_RERUN_FROM_CHECKPOINT
    path = (save if repaired else save_checkpoint)(3, checkpointing_context=context)
    return dist_checkpointing.load(state(True), path)["rerun"]


def printed_objects() -> dict[str, str]:
    """Texts of Megatron's layers and of a collection with a list of groups."""
    from megatron.core import ModelParallelConfig, parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    parallel_state.initialize_model_parallel()
    found = {}
    for layer in (ColumnParallelLinear, RowParallelLinear):
        for bias in (False, True):
            own = {"input_is_parallel": True} if layer is RowParallelLinear else {}
            options = {"bias": bias, "skip_bias_add": False, **own}
            config = ModelParallelConfig(use_cpu_initialization=True)
            built = layer(2, 2, config=config, init_method=torch.nn.init.zeros_, **options)
            found[f"{layer.__name__} {bias}"] = str(built)
    if at_least("0.16"):  # has collections that can be printed
        groups = ProcessGroupCollection(tp=dist.group.WORLD, hcp=[dist.group.WORLD] * 2)
        found["groups"] = str(groups)
    return found


def energy_without_a_device() -> list[Any]:
    """What NVML is asked about by a monitor that is not set up, and by one that is."""
    from megatron.core import energy_monitor

    asked = []
    energy_monitor.nvmlDeviceGetTotalEnergyConsumption = lambda handle: asked.append(handle) or 7
    energy_monitor.NVMLError, energy_monitor.has_nvml = RuntimeError, True
    monitor = energy_monitor.EnergyMonitor()
    monitor.pause()
    monitor.resume()
    monitor._handle = "device"
    monitor.resume()
    return asked


def ended_workers() -> list[list[str]]:
    """What happens to a worker of asynchronous checkpoints without process groups."""
    from unittest import mock

    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    close = PersistentAsyncCaller.close
    PersistentAsyncCaller.close = with_repair("checkpoint-worker", close, "close", async_save=True)
    found = []
    for abort in (False, True):
        caller, worker = PersistentAsyncCaller(), mock.Mock()
        caller.close()  # there is none
        caller.process, caller.queue = worker.process, worker.queue
        caller.close(abort=abort)
        found.append([name for name, _, _ in worker.mock_calls if "bool" not in name])
    return found
