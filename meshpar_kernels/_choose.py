"""Choice among the implementations of one op, and the reasons why the others cannot run."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
from jax import lax

from meshpar_kernels import _compat

VARIABLE = "MESHPAR_KERNELS"
"""Environment variable: "pallas" or "reference", see `dispatch`. It is read when a program is traced."""

_INSTEAD_OF_RAGGED_DOT = {
    "cuda": "on an H200 it takes 0.04 to 0.94 times as long as lax.ragged_dot, torch and JAX's own kernels",
    "tpu": "lax.ragged_dot makes dense matmuls or copies of all weights; no device has timed the kernel yet",
}

DEFAULT_KERNELS: dict[str, dict[str, str]] = {
    "grouped_matmul": _INSTEAD_OF_RAGGED_DOT,
    "grouped_matmul_transpose": _INSTEAD_OF_RAGGED_DOT,
    "scaled_grouped_matmul": {"cuda": "on an H200 it takes 0.03 to 0.04 times as long as dequantization by XLA"},
}
"""Op → platform → why its Pallas kernel is the default there. A kernel is the default if a table measured on a device shows that it
is faster (`benchmarks/results/device.md`), or if the alternative is clearly broken."""

PLATFORM_OF = {"pallas_tpu": "tpu", "pallas_gpu": "cuda"}

VENDORS = {"cudnn": "cuda", "splash": "tpu"}
"""Libraries of the vendors → their platform. None selects them on their platform where they can run. cuDNN is widely measured;
splash attention has about half the cycles of XLA's loop by the compiler's schedules for v5e, v5p and v6e
(`benchmarks/attention_cycles.py`)."""


OUTLINE = jax.make_user_context(False)
"""If True, only shapes and FLOPs of the traced program are used. An op with implementations for several platforms, whose shapes and
FLOPs are equal, is then traced as one of them, a TPU's if it has one. It is part of JAX's trace-cache key."""


class Unsupported(tuple[str, ...]):
    """Reasons why an implementation cannot take these arguments, one sentence each; empty if it can."""


def dispatch(
    op: str,
    implementation: str | None,
    functions: Mapping[str, Callable[..., Any] | Unsupported],
    fallback: str,
    *args: Any,
) -> Any:
    """Call one of `functions` on `args`.

    - `"pallas_tpu"`, `"pallas_gpu"`, `"xla"`, `"reference"`: the function of this name.
    - `"pallas"`: the Pallas kernel of the platform that the program is lowered for.
    - `None`: with `MESHPAR_KERNELS=pallas` the Pallas kernel of that platform if it can take these arguments, else
    `fallback`; with `MESHPAR_KERNELS=reference` always `fallback`; without the variable the kernel only for the ops and
    platforms of `DEFAULT_KERNELS`. Each refusal of such a kernel is logged once, and that no device has timed it. A vendor
    library (`VENDORS`) precedes `fallback` on its platform, but not with `MESHPAR_KERNELS=reference`.

    The platform is the one that JAX lowers for, not the platform of the machine that traces: a program compiled on a
    CPU for a TPU topology gets the TPU kernel. Inside the TPU interpreter (`_compat.interpreting`) `"pallas"` means the
    TPU kernel, inside the GPU interpreter the GPU kernel.

    Args:
      functions: name → function, or the reasons why it cannot run.
      fallback: the name that None selects if it selects no kernel.

    Raises:
      ValueError: no implementation has this name, or the variable has an unknown value.
      NotImplementedError: the requested implementation cannot take these arguments; the message has every reason. Lowering
        raises it for a platform without the requested implementation.
    """
    usable = {
        name: _in_32_bits(f) if name in PLATFORM_OF or VENDORS.get(name) == "tpu" else f
        for name, f in functions.items()
        if not isinstance(f, Unsupported)
    }
    if implementation is not None and implementation in functions:
        if implementation not in usable:
            raise NotImplementedError(_refusal(op, functions, [implementation]))
        function, platform = usable[implementation], (PLATFORM_OF | VENDORS).get(implementation)
        if platform is None or _compat.interpreting() or _compat.interpreting_gpu():
            return function(*args)
        return _by_platform(args, {platform: function}, _elsewhere(op, implementation, {platform: function}, fallback))
    kernels = {PLATFORM_OF[name]: f for name, f in usable.items() if name in PLATFORM_OF}
    if implementation is None:
        vendors = {} if _reference_wanted() or OUTLINE.value else VENDORS  # their FLOPs are not declared
        taken = {vendors[name]: f for name, f in usable.items() if name in vendors}
        defaults = by_default(op)
        taken |= {platform: f for platform, f in kernels.items() if platform in defaults}
        platform = _compat.backend_platform()
        if platform in defaults:
            reasons = functions.get(next(name for name, of in PLATFORM_OF.items() if of == platform))
            if isinstance(reasons, Unsupported):
                _say_refused(op, tuple(reasons), fallback)
        return _by_platform(args, taken, usable[fallback])
    if implementation == "pallas":
        if _compat.interpreting() and "tpu" in kernels:
            return kernels["tpu"](*args)
        if _compat.interpreting_gpu() and "cuda" in kernels:
            return kernels["cuda"](*args)
        if not kernels:
            names = [name for name in functions if name in PLATFORM_OF]
            raise NotImplementedError(_refusal(op, functions, names))
        reasons = [
            f"{n}: {r}" for n, f in functions.items() if n in PLATFORM_OF and isinstance(f, Unsupported) for r in f
        ]
        return _by_platform(args, kernels, _elsewhere(op, implementation, kernels, fallback, reasons))
    names = ", ".join(repr(n) for n in (None, "pallas", *functions))
    raise ValueError(f"{op}: no implementation {implementation!r}; there are {names}")


def _elsewhere(
    op: str,
    implementation: str,
    functions: Mapping[str, Callable[..., Any]],
    fallback: str,
    reasons: Sequence[str] = (),
) -> Callable[..., Any]:
    """The function for the platforms without a kernel: lowering it raises NotImplementedError, which names the fix.

    Args:
      functions: platform → its kernel.
      reasons: why other platforms' kernels cannot run.
    """
    platforms = " and ".join(functions)
    message = (
        f"implementation={implementation!r} runs on {platforms}, and the program is lowered for PLATFORMS. Leave it out"
    )
    if fallback not in PLATFORM_OF:
        message += f", or pass {fallback!r}"
    if "tpu" in functions:
        message += "; jax.experimental.pallas.tpu.force_tpu_interpret_mode() runs the kernels of TPUs without a TPU"
    message += "".join(f"\n  - {reason}" for reason in reasons)
    first = next(iter(functions.values()))
    return functools.partial(_compat.refused, op, message, first)


def _in_32_bits(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A Pallas kernel traced without x64: Pallas indexes in 32 bits, but with x64 a Python integer in its body is an
    int64."""

    @functools.wraps(kernel)
    def run(*args: Any) -> Any:
        with jax.enable_x64(False):
            return kernel(*args)

    return run


