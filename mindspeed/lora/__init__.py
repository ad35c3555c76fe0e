"""Low-rank adapters: train a small correction of a frozen model.

    y = x W^T + (alpha / r) (x A^T) B^T        W frozen, A [r, in], B [out, r], B = 0 at first

    from mindspeed import lora

    lora.attach(chunks, lora.LoraConfig(target_modules=("query_key_value", "dense")))
    lora.load(chunks, "out/adapter")     # a checkpoint of ours, or a PEFT directory
    lora.merge(chunks)                   # W += (alpha / r) B A, and the adapters are gone

``chunks`` are this rank's pipeline stages, wrapped or not. Everything works under tensor, pipeline,
sequence and expert parallelism, with both layer specs, and costs no collective that the frozen
model does not have, except one sum per step:

=======================  ==========================================================================
``config``               :class:`LoraConfig`, names of modules, and which of them a user means
``linear``               layers with an adapter, how it is sharded, the sum per step
``layers``               linear layers of a stage, and the parts of one
``experts``              adapters of experts
``megatron_embedding``   adapters of the embedding
``attach``               freezes a model and gives its linear layers adapters
``state``                what an adapter checkpoint holds
``peft``                 files of the ``peft`` package, read
``peft_fields``          every key of their configuration, and what becomes of it
``export``               an adapter checkpoint as such files
``peft_blocks``          several adapters in one pair of matrices there
``merge``                adapters into weights: in a model, or checkpoint to checkpoint
=======================  ==========================================================================
"""

from mindspeed.lora.attach import adapted, attach, switched_off
from mindspeed.lora.config import LoraConfig
from mindspeed.lora.load import is_adapter, load
from mindspeed.lora.merge import merge

__all__ = ["LoraConfig", "adapted", "attach", "is_adapter", "load", "merge", "switched_off"]
