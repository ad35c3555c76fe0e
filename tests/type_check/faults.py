"""Faults of composition, planted: lines of Megatron and of this library, changed in memory.

Each is found by its types, at the first line that uses the wrong value. :data:`UNSEEN` are changes
of values, which types do not see; other tests do.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from tests.type_check.planted import planted

TP = "--tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
LOCAL = "--transformer-impl local"
EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 0.01"
)
SPREAD = "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
SLICES = "--expert-tensor-parallel-size 2"
SLICED = f"{SP} {EXPERTS} --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
EXCHANGED = f"{SP} {EXPERTS} --moe-token-dispatcher-type alltoall"
GATHERED = f"{SP} {EXPERTS} --moe-token-dispatcher-type allgather"
CONTEXT = "--context-parallel-size 2"
PACKED = (
    f"{CONTEXT} --reset-attention-mask --reset-position-ids --calculate-per-token-loss "
    "--fix-sub-seq-length 8"
)
GLOBAL_LOSS = EXPERTS.replace(" aux_loss", " global_aux_loss")
SEQUENCE_LOSS = EXPERTS.replace(" aux_loss", " seq_aux_loss")
OWN_EXPERTS = f"{EXPERTS} {SPREAD} --moe-grouped-gemm"
LATENT = f"{TP} --multi-latent-attention --q-lora-rank 16"
LORA = "--lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2"
MTP = "--mtp-num-layers 1"
PAIRS = "--is-instruction-dataset --micro-batch-size 2 --objective preference"
SCORES = PAIRS.replace("preference", "reward")
GRID = "--tensor-model-parallel-size 4 --tp-2d --tp-x 2 --tp-y 2"
BIAS = "--add-bias-linear"


@dataclass(frozen=True)
class Fault:
    """A line, what it becomes, and where that shows.

    Attributes:
        name: what is wrong.
        flags: of a job that runs the line.
        module: that has it.
        old: its text, once in the module.
        new: the text instead.
        found: end of the file and a part of the line that uses the wrong value first.
        repair: of this library, without which the line is wrong; it is switched off.
    """

    name: str
    flags: str
    module: str
    old: str
    new: str
    found: tuple[str, str] = ("", "")
    repair: str | None = None

    def planted(self) -> AbstractContextManager[None]:
        """The line is changed inside the block."""
        return planted(self.module, self.old, self.new)


class Halved(torch.autograd.Function):
    """A function without a rule."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Half of it."""
        return x / 2


PREFERENCE = "mindspeed.training.preference"
LAYERS = "megatron.core.tensor_parallel.layers"
ROUTER = "megatron.core.transformer.moe.router"
ROUTING = "megatron.core.transformer.moe.moe_utils"
GPT = "megatron.core.models.gpt.gpt_model"
MAPPINGS = '__import__("megatron.core.tensor_parallel.mappings", fromlist=["_"])'
ROUTER_LOSS = "mindspeed.adaptor.repairs.experts.router_loss_scale"
SHARED = "megatron.core.transformer.moe.shared_experts"
DISPATCH = "megatron.core.transformer.moe.token_dispatcher"
LATENTS = "megatron.core.transformer.multi_latent_attention"
PREDICTION = "megatron.core.transformer.multi_token_prediction"
EMBEDDING = "megatron.core.models.common.embeddings.language_model_embedding"
FINALIZER = "megatron.core.distributed.finalize_model_grads"
COPY = f"{MAPPINGS}.copy_to_tensor_model_parallel_region"
GATHER = f"{MAPPINGS}.gather_from_sequence_parallel_region"
SUM = f"{MAPPINGS}.reduce_from_tensor_model_parallel_region"
MARKS = "mindspeed.te.parameter_marks"
COMMUNICATION = "mindspeed.te.linear_communication"
GRID_MODULES = "mindspeed.tensor_parallel.two_dimensional.megatron_modules"

