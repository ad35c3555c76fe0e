"""One module per context-parallel algorithm; each returns a plan."""

from mindspeed.attention.planners.adaptive import adaptive, adaptive_sharding
from mindspeed.attention.planners.gather import all_gather, needed_only
from mindspeed.attention.planners.kv_cache import with_cache
from mindspeed.attention.planners.mesh import mesh, mesh_side
from mindspeed.attention.planners.ring import ring

__all__ = [
    "adaptive",
    "adaptive_sharding",
    "all_gather",
    "mesh",
    "mesh_side",
    "needed_only",
    "ring",
    "with_cache",
]