def _by_platform(
    args: Sequence[Any], functions: Mapping[str, Callable[..., Any]], default: Callable[..., Any] | None = None
) -> Any:
    """The result of the function for the platform that the program is lowered for, else of the default."""
    if not functions or OUTLINE.value:
        function = functions.get("tpu") or default or next(iter(functions.values()))
        return function(*args)
    return lax.platform_dependent(*args, default=default, **functions)


def body(kernel: Callable[..., None]) -> Callable[..., None]:
    """The body of a Pallas kernel with a cost estimate; in an `OUTLINE`, where nothing reads the body, an empty one."""
    return _nothing if OUTLINE.value else kernel


def _nothing(*_: Any) -> None:
    pass


def _reference_wanted() -> bool:
    return os.environ.get(VARIABLE, "") == "reference"


def by_default(op: str) -> Set[str]:
    """The platforms on which `implementation=None` selects the Pallas kernel of this op.

    Raises:
      ValueError: an unknown value of the variable.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "pallas", "reference"):
        raise ValueError(f"{VARIABLE}={wanted!r}: it may be 'pallas' or 'reference', or not set")
    if wanted:
        return set(PLATFORM_OF.values()) if wanted == "pallas" else set()
    defaults = DEFAULT_KERNELS.get(op, {})
    if _compat.backend_platform() == "tpu" and "tpu" in defaults:
        _say_once(op)
    return defaults.keys()


@functools.cache
def _say_once(op: str) -> None:
    text = "%s: the Pallas kernel is the default, since %s. %s=reference or implementation= takes another"
    logging.getLogger(__name__).warning(text, op, DEFAULT_KERNELS[op]["tpu"], VARIABLE)


@functools.cache
def _say_refused(op: str, reasons: tuple[str, ...], fallback: str) -> None:
    text = "%s: the Pallas kernel cannot run these arguments, and %r runs instead: %s"
    logging.getLogger(__name__).warning(text, op, fallback, "; ".join(reasons))


def _refusal(op: str, functions: Mapping[str, Callable[..., Any] | Unsupported], names: Sequence[str]) -> str:
    """The message of the error that none of the implementations `names` can run: every reason, and the implementations
    that can."""
    lines = [f"{op}: {' / '.join(names) or 'pallas'} cannot run here:"]
    for name in names:
        reasons = functions[name]
        if isinstance(reasons, Unsupported):
            lines += [f"  - {name}: {reason}" for reason in reasons]
    usable = [n for n, f in functions.items() if not isinstance(f, Unsupported)]
    lines.append(f"  These can: {', '.join(usable)} (implementation=...).")
    return "\n".join(lines)


def devices_on(op: str, operands: str, axes: str | Sequence[str]) -> int:
    """Number of devices on these mesh axes of the surrounding `shard_map`.

    Raises:
      ValueError: an axis is not bound; with the `shard_map` to write, a function of these operands.
    """
    name = axes if isinstance(axes, str) else tuple(axes)
    try:
        return lax.axis_size(name)
    except NameError as e:
        raise ValueError(
            f"{op}: no mesh axis {name!r} is bound: the function works on the arrays of one device. Call it inside shard_map:\n"
            f"  jax.shard_map(lambda {operands}: {op}({operands}, axis_name={name!r}), mesh=mesh, in_specs=..., out_specs=...)"
        ) from e


def refuse_sharded(op: str, **operands: Any) -> None:
    """Raise if an operand is visibly sharded outside of `shard_map`: a kernel sees one device's
    arrays.

    Raises:
      ValueError: with the `shard_map` to write.
    """
    for name, x in operands.items():
        axes = None if x is None else _compat.sharded_axes(x)
        if x is not None and axes is not None:
            spec = ", ".join(repr(a) for a in axes)
            raise ValueError(
                f"{op}: {name}{list(x.shape)} is sharded over {spec}, and a kernel works on the "
                f"arrays of one device. Say what each device does:\n"
                f"  jax.shard_map(lambda {', '.join(operands)}: "
                f"{op}({', '.join(operands)}, ...),\n"
                f"                mesh=mesh, in_specs=(...P({spec}) for {name}...), out_specs=...)"
            )
