"""``--acme-bf16-dispatch``: tokens are sent to their experts in bf16."""

import torch

from mindspeed.features.feature import Feature, Problem
from mindspeed.flags import flag


def in_bf16(dispatcher):
    """Wrap ``token_dispatch(tokens [t, h], probs [t])`` of one dispatcher: the all-to-all."""
    plain = dispatcher.token_dispatch

    def token_dispatch(tokens, probs):
        received, probs = plain(tokens.to(torch.bfloat16), probs)
        return received.to(tokens.dtype), probs

    dispatcher.token_dispatch = token_dispatch


class Bf16Dispatch(Feature, name="acme-bf16-dispatch", level=2, seams=("chunk",)):
    """Tokens are sent to experts in bf16."""

    acme_bf16_dispatch: bool = flag(False, "send tokens to experts in bf16: half of fp32's bytes")

    def problems(self, megatron):
        if megatron.get("moe_token_dispatcher_type") != "alltoall":
            yield Problem("--acme-bf16-dispatch", "needs --moe-token-dispatcher-type alltoall")

    def attach(self, seams, megatron):
        def change(model, config, vp_stage):
            """``model``: a finished model chunk, layers of multi-token prediction included."""
            from mindspeed.adaptor.moe import moe_layers

            for layer in moe_layers(model):
                in_bf16(layer.token_dispatcher)

        seams.chunk.add(change, owner=self.name)
