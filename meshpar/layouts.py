"""The known schemes as layouts: ``mp.layouts.fsdp()``, ``mp.layouts.megatron(model="tensor")``.

With the default axes the name of a scheme is a layout too: ``mp.jit(step, layout="fsdp", ...)``.
"""

from ._src.layouts import *  # noqa: F403
from ._src.layouts import __all__ as __all__