NORM = "te/kernels.py", "y = F.rms_norm("
LINEAR = "te/linear_function.py", "return _Linear.apply("
MEGATRON_LINEAR = (
    "tensor_parallel/layers.py", "LinearWithGradAccumulationAndAsyncCommunication.apply("
)  # fmt: skip
ADAPTER = "lora/adapted_linear.py", "return _Adapted.apply("
RESIDUAL = "fused_bias_dropout.py", "x = x + bias"
GATING = "moe/moe_utils.py", "RouterGatingLinearFunction.apply("
REDUCED = "reduce_from_tensor_model_parallel_region("
REDUCE = "tensor_parallel/mappings.py", "_ReduceFromModelParallelRegion.apply("
BALANCE = "moe/router.py", "switch_load_balancing_loss_func("
DROPOUT = "fused_bias_dropout.py", "nn.functional.dropout("
KEY = "multi_latent_attention.py", "key = torch.cat([k_no_pe, k_pos_emb]"

# fmt: off
FAULTS = (
    # Marks
    Fault("norm of a layer unmarked", SP, "mindspeed.te.linear",
          "self.layer_norm_weight.sequence_parallel = self.sequence_parallel",
          "self.layer_norm_weight.sequence_parallel = False",
          NORM),
    Fault("norm of a frozen layer unmarked", f"{SP} {LORA}", "mindspeed.te.linear",
          "self.layer_norm_weight.sequence_parallel = self.sequence_parallel",
          "self.layer_norm_weight.sequence_parallel = False",
          NORM),
    Fault("last norm unmarked", SP, "mindspeed.te.norm",
          "parameter.sequence_parallel = sequence_parallel", "parameter.sequence_parallel = False",
          NORM),
    Fault("norm of a layer after many unmarked", f"{SP} --num-layers 6",
          "mindspeed.type_check.stage", "    return BuiltModel(config, modules)",
          "    modules[0].decoder.layers[5].mlp.linear_fc1.layer_norm_weight.sequence_parallel = "
          "False; return BuiltModel(config, modules)", NORM),
    Fault("norms of the local spec unmarked", f"{SP} {LOCAL}", "mindspeed.te.local_norm",
          "parameter.sequence_parallel = sequence_parallel", "parameter.sequence_parallel = False",
          NORM),
    Fault("bias of row layers unmarked", f"{SP} {BIAS}", MARKS,
          "bias.sequence_parallel = sequence_parallel", "bias.sequence_parallel = False",
          RESIDUAL),
    Fault("bias of column layers unmarked", f"{SP} {BIAS}", MARKS,
          "        mark_tensor_parallel(bias, 0)", "        pass",
          LINEAR),
    Fault("bias of the local spec's row layers unmarked", f"{SP} {LOCAL} {BIAS}", LAYERS,
          'setattr(self.bias, "sequence_parallel", self.sequence_parallel)',
          'setattr(self.bias, "sequence_parallel", False)',
          RESIDUAL),
    Fault("shards unmarked", SP, MARKS, "parameter.tensor_model_parallel = True",
          "parameter.tensor_model_parallel = False",
          LINEAR),
    Fault("router unmarked", f"{SP} {OWN_EXPERTS}", ROUTER,
          "setattr(self.weight, 'sequence_parallel', self.config.sequence_parallel)",
          "setattr(self.weight, 'sequence_parallel', False)",
          GATING),
    Fault("gate of shared experts unmarked",
          f"{SP} {OWN_EXPERTS} --moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate",
          SHARED,
          "setattr(self.gate_weight, 'sequence_parallel', self.config.sequence_parallel)",
          "setattr(self.gate_weight, 'sequence_parallel', False)",
          ("moe/shared_experts.py", "linear(hidden_states, self.gate_weight)")),
    Fault("whole experts marked as shards of the dense ranks",
          f"{SP} {EXPERTS} --expert-tensor-parallel-size 1", MARKS,
          "and config.expert_tensor_parallel_size == config.tensor_model_parallel_size", "",
          LINEAR),
    Fault("attention sink unmarked", f"{TP} --softmax-type learnable", MARKS,
          "mark_tensor_parallel(sink, 1 if sink.dim() == 4 else 0)", "pass",
          ("te/attention.py", "torch.cat([extra, score]")),
    Fault("whole factors of adapters unmarked", f"{TP} {LORA}", MARKS,
          "matrix.partial_over_tp = partial_over", "pass",
          ADAPTER),
    Fault("sharded factors of adapters unmarked", f"{TP} {LORA}", MARKS,
          "        mark_tensor_parallel(matrix, sharded_dim)", "        pass",
          ADAPTER),
    Fault("vectors on a grid unmarked", GRID, GRID_MODULES,
          "vector.sequence_parallel = True", "vector.sequence_parallel = False",
          ("two_dimensional/norm.py", "return _Norm.apply(")),
    Fault("weights on a grid unmarked", GRID, GRID_MODULES,
          "set_tensor_model_parallel_attributes(self.weight, True,",
          "set_tensor_model_parallel_attributes(self.weight, False,",
          ("two_dimensional/linear.py", "= _Linear.apply(")),
    # The end of backward
    Fault("query norms not summed", f"{TP} --qk-layernorm", FINALIZER,
          'config.qk_layernorm and (', 'False and (',
          NORM),
    Fault("sequence-parallel parameters not summed", SP, FINALIZER,
          'elif (config.sequence_parallel and getattr(param, "sequence_parallel", False)) or (',
          'elif (False and getattr(param, "sequence_parallel", False)) or (',
          NORM),
    Fault("sequence-parallel parameters averaged", SP, FINALIZER,
          "[torch.distributed.ReduceOp.SUM, torch.distributed.ReduceOp.AVG]",
          "[torch.distributed.ReduceOp.AVG, torch.distributed.ReduceOp.SUM]",
          NORM),
    Fault("adapters not summed", f"{TP} {LORA}", "mindspeed.lora.linear",
          'group = getattr(whole_parameter, "partial_over_tp", None)', "group = None",
          ADAPTER),
    # Pairs of answers
    Fault("answers not summed over the ranks of a sequence", f"{PAIRS} {CONTEXT} {TP}",
          "mindspeed.preference.answers", "return _SumOverRanks.apply(x, group)", "return x",
          ("training/preference.py", "def _loss_function(")),
    Fault("rewards not summed over the ranks of a sequence", f"{SCORES} {CONTEXT} {TP}",
          "mindspeed.preference.answers", "return _SumOverRanks.apply(x, group)", "return x",
          ("training/preference.py", "def _loss_function(")),
    Fault("pairs not counted over the data ranks", PAIRS, PREFERENCE,
          "    dist.all_reduce(sums, group=ranks)", "    pass",
          ("training/preference.py", "def before(")),
    Fault("gradient of the reference model", f"{PAIRS} {TP} {LORA}", PREFERENCE,
          "with torch.no_grad(), self._reference()", "with self._reference()",
          ("training/preference.py", "run_forward(reference_step")),
    Fault("head of rewards unmarked", f"{SCORES} {SP}", "mindspeed.preference.megatron_head",
          "self.weight.sequence_parallel = config.sequence_parallel",
          "self.weight.sequence_parallel = False",
          ("preference/megatron_head.py", "F.linear(x, self.weight)")),
    # Embedding and output layer
    Fault("embedding not summed", TP, LAYERS,
          "            output = reduce_from_tensor_model_parallel_region("
          "output_parallel, group=self.tp_group)\n        return output\n",
          "            output = output_parallel\n        return output\n",
          NORM),
    Fault("embedding summed and not scattered", SP, LAYERS,
          "        if self.reduce_scatter_embeddings:\n            # Data",
          "        if False:\n            # Data",
          NORM),
    Fault("embedding not scattered", f"{SP} --position-embedding-type learned_absolute "
          "--max-position-embeddings 32", EMBEDDING,
          "if not self.reduce_scatter_embeddings and self.scatter_to_sequence_parallel:",
          "if False:",
          NORM),
    Fault("gradient of the output layer's input not summed", f"{TP} {LOCAL}", LAYERS,
          "allreduce_dgrad = False if self.explicit_expert_comm else self.allreduce_dgrad",
          "allreduce_dgrad = False",
          MEGATRON_LINEAR),
    # Linear layers
    Fault("row layers do not reduce", TP, COMMUNICATION,
          'return self.parallel_mode == "row" and comm.group_size(self.group) > 1', "return False",
          DROPOUT),
    Fault("column layers do not sum the gradient", TP, COMMUNICATION,
          "sums_gradient=self.column and not split", "sums_gradient=False",
          LINEAR),
    Fault("row layers sum and do not scatter", SP, COMMUNICATION,
          "scatters=split,", "scatters=False,",
          ("fused_bias_dropout.py", "residual + out")),
    Fault("row layers of the local spec do not reduce", f"{TP} {LOCAL}", LAYERS,
          f"output_ = {REDUCED}output_parallel, group=self.tp_group)", "output_ = output_parallel",
          DROPOUT),
    Fault("row layers of the local spec slice", f"{SP} {LOCAL}", LAYERS,
          "            output_ = reduce_scatter_to_sequence_parallel_region(\n"
          "                output_parallel, group=self.tp_group\n"
          "            )",
          "            output_ = output_parallel[: output_parallel.shape[0] // 2]\n\n",
          DROPOUT),
    # Latent attention
    Fault("gradient of the latent key not summed", LATENT,
          "mindspeed.adaptor.repairs.attention.latent_key_gradient",
          "if not config.sequence_parallel:", "if False:",
          KEY),
    Fault("gathered latent key gets no sum", f"{LATENT} --sequence-parallel", LATENTS,
          "k_pos_emb = gather_from_sequence_parallel_region(k_pos_emb, group=self.tp_group)",
          "k_pos_emb = gather_from_sequence_parallel_region(k_pos_emb, False, group=self.tp_group)",
          KEY),
    # Multi-token prediction
    Fault("projection of a prediction layer not gathered", f"{SP} {MTP}", PREDICTION,
          "        hidden_states = gather_from_tensor_model_parallel_region(hidden_states)",
          "        pass",
          ("tensor_parallel/mappings.py", "_ScatterToSequenceParallelRegion.apply(")),
    Fault("prediction layer's input not scattered", f"{SP} {MTP}", PREDICTION,
          "hidden_states = scatter_to_sequence_parallel_region(hidden_states)", "pass",
          NORM),
    # Experts
    Fault("gathered rows of sliced experts get no sum", SLICED, DISPATCH,
          "                global_input_tokens, group=self.tp_group, output",
          "                global_input_tokens, False, group=self.tp_group, output",
          ("te/grouped.py", "out = _GroupedLinear.apply(")),
    Fault("gathered tokens get no sum",
          f"{SP} {EXPERTS} {SPREAD} --moe-token-dispatcher-type allgather", DISPATCH,
          "                hidden_states, group=self.tp_ep_group, use_global_buffer=True",
          "                hidden_states, False, group=self.tp_ep_group, use_global_buffer=True",
          LINEAR),
    Fault("gathered probabilities get no sum",
          f"{SP} {EXPERTS} {SPREAD} --moe-token-dispatcher-type allgather", DISPATCH,
          "probs = gather_from_sequence_parallel_region(probs, group=self.tp_ep_group)",
          "probs = gather_from_sequence_parallel_region(probs, False, group=self.tp_ep_group)",
          ("fused_bias_swiglu.py", "WeightedSwiGLUFunction.apply(")),
    Fault("tokens of a rank counted after the sum", f"{SP} {EXPERTS} {SPREAD}",
          "megatron.core.transformer.moe.moe_utils",
          "    if with_padding_mask:\n        local_num", "    if True:\n        local_num",
          ("moe/moe_utils.py", "local_num_tokens = local_tokens_per_expert.sum() / topk")),
    # Slices of experts
    *(
        Fault(f"results of {kind} not summed", f"{EXCHANGED} {flags}", DISPATCH,
              "            hidden_states = reduce_scatter_to_sequence_parallel_region(\n"
              "                hidden_states.to(self.probs.dtype),\n"
              "                group=self.tp_group,\n"
              "                input_split_sizes=input_split_sizes,\n"
              "            ).to(hidden_states.dtype)",
              "            hidden_states = hidden_states[: hidden_states.shape[0] // 2]\n\n\n\n",
              ("moe/moe_utils.py", "output_tokens.scatter_add_("))
        for kind, flags in (
            ("slices of grouped experts", "--moe-grouped-gemm"),
            ("slices of experts", ""),
            ("slices of spread experts",
             f"--expert-model-parallel-size 2 {SLICES} --moe-grouped-gemm"),
            ("slices of stacked experts",
             "--moe-grouped-gemm --moe-use-legacy-grouped-gemm --bf16"),
        )
    ),
    *(
        Fault(f"results of {kind} not summed", f"{GATHERED} {flags}", DISPATCH,
              "            hidden_states = reduce_scatter_to_sequence_parallel_region(\n"
              "                hidden_states.to(self.local_probs.dtype), group=self.tp_ep_group\n"
              "            ).to(hidden_states.dtype)",
              "            hidden_states = hidden_states.chunk(self.tp_ep_group.size())[0]\n\n",
              DROPOUT)
        for kind, flags in (
            ("slices of gathered grouped experts", "--moe-grouped-gemm"),
            ("slices of gathered experts", ""),
            ("gathered and spread experts", SPREAD),
        )
    ),
    Fault("overlapped sum over slices of experts left out",
          f"{SP} {EXPERTS} --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
          "--moe-alltoall-overlap-comm", "mindspeed.moe.dispatch.all_to_all",
          'return {"rows": self.groups.wire.results(slices)}',
          'chunk.tensors["rows"] = chunk.tensors["rows"][: self.groups.tp.size() and '
          'self._sizes(chunk).sum((1, 2)).tolist()[0]]; return {}',
          DROPOUT),
    # Losses that are attached to the graph
    Fault("counts of a balancing loss not summed", f"{SP} {EXPERTS}", ROUTING,
          "    global_tokens_per_expert = reduce_from_tensor_model_parallel_region(\n"
          "        local_tokens_per_expert, reduce_group\n    )",
          "    global_tokens_per_expert = local_tokens_per_expert\n\n", BALANCE),
    Fault("counts of a loss per sequence not summed", f"{CONTEXT} {SEQUENCE_LOSS}", ROUTING,
          "    global_tokens_per_expert = reduce_from_tensor_model_parallel_region(\n"
          "        local_tokens_per_expert, reduce_group\n    )",
          "    global_tokens_per_expert = local_tokens_per_expert\n\n", BALANCE),
    Fault("counts of a loss per sequence summed over tensor ranks only",
          f"{SP} {CONTEXT} {SEQUENCE_LOSS}", ROUTER,
          "reduce_group=self.tp_cp_group,\n                with_padding_mask=with_padding_mask,\n"
          "                topk=self.topk * bsz",
          "reduce_group=self.tp_group,\n                with_padding_mask=with_padding_mask,\n"
          "                topk=self.topk * bsz", BALANCE),
    Fault("counts of a global loss summed over tensor ranks only",
          f"{SP} {CONTEXT} {GLOBAL_LOSS}", ROUTER,
          "reduce_group=self.tp_dp_cp_group,\n                with_padding",
          "reduce_group=self.tp_group,\n                with_padding", BALANCE),
    Fault("balancing loss gathered, and its gradient summed", f"{SP} {EXPERTS}", ROUTER,
          "MoEAuxLossAutoScaler.apply(activation, aux_loss)",
          f"MoEAuxLossAutoScaler.apply(activation, {GATHER}(aux_loss.view(1)).sum())",
          ("moe/router.py", "MoEAuxLossAutoScaler.apply(activation, aux_loss)")),
    Fault("balancing loss summed twice", f"{SP} {SEQUENCE_LOSS}", ROUTER,
          "MoEAuxLossAutoScaler.apply(activation, aux_loss)",
          f"MoEAuxLossAutoScaler.apply(activation, {SUM}({SUM}(aux_loss)))",
          REDUCE),
    Fault("gradient of the z-loss summed once too often",
          f"{SP} {EXPERTS} --moe-z-loss-coeff 0.001", ROUTER_LOSS,
          "MoEAuxLossAutoScaler.apply(logits, loss * strength)",
          f"MoEAuxLossAutoScaler.apply(logits, {COPY}({SUM}(loss * strength)))",
          ("experts/router_loss_scale.py", "MoEAuxLossAutoScaler.apply(logits, loss * strength)")),
    Fault("loss of multi-token prediction divided by the tokens of a rank", f"{CONTEXT} {MTP}",
          "mindspeed.adaptor.repairs.layers.mtp",
          "        dist.all_reduce(total, group=cp_group)", "        pass",
          ("gpt/gpt_model.py", "loss_mask, num_tokens = roll_tensor(")),
    Fault("gradient of the loss of multi-token prediction summed", f"{SP} {MTP}", GPT,
          "hidden_states, mtp_loss_scale * mtp_loss / num_tokens",
          f"hidden_states, {COPY}(mtp_loss_scale * mtp_loss / num_tokens)",
          ("gpt/gpt_model.py", "hidden_states = MTPLossAutoScaler.apply(")),
    # Packed documents over context-parallel ranks
    Fault("last norm of packed documents unmarked", f"{SP} {PACKED}", "mindspeed.te.norm",
          "parameter.sequence_parallel = sequence_parallel", "parameter.sequence_parallel = False",
          NORM),
    # Memory
    Fault("strided output of row layers reduced", f"{TP} {LOCAL}", LAYERS,
          f"output_ = {REDUCED}output_parallel, group=self.tp_group)",
          f"output_ = {REDUCED}output_parallel.transpose(0, 2).contiguous().transpose(0, 2))",
          ("tensor_parallel/mappings.py", "_ReduceFromModelParallelRegion.apply("), "reductions"),
)

