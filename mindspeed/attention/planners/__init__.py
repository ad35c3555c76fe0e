"""One module per way to bring queries and keys together; each returns a plan."""

from mindspeed.attention.planners.adaptive import adaptive, adaptive_layout
from mindspeed.attention.planners.cache import with_cache
from mindspeed.attention.planners.gather import all_gather, needed_only
from mindspeed.attention.planners.mesh import mesh, mesh_side
from mindspeed.attention.planners.ring import ring

__all__ = [
    "adaptive",
    "adaptive_layout",
    "all_gather",
    "mesh",
    "mesh_side",
    "needed_only",
    "ring",
    "with_cache",
]
