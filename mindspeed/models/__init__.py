"""Model families as data: how a Hugging Face model and a Megatron model are the same model.

A family (:mod:`~mindspeed.models.families`) is two tables, each read in both directions:

    config.json            <->  Megatron's flags           codecs    (config_json)
    tensors in safetensors <->  Megatron's parameters      rules     (table)

A rule maps rows of Hugging Face tensors to a Megatron parameter (``weight_shards``), nothing
more, so one piece of code merges, splits, reads only what a rank needs, and maps gradients too.
What Megatron Core does not have (ALiBi, a norm after the embedding ...) is in ``model_extras``,
their flags in ``extra_flags``;
sizes of published models are in ``presets.yaml``. No code knows a family by name outside its table.
"""
