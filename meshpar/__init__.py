"""meshpar: name the dims of your tensors, say in one line how the mesh splits them, and train.

>>> import meshpar as mp
>>> mesh = mp.mesh("data=4, model=2")
>>> layout = mp.Layout("batch: data; heads, mlp, vocab: model; embed: data")
>>> step = mp.jit(train_step, mesh=mesh, layout=layout, dims={"batch/tokens": "batch seq"})

The modules of ``mp``: ``train`` (functions of a train step), ``layers`` (functions of a model), ``data``, ``log``, ``replicas``,
``nd`` (named arrays), ``layouts`` (known schemes), ``hardware`` (measurements of the attached devices),
``errors``, and ``types``, the classes that functions return.
"""

from ._src.entry import startup_message as _starting  # noqa: F401  # shows a line before the others import JAX

# isort: split
from . import data, errors, hardware, layers, layouts, log, nd, replicas, train, types
from ._src.entry.api import check, compile, infer_dims, init, jit, lab, plan, prove, search, shardings
from ._src.entry.move import move
from ._src.layout import Layout
from ._src.mesh import mesh, virtual_devices
from ._src.plan_api import Plan
from ._src.pods.checkpoint import Checkpoints
from ._src.pods.start import distributed
from ._src.program.declare_kernel_rule import kernel_rule
from ._src.program.primitives import named, rename

__version__ = "0.1.0"

__all__ = [
    "Checkpoints",
    "Layout",
    "Plan",
    "check",
    "compile",
    "data",
    "distributed",
    "errors",
    "hardware",
    "infer_dims",
    "init",
    "jit",
    "kernel_rule",
    "lab",
    "layers",
    "layouts",
    "log",
    "mesh",
    "move",
    "named",
    "nd",
    "plan",
    "prove",
    "rename",
    "replicas",
    "search",
    "shardings",
    "train",
    "types",
    "virtual_devices",
]


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
