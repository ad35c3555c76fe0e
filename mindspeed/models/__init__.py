"""Model families as data: how a Hugging Face model and a Megatron model are the same model.

A family (:mod:`~mindspeed.models.families`) is two tables, each read in both directions:

    config.json            <->  Megatron's flags           codecs    (config_json)
    tensors in safetensors <->  Megatron's parameters      rules     (table)

A rule says that a Megatron parameter is made of rows of Hugging Face tensors (``rows``), nothing
more, so one piece of code merges, splits, reads only what a rank needs, and maps gradients too.
What Megatron Core does not have (ALiBi, a norm after the embedding ...) is in ``specials``; sizes
of published models are in ``presets.yaml``. Nothing here knows a family by name outside its table.
"""
