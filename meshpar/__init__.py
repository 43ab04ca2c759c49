"""meshpar: name the dims of your tensors, say in one line how the mesh splits them, and train.

>>> import meshpar as mp
>>> mesh = mp.mesh("data=4, model=2")
>>> layout = mp.Layout("batch: data; heads, mlp, vocab: model; embed: data")
>>> step = mp.jit(train_step, mesh=mesh, layout=layout, dims={"batch/tokens": "batch seq"})
"""

from . import errors
from .api import Jitted, init, jit, plan
from .errors import (
    AxisConflictError,
    CheckError,
    DivisibilityError,
    JoinError,
    JoinWarning,
    LayoutSyntaxError,
    MeshError,
    MeshparError,
    PatternError,
    RankError,
    UnknownAxisError,
    UnknownDimError,
    UnsupportedError,
)
from .layout import Layout, Rule
from .mesh import mesh, virtual_devices
from .plan import Collective, Plan
from .program.primitives import named, rename
from .verify.check import check

__version__ = "0.1.0"

__all__ = [
    "AxisConflictError",
    "CheckError",
    "Collective",
    "DivisibilityError",
    "Jitted",
    "JoinError",
    "JoinWarning",
    "Layout",
    "LayoutSyntaxError",
    "MeshError",
    "MeshparError",
    "PatternError",
    "Plan",
    "RankError",
    "Rule",
    "UnknownAxisError",
    "UnknownDimError",
    "UnsupportedError",
    "check",
    "errors",
    "init",
    "jit",
    "mesh",
    "named",
    "plan",
    "rename",
    "virtual_devices",
]  # fmt: skip
