"""Records of a training's tensors, and their comparison: where do two runs part?

    --record DIR             of a training: digests of its tensors (:mod:`.recorder`)
    mindspeed compare A B    the first tensor that differs by more than rounding explains

Names (:mod:`.names`), places of shards (:mod:`.megatron_places`) and digests (:mod:`.digest`) do
not depend on the layout, so that a run on one rank can be compared with one on 64. Rounding is
measured: a run with noise of its size in every tensor (:mod:`.noise`) shows what becomes of it.
"""