# What types do not see is accepted; the test that sees it.
UNSEEN = (
    (Fault("halved products of row layers", TP, COMMUNICATION,
           "out, work = kernel(x, weight, group,", "out, work = kernel(x, weight / 2, group,"),
     "tests/te/test_linear.py::test_column_and_row_parallel_layers_equal_the_whole_layer"),
    (Fault("an adapter's scale is forgotten", f"{TP} {LORA}", "mindspeed.lora.adapted_linear",
           "addmm_(_rows(u), b.t(), alpha=scale)", "addmm_(_rows(u), b.t(), alpha=1.0)"),
     "tests/lora/test_layouts.py::test_adapter_gradients_equal_pefts"),
    (Fault("every token is counted twice", TP, "mindspeed.training.forward_step",
           "    count = mask.sum()", "    count = mask.sum() * 2"),
     "tests/training/test_instruction_training.py::"
     "test_the_loss_is_the_mean_over_all_trained_tokens_of_the_batch"),
)

# Not wrong by themselves: what no flag asks for.
SETUPS = (
    Fault("gathered logits", TP, "megatron.core.models.gpt.gpt_model",
          "gather_output=not self.parallel_output", "gather_output=True"),
    Fault("smoothed labels", TP, "megatron.core.models.common.language_module.language_module",
          "tensor_parallel.vocab_parallel_cross_entropy(logits, labels)",
          "tensor_parallel.vocab_parallel_cross_entropy(logits, labels, 0.1)"),
    Fault("function without a rule", TP, "megatron.core.transformer.mlp",
          "output, output_bias = self.linear_fc2(intermediate_parallel)",
          "output, output_bias = self.linear_fc2(intermediate_parallel); "
          "from tests.type_check.faults import Halved; output = Halved.apply(output)"),
)

