"""Weights of a whole model in five file formats.

    Hugging Face          config.json, model-00001-of-00004.safetensors or pytorch_model*.bin
    torch_dist            release/.metadata, __0_0.distcp ...        any layout loads it
    legacy (torch)        release/mp_rank_01_002/model_optim_rng.pt  a file for each rank
    legacy (deepspeed)    release/mp_rank_01_model_states.pt         the same, as DeepSpeed has it
    safetensors           release/model.safetensors, megatron.json   whole parameters

A format has a reader, a :class:`~mindspeed.models.weight_source.WeightSource` that returns one
parameter at a time, and a function that writes such a source, one parameter at a time. So every
format converts to every other one, for all parallel sizes, and the model is never whole in memory.
"""
