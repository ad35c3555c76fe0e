"""Checkpoints in Megatron's ``torch_dist`` format, interchangeable with Megatron-LM.

    SAVE/
      latest_checkpointed_iteration.txt     which one to load
      iter_0000100/
        common.pt, .metadata, metadata.json, __0_0.distcp ...   Megatron's files
        config.yaml                         recipe that repeats the run
        mindspeed.json                      sizes of all files, versions, position in the data

``state`` lists what a checkpoint holds, ``fsdp_state`` the same for parameters that are sharded
over data-parallel ranks (ZeRO 2 and 3); ``save`` and ``load`` use both. Names, digests and
retention are in :mod:`mindspeed.storage`.
"""