# fmt: on
READS = Fault(
    "experts whose router reads values",
    f"{SP} {OWN_EXPERTS}",
    ROUTER,
    "        logits = self.gating(input)",
    "        logits = self.gating(input); assert not bool(logits.isnan().any())",
)  # fmt: skip
"""Runs on tensors with values only."""

NAMED = {fault.name: fault for fault in (*FAULTS, *SETUPS, *(one for one, _ in UNSEEN), READS)}


@dataclass(frozen=True)
class HiddenFault:
    """A line inside an autograd function, which its rule hides from the types of a model.

    The numbers of :mod:`tests.type_check.adjoint` show it.

    Attributes:
        function: whose forward and backward are no longer adjoint, or whose output has no longer
            the type of its rule.
        module: that has the line.
        old: its text, once in the module.
        new: the text instead.
    """

    function: str
    module: str
    old: str
    new: str

    @property
    def name(self) -> str:
        """The function and the line."""
        return f"{self.function}: {self.old.strip().splitlines()[0]}"

    def planted(self) -> AbstractContextManager[None]:
        """The line is changed inside the block."""
        return planted(self.module, self.old, self.new)


GRIDS = "tensor_parallel.two_dimensional"
HIDDEN = (
    HiddenFault(
        "transformer.moe.moe_utils.MoEAuxLossAutoScaler",
        ROUTING,
        "torch.ones_like(aux_loss) * aux_loss_backward_scale",
        "torch.ones_like(aux_loss) * aux_loss_backward_scale * 2",
    ),
    HiddenFault(
        "transformer.multi_token_prediction.MTPLossAutoScaler",
        PREDICTION,
        "torch.ones_like(mtp_loss) * mtp_loss_backward_scale",
        "torch.ones_like(mtp_loss)",
    ),
    HiddenFault(
        "te.comm._AllGather",
        "mindspeed.te.comm",
        "return reduce_scatter_first_dim(grads[0], ctx.group)[0], None",
        "return grads[0].chunk(2)[ctx.group.rank()], None",
    ),
    HiddenFault(
        "te.comm._ReduceScatter",
        "mindspeed.te.comm",
        "return all_gather_first_dim(grads[0], ctx.group)[0], None",
        "return grads[0].repeat(2, 1), None",
    ),
    HiddenFault(
        "te.comm._AllReduce",
        "mindspeed.te.comm",
        "        dist.all_reduce(x, group=group)\n        return x",
        "\n        return x",
    ),
    HiddenFault(
        "te.linear_function._Linear",
        "mindspeed.te.kernels",
        "return product, dist.all_reduce(product, group=group, async_op=async_op)",
        "return product, None",
    ),
    HiddenFault(
        "te.linear_function._Linear",
        "mindspeed.te.linear_function",
        "            db = local_grad.reshape(-1, local_grad.shape[-1]).sum(0)",
        "            db = grad.reshape(-1, grad.shape[-1]).sum(0)",
    ),
    HiddenFault(
        "te.linear_function._Linear",
        "mindspeed.ops.overlap",
        "        return _issued(dist.all_reduce(results[i], group=group, async_op=True))",
        "        return _issued(dist.all_reduce(results[0], group=group, async_op=True))",
    ),
    HiddenFault(
        "te.cross_entropy._CrossEntropy",
        "mindspeed.te.cross_entropy",
        "        _reduce(total, group)\n",
        "\n",
    ),
    HiddenFault(
        "lora.adapted_linear._Adapted",
        "mindspeed.lora.adapted_linear",
        "addend = _masked(du @ a, mask)",
        "addend = _masked(du @ a, mask) * 0",
    ),
    HiddenFault(
        "lora.adapted_linear._Adapted",
        "mindspeed.lora.adapted_linear",
        "    return dx + _masked(du @ a, mask), da, db",
        "    return dx, da, db",
    ),
    HiddenFault(
        f"{GRIDS}.norm._Norm",
        f"mindspeed.{GRIDS}.norm",
        "projected, *shift = _sum(torch.stack(sums), ctx.group) / columns",
        "projected, *shift = torch.stack(sums) / columns",
    ),
    HiddenFault(
        f"{GRIDS}.linear._Linear",
        f"mindspeed.{GRIDS}.linear",
        "            dx, scattering = products.scatter(product, gathers, async_op=True)",
        "            dx = product.chunk(gathers.size())[gathers.rank()]",
    ),
    HiddenFault(
        "adaptor.repairs.attention.latent_key_gradient._SumOfKeyGradients",
        "mindspeed.adaptor.repairs.attention.latent_key_gradient",
        "        dist.all_reduce(key, group=ctx.group)\n",
        "\n",
    ),
    HiddenFault(
        "moe.split_phase._Start",
        "mindspeed.moe.collectives",
        "return parts.sum(0, dtype=wide).to(parts.dtype)",
        "return parts[0]",
    ),
    HiddenFault(
        "models.model_extras._LargestLogit",
        "mindspeed.models.model_extras",
        "value = (gradient * own).to(ctx.dtype)",
        "value = gradient.to(ctx.dtype)",
    ),
    HiddenFault(
        "moe.ampipe.rows._First",
        "mindspeed.moe.ampipe.rows",
        "self._sum[: grad.shape[0]] += grad",
        "self._sum[: grad.shape[0]] = grad",
    ),
    HiddenFault(
        "moe.packing._Pack",
        "mindspeed.moe.packing",
        "return grad, ctx.packing.read(grad), None",
        "return grad, grad[:, 0], None",
    ),
    HiddenFault(
        "attention.ulysses_all_to_all._ToHeads",
        "mindspeed.attention.ulysses_all_to_all",
        "total[:, cols.start : cols.stop] += part",
        "total[:, cols.start : cols.stop] = part",
    ),
    HiddenFault(
        "attention.context_parallel._Attention",
        "mindspeed.attention.context_parallel",
        "(dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)",
        "dout.to(lse.dtype).sum(-1)",
    ),
    HiddenFault(
        "te.grouped._GroupedLinear",
        "mindspeed.te.grouped",
        "bgrads.append(rows.sum(0).to(bias.dtype)",
        "bgrads.append(rows[0].to(bias.dtype)",
    ),
)
