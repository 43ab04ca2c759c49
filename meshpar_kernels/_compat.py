"""The one place of this package that knows JAX versions (0.10.2 to 0.12).

Everything else imports from here what differs between them, or what is not public in all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
from jax import lax
from jax._src import config as _config
from jax.core import Tracer
from jax.experimental.pallas import tpu as pltpu

__all__ = [
    "interpreting",
    "out_struct",
    "race_detection",
    "same_varying",
    "sharded_axes",
    "varying_over",
]


def interpreting() -> bool:
    """Whether Pallas TPU kernels traced now run in the interpreter.

    True inside `race_detection` and inside JAX's own `pltpu.force_tpu_interpret_mode`. The value
    is part of JAX's trace-cache key, so a jitted function is traced anew on entering or leaving.
    """
    return bool(_config.pallas_tpu_interpret_mode_context_manager.value)


def _races_found() -> bool:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpret

    return bool(interpret.races is not None and interpret.races.races_found)


@contextlib.contextmanager
def race_detection(
    *, dma_execution_mode: Literal["eager", "on_wait"] = "on_wait", random_seed: int | None = None
) -> Iterator[None]:
    """Run the Pallas TPU kernels of the block in the interpreter, and raise if two accesses race.

    Up to jax 0.11 the interpreter only prints a race and remembers it; from 0.12 it raises. Both
    come out of this block as a `RuntimeError`. Block on the results inside it: what runs later is
    not looked at.

    Args:
      dma_execution_mode: `"on_wait"` runs each copy as late as its semaphore allows, `"eager"` at
        its start.
      random_seed: order of the simulated devices' steps, for kernels that talk to other devices.
    """
    pltpu.reset_tpu_interpret_mode_state()
    params = pltpu.InterpretParams(
        detect_races=True,
        dma_execution_mode=dma_execution_mode,
        random_seed=random_seed,
        uninitialized_memory="nan",
    )
    try:
        with pltpu.force_tpu_interpret_mode(params):
            yield
        if _races_found():
            raise RuntimeError("the TPU interpreter found a race between two memory accesses")
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def _varying(x: Any) -> frozenset[str]:
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)


def same_varying(*arrays: Any) -> tuple[Any, ...]:
    """Make every array vary over the mesh axes that any of them varies over (`shard_map`,
    `check_vma=True`).

    Outside of such a `shard_map` this is the identity. Its transpose sums over the axes that were
    added, so the gradient of a weight that is the same on all devices is summed as for any other
    op. `None` passes through.
    """
    axes = frozenset().union(*(_varying(a) for a in arrays if a is not None))
    if not axes:
        return arrays
    return tuple(
        a if a is None or not axes - _varying(a) else lax.pcast(a, tuple(sorted(axes - _varying(a))), to="varying")
        for a in arrays
    )


def varying_over(axes: Sequence[str], *arrays: Any) -> tuple[Any, ...]:
    """Make every array vary over these mesh axes of the surrounding `shard_map` (`check_vma=True`).

    Where types do not say over what arrays vary (`check_vma=False`) this is the identity.
    """
    checked = bool(_varying(lax.axis_index(axes[0])))
    if not checked:
        return arrays
    return tuple(
        a if not set(axes) - _varying(a) else lax.pcast(a, tuple(sorted(set(axes) - _varying(a))), to="varying")
        for a in arrays
    )


def out_struct(shape: Sequence[int], dtype: Any, *operands: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a kernel's result, varying over the mesh axes that its operands vary
    over."""
    for x in operands:
        if x is not None and _varying(x):
            return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)
    return jax.ShapeDtypeStruct(shape, dtype)


def sharded_axes(x: Any) -> tuple[Any, ...] | None:
    """Mesh axes over which `x` is visibly sharded outside of `shard_map`, one entry a dimension,
    or None.

    Visible are concrete arrays over several devices and, on a mesh with Explicit axes, traced
    ones. Under a plain `jit` on a mesh with Auto axes the sharding is not known while tracing;
    there JAX itself refuses to partition a Mosaic kernel.
    """
    sharding = getattr(jax.typeof(x), "sharding", None)
    spec = getattr(sharding, "spec", None)
    if spec is not None and any(entry is not None for entry in spec):
        return tuple(spec)
    concrete = isinstance(x, jax.Array) and not isinstance(x, Tracer)
    if concrete and not x.sharding.is_fully_replicated:
        return tuple(getattr(x.sharding, "spec", ("?",)))
    return None
