"""A framework: binds Megatron's names behind the import line, then asks about its own model.

A model is a string of the words ``fault``, ``reads``, ``unrepaired``, ``context`` (parallelism) and
``delta``, ``mamba`` or ``formula``: with gated delta nets, with layers that need a package, or with
Megatron's own formula of gated delta nets.
"""

from __future__ import annotations

import mindspeed.megatron_adaptor

# isort: split
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.mamba import MambaModel
from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm

import mindspeed


class Head(torch.nn.Module):
    """A bias after the embedding that the framework has added.

    Args:
        marked: for sequence parallelism.
        reads: the values of its input.
    """

    def __init__(self, size: int, marked: bool, reads: bool) -> None:
        super().__init__()
        self.reads = reads
        self.bias = torch.nn.Parameter(torch.zeros(size))
        self.bias.sequence_parallel = marked

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Add it to ``[s, b, h]``."""
        if self.reads and hidden.isnan().any():
            raise ValueError("not a number")
        return hidden + self.bias


def other_model(kind: str, config, args, **ends):
    """A model with other layers: gated delta nets, or Mamba, which needs a package.

    ``delta`` are gated delta nets with this library's operators, ``formula`` with Megatron's rule.
    """
    if kind == "mamba":
        return MambaModel(
            config, mamba_stack_spec, args.padded_vocab_size, args.seq_length,
            hybrid_override_pattern="M" * config.num_layers,
        )  # fmt: skip
    config.deterministic_mode = kind == "formula"  # Megatron's own, in plain torch
    config.activation_func = torch.nn.functional.silu
    config.linear_conv_kernel_dim = config.linear_num_key_heads = 4
    config.linear_key_head_dim = config.linear_value_head_dim = 16
    config.linear_num_value_heads = 4
    parts = gated_delta_net.GatedDeltaNetSubmodules(
        ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear
    )
    layers = get_gpt_layer_local_spec()
    layers.submodules.self_attention = ModuleSpec(gated_delta_net.GatedDeltaNet, submodules=parts)
    return GPTModel(config, layers, args.padded_vocab_size, args.seq_length, **ends)


def provider_of(args, asked: list[str]):
    """The model provider; with sequence parallelism the bias must be marked."""
    config = TransformerConfig(
        num_layers=args.num_layers // args.pipeline_model_parallel_size,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        pipeline_dtype=torch.float32,
        sequence_parallel=args.sequence_parallel,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_moe_experts=None,
    )
    config.num_layers = args.num_layers

    def provide(pre_process=True, post_process=True):
        if asked and asked[0] in ("delta", "formula", "mamba"):
            ends = {"pre_process": pre_process, "post_process": post_process}
            return other_model(asked[0], config, args, **ends)
        model = GPTModel(
            config, get_gpt_layer_local_spec(), args.padded_vocab_size, args.seq_length,
            pre_process=pre_process, post_process=post_process, position_embedding_type="rope",
        )  # fmt: skip
        if pre_process:
            shift = Head(args.hidden_size, "fault" not in asked, "reads" in asked)
            model.embedding.register_module("shift", shift)
            forward = model.embedding.forward
            model.embedding.forward = lambda *a, **k: model.embedding.shift(forward(*a, **k))
        return model

    return provide


def said(asked: str) -> str:
    """What the check says of a model."""
    from mindspeed import session
    from mindspeed.errors import ConfigError
    from mindspeed.planner.job import Job
    from tests.type_check.check_job import SMALL

    words = asked.split()
    flags = f"{SMALL} --transformer-impl local --nproc 4 --tensor-model-parallel-size 2"
    if not words:  # one with two stages is enough
        flags += " --pipeline-model-parallel-size 2"
    if "formula" not in words:
        flags += " --sequence-parallel"
    if "context" in words:
        flags += " --context-parallel-size 2"
    args = Job(flags.split()).settings().args
    if "unrepaired" in words:
        session.install().engine.remove("repair:parameter-marks")
    try:
        return mindspeed.check(provider_of(args, words), args)
    except ConfigError as error:
        return str(error)


def checks(models: list[str]) -> list[str]:
    """What :func:`mindspeed.check` returns or raises for each, in a child of this process."""
    from mindspeed.planner import isolated
    from mindspeed.training import forward_step, model, step  # noqa: F401  (for all children)

    return [str(text) for text in isolated.map(said, [(asked,) for asked in models], jobs=2)]
