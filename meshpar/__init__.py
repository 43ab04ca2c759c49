"""meshpar: name the dims of your tensors, say in one line how the mesh splits them, and train.

>>> import meshpar as mp
>>> mesh = mp.mesh("data=4, model=2")
>>> layout = mp.Layout("batch: data; heads, mlp, vocab: model; embed: data")
>>> step = mp.jit(train_step, mesh=mesh, layout=layout, dims={"batch/tokens": "batch seq"})
"""

from . import (
    errors,
    layouts,
    report,  # noqa: F401 (plans learn from reports how they are shown)
)
from .api import check, compile, init, jit, lab, local_sgd, plan, search, tune
from .errors import (
    AgreementError,
    AxisConflictError,
    CheckError,
    CheckpointError,
    CheckpointWarning,
    CompilerError,
    DataPositionError,
    DigestError,
    DivisibilityError,
    JoinError,
    JoinWarning,
    LayoutSyntaxError,
    LostProcessError,
    LoweringWarning,
    MeshError,
    MeshparError,
    OutOfMemoryError,
    PatternError,
    RankError,
    RepeatedWarning,
    ReplicatedWarning,
    StuckProcessError,
    TargetError,
    TorusWarning,
    UnknownAxisError,
    UnknownDimError,
    UnsupportedError,
)
from .global_arrays import fetch
from .hardware.calibration import Calibration
from .jitted import Jitted
from .layers import checkpoint_policies
from .layers.accumulate import accumulate, microbatches
from .layers.attention import attention
from .layers.loss import cross_entropy
from .layers.precision import Precision
from .layout import Layout, Rule
from .mesh import mesh, virtual_devices
from .plan.collectives import Collective
from .planned import Plan
from .pods.checkpoint import Checkpoints
from .pods.data import batches, put
from .pods.local_sgd import LocalSgd
from .pods.start import distributed
from .program.declare import kernel_rule
from .program.kernels import KernelSend, KernelWork
from .program.primitives import named, rename
from .verify.aot import Compiled, compile_lowered

__version__ = "0.1.0"

__all__ = [
    "AgreementError",
    "AxisConflictError",
    "Calibration",
    "CheckError",
    "CheckpointError",
    "CheckpointWarning",
    "Checkpoints",
    "Collective",
    "Compiled",
    "CompilerError",
    "DataPositionError",
    "DigestError",
    "DivisibilityError",
    "Jitted",
    "JoinError",
    "JoinWarning",
    "KernelSend",
    "KernelWork",
    "Layout",
    "LayoutSyntaxError",
    "LocalSgd",
    "LostProcessError",
    "LoweringWarning",
    "MeshError",
    "MeshparError",
    "OutOfMemoryError",
    "PatternError",
    "Plan",
    "Precision",
    "RankError",
    "RepeatedWarning",
    "ReplicatedWarning",
    "Rule",
    "StuckProcessError",
    "TargetError",
    "TorusWarning",
    "UnknownAxisError",
    "UnknownDimError",
    "UnsupportedError",
    "accumulate",
    "attention",
    "batches",
    "check",
    "checkpoint_policies",
    "compile",
    "compile_lowered",
    "cross_entropy",
    "distributed",
    "errors",
    "fetch",
    "init",
    "jit",
    "kernel_rule",
    "lab",
    "layouts",
    "local_sgd",
    "mesh",
    "microbatches",
    "named",
    "plan",
    "put",
    "rename",
    "search",
    "tune",
    "virtual_devices",
]  # fmt: skip
