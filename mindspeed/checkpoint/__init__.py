"""Checkpoints in Megatron's ``torch_dist`` format, interchangeable with Megatron-LM.

    SAVE/
      latest_checkpointed_iteration.txt     which one to load
      iter_0000100/
        common.pt, .metadata, metadata.json, __0_0.distcp ...   Megatron's files
        config.yaml                         recipe that repeats the run
        mindspeed.json                      sizes of all files, versions, position in the data

``state`` knows what a checkpoint holds, ``shards`` the same where ranks share parameters (ZeRO 2
and 3), ``writer`` how files are written without starting processes; ``save`` and ``load`` put them
together. Names, digests and retention of the files are in :mod:`mindspeed.storage`.
"""
