"""meshpar: name the dims of your tensors, say in one line how the mesh splits them, and train.

>>> import meshpar as mp
>>> mesh = mp.mesh("data=4, model=2")
>>> layout = mp.Layout("batch: data; heads, mlp, vocab: model; embed: data")
>>> step = mp.jit(train_step, mesh=mesh, layout=layout, dims={"batch/tokens": "batch seq"})

Errors are in ``mp.errors``, the classes that functions return in ``mp.types``.
"""

from typing import NoReturn

from . import errors, layouts, nd, replicas, types
from .api import calibrate, check, compile, init, jit, lab, local_sgd, plan, search, shardings
from .errors import JoinWarning, MeshparError
from .global_arrays import fetch
from .layers import checkpoint_policies
from .layers.accumulate import accumulate_gradients, microbatches_for
from .layers.attention import attention
from .layers.loss import cross_entropy
from .layers.loss_scale import LossScale, noise_scale
from .layers.low_bits import low_bits
from .layers.offload import offload
from .layers.precision import Precision
from .layout import Layout
from .mesh import mesh, virtual_devices
from .meter import Meter, MlLog
from .plan_api import Plan
from .pods.checkpoint import Checkpoints
from .pods.data import batches, put
from .pods.start import distributed
from .program.declare import kernel_rule
from .program.primitives import named, rename
from .quantization import dequantize, quantize

__version__ = "0.1.0"

__all__ = [
    "Checkpoints",
    "JoinWarning",
    "Layout",
    "LossScale",
    "MeshparError",
    "Meter",
    "MlLog",
    "Plan",
    "Precision",
    "accumulate_gradients",
    "attention",
    "batches",
    "calibrate",
    "check",
    "checkpoint_policies",
    "compile",
    "cross_entropy",
    "dequantize",
    "distributed",
    "errors",
    "fetch",
    "init",
    "jit",
    "kernel_rule",
    "lab",
    "layouts",
    "local_sgd",
    "low_bits",
    "mesh",
    "microbatches_for",
    "named",
    "nd",
    "noise_scale",
    "offload",
    "plan",
    "put",
    "quantize",
    "rename",
    "replicas",
    "search",
    "shardings",
    "types",
    "virtual_devices",
]


def __getattr__(name: str) -> NoReturn:
    """Raise the AttributeError for a name that is not public; it states where an error or a class of results is."""
    for module in ("errors", "types"):
        if name in globals()[module].__all__:
            raise AttributeError(f"`mp.{name}` is `mp.{module}.{name}`", name=name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
