"""Files and directories of checkpoints, below everything that saves or loads a model.

=================  ===============================================================================
``directory``      names, which checkpoints are complete, which one is the latest, retention
``digests``        a hash for every block of every file, computed while it is written, verified
                   while it is read
``safe_metadata``  the index of a ``torch_dist`` checkpoint, unpickled through an allow-list
``common_state``   its common part: the run's arguments, iteration
``global_tensors`` its tensors one at a time, without a model or process group
``sharded_load``   its tensors into a model's sharded state dict, on all ranks
``megatron``       the inner names of Megatron's writer and reader that are replaced for one call
=================  ===============================================================================
"""
