"""``mp.jit``, ``mp.plan``, ``mp.init``, ``mp.local_sgd``: a function, a mesh and a layout in, a sharded function or a plan out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import optax
from jax.sharding import Mesh

from .dims import DimsLike, PathDims, did_you_mean
from .errors import UnsupportedError
from .jitted import Jitted
from .layout import AnyMesh, Layout
from .lower import LOWERINGS
from .plan import Plan
from .plan.hardware import planned_mesh
from .plan.overlap import MODES
from .pods.local_sgd import LocalSgd

Lowering = Literal["jit", "shard_map"]
Mode = Literal["auto", "xla", "ring", "pallas", "off"]
LayoutLike = Layout | str | Mapping[str, Any] | Sequence[Any]
DimsPatterns = Mapping[str, DimsLike] | Iterable[tuple[str, DimsLike]] | PathDims | None


def jit(
    fn: Callable[..., Any] | None = None,
    *,
    mesh: AnyMesh,
    layout: LayoutLike,
    dims: DimsPatterns = None,
    lowering: Lowering = "jit",
    overlap: Mode | None = None,
    strict: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
) -> Any:
    """Compile a function so that it runs sharded, as the layout says; the layout never changes the result.

    Args:
      fn: an ordinary function of arrays, trees of arrays, and nnx modules or optimizers (updated in place, as
        ``nnx.jit`` does). Used as a decorator if left out.
      mesh: from :func:`meshpar.mesh`, or any ``jax.sharding.Mesh`` with Auto axes.
      layout: rules ``dim: axis``; a :class:`meshpar.Layout`, its text, or a Flax ``logical_axis_rules`` list.
      dims: tree-path patterns → dims, for what carries no Flax metadata: ``{"batch/tokens": "batch seq"}``.
      lowering: ``"jit"``: XLA partitions, held to the plan by sharding constraints. ``"shard_map"``: meshpar partitions, and
        what the plan lists is what is sent.
      overlap: of the ``"shard_map"`` lowering: how gathers before products, and reduce-scatters after them, are made. ``"ring"``:
        in blocks, each sent while another is multiplied; ``"xla"``, ``"off"``: by collectives of their own; ``"auto"`` (the
        default): whichever leaves less exposed by the plan's estimate, so ``"xla"`` where the chip is not known. The plan's
        ``overlaps`` have every decision, its reason and gain. ``"pallas"``: by one TPU kernel that sends while it multiplies,
        where it takes the pair (the reasons say why not), as ``"auto"`` elsewhere; never a default, since it was not timed.
      strict: two names for one dim of the program are an error instead of a warning.
      static_argnums, static_argnames, donate_argnums, donate_argnames, keep_unused, compiler_options: as in ``jax.jit``.

    Returns:
      A :class:`Jitted`: call it; ``.plan(*args)``, ``.check(*args)``, ``.lower(*args)``, ``.trace(*args)``. Arguments that lie
      elsewhere are brought into place.

    Raises:
      MeshparError: at the first call or plan; see :mod:`meshpar.errors`.
      UnsupportedError: a lowering or an ``overlap`` that does not exist, or one that the ``"jit"`` lowering leaves to XLA.
    """
    if overlap is not None and overlap not in MODES:
        raise UnsupportedError(f"there is no overlap {overlap!r}", fixes=did_you_mean(str(overlap), MODES, "modes"))
    if lowering == "jit" and overlap in ("ring", "pallas"):
        raise UnsupportedError(
            f'overlap={overlap!r} belongs to lowering="shard_map": in lowering="jit" XLA partitions, and overlaps as it likes',
            fixes=['add lowering="shard_map"', "or leave overlap out"],
        )
    if lowering not in LOWERINGS:
        raise UnsupportedError(
            f"there is no lowering {lowering!r}", fixes=did_you_mean(str(lowering), LOWERINGS, "lowerings")
        )
    if fn is None:
        return functools.partial(
            jit, mesh=mesh, layout=layout, dims=dims, lowering=lowering, overlap=overlap, strict=strict,
            static_argnums=static_argnums, static_argnames=static_argnames, donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            keep_unused=keep_unused, compiler_options=compiler_options,
        )  # fmt: skip
    return Jitted(
        fn, mesh, Layout(layout), _patterns(dims), lowering=lowering, strict=strict, static_argnums=static_argnums,
        static_argnames=static_argnames, donate_argnums=donate_argnums, donate_argnames=donate_argnames,
        keep_unused=keep_unused, compiler_options=compiler_options, overlap=None if lowering == "jit" else overlap,
    )  # fmt: skip


def _patterns(dims: DimsPatterns) -> PathDims:
    return dims if isinstance(dims, PathDims) else PathDims(dims)


def plan(
    fn: Callable[..., Any], *args: Any, mesh: AnyMesh | str, layout: LayoutLike, dims: DimsPatterns = None,
    topology: str | None = None, strict: bool = False, donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None, overlap: Mode = "off", **kwargs: Any,
) -> Plan:  # fmt: skip
    """What a layout makes each device hold and send, without devices and without compiling.

    Args:
      fn: a function, e.g. a train step.
      *args, **kwargs: its arguments; arrays or ``jax.ShapeDtypeStruct``.
      mesh: a mesh, a ``jax.sharding.AbstractMesh``, or text, ``"data=64, model=8"`` (-1 fills the topology).
      topology: what an abstract mesh lies on, for times: ``"v5p:8x8x8"``, ``"2x v5e:16x16"``, ``"4x h100:8"`` (nodes of GPUs).
        Neither devices nor a compiler are needed. A mesh over devices knows its own.
      layout, dims, strict: as in :func:`meshpar.jit`.
      donate_argnums, donate_argnames: arguments whose memory the results may take; as in ``jax.jit``.
      overlap: as in :func:`meshpar.jit`; ``"auto"`` is what its ``"shard_map"`` lowering does if it is left out there.

    Returns:
      A :class:`meshpar.Plan`: print it, or read ``inputs``, ``outputs``, ``collectives``, ``memory``, ``time``, ``notes``,
      ``joins``; ``replan(layout=…)`` plans the same program otherwise, without tracing it again.

    Raises:
      MeshError: a topology that is not known, that the mesh does not fill, or beside a mesh of devices.
    """
    return Jitted(
        fn, planned_mesh(mesh, topology), Layout(layout), _patterns(dims), strict=strict, donate_argnums=donate_argnums,
        donate_argnames=donate_argnames, topology=topology, overlap=overlap,
    ).plan(*args, **kwargs)  # fmt: skip


def init(
    create: Callable[..., Any], *, mesh: AnyMesh, layout: LayoutLike, dims: DimsPatterns = None, strict: bool = False
) -> Jitted:
    """Make parameters and optimizer state born sharded: no device ever holds them whole.

    Args:
      create: makes the state (``create(rng)``): trees of arrays, linen variables with metadata, nnx modules and optimizers.
      mesh, layout, strict: as in :func:`meshpar.jit`; rules for dims that the state does not have are left aside.
      dims: patterns over the tree paths of what ``create`` returns.

    Returns:
      A function with the arguments of ``create``, whose results are sharded as the layout says.
    """
    return Jitted(create, mesh, Layout(layout), _patterns(dims), strict=strict, init=True)


def local_sgd(
    step: Callable[..., Any], *, over: str, every: int, outer: optax.GradientTransformation, mesh: Mesh, layout: LayoutLike,
    dims: DimsPatterns = None, lowering: Lowering = "jit",
) -> LocalSgd:  # fmt: skip
    """Train replicas apart on each part of an axis, and average them every so many steps (DiLoCo).

    Args:
      step: ``state, … → state, anything``: a train step of plain trees, its weights under ``params``.
      over: the mesh axis of the replicas: the slow one, ``slice``. No rule of the layout may have it.
      every: inner steps between outer ones (DiLoCo: 500).
      outer: the outer optimizer; DiLoCo's is ``optax.sgd(0.7, momentum=0.9, nesterov=True)``.
      mesh, layout, dims, lowering: as in :func:`meshpar.jit`, for one replica; dims name the arguments of ``step``.

    Returns:
      :class:`LocalSgd`: ``state = run.init(create)(key)``; ``state, loss = run(n, state, batch)``.

    Raises:
      MeshError, AxisConflictError: the mesh lacks the axis, or the layout uses it.
    """
    return LocalSgd(
        step, over=over, every=every, outer=outer, mesh=mesh, layout=Layout(layout),
        dims=_patterns(dims), lowering=lowering, jit=jit, init=init,
    )  # fmt: skip
