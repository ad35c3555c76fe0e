"""``setup=`` of ranks with Megatron as it is: no repair, only a stand-in for absent Triton.

megatron.core 0.18 and newer cannot be imported without Triton.
"""

from tests.support.release import stand_in_for_triton

stand_in_for_triton()

import megatron.core.parallel_state  # noqa: E402, F401
