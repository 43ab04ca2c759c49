"""``mp.jit``, ``mp.plan``, ``mp.init``, ``mp.check``, ``mp.search``, ``mp.calibrate``, …: a function, a mesh and a layout in."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Unpack, overload

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from .arguments import is_static
from .compat import nnx
from .compat.jax import is_graph_node
from .dims import Dims
from .errors import MeshError, UnknownDimError, UnsupportedError
from .flax import Leaf
from .hardware.topology import device_count, topology_of
from .jitted import NO_DONATION, Jitted, LayoutLike, P, R
from .lab import Lab
from .lab.session import Draft, Session
from .layout import Layout
from .measurement import CalibrationResult, Candidate
from .measurement import calibrate as calibrate_candidates
from .mesh import MeshLike, MeshSizes, auto_mesh, context_mesh, device_mesh, mesh_text, parse_mesh, planned_mesh
from .mesh import mesh as make_mesh
from .options import (
    OPTIONS,
    CallKeywords,
    DimsPatterns,
    Lowering,
    StepKeywords,
    StepOptions,
    check_lowering,
    options_apart,
    path_dims,
    split_keywords,
    takes_step_options,
)
from .plan_api import Plan
from .pods.local_sgd import LocalSgd
from .search import Objective, Row, Search
from .search import search as search_from
from .tracing import named_tree
from .units import format_bytes, format_memory, format_seconds
from .verify.aot import Compiled, Effort, mesh_to_compile_for
from .verify.check import Report, check_layouts, each_layout
from .verify.jobs import Progress, progress_line

Meshes = Mesh | MeshSizes | Sequence[Mesh | MeshSizes] | None


@overload
def jit(
    fn: Callable[P, R], *, mesh: MeshLike | None = None, layout: LayoutLike, **options: Unpack[StepKeywords]
) -> Jitted[P, R]: ...
@overload
def jit(
    fn: None = None, *, mesh: MeshLike | None = None, layout: LayoutLike, **options: Unpack[StepKeywords]
) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...
@takes_step_options
def jit(
    fn: Callable[..., Any] | None = None,
    *,
    mesh: MeshLike | None = None,
    layout: LayoutLike,
    **options: Unpack[StepKeywords],
) -> Any:
    """Compile a function so that it runs sharded, as the layout says. Results do not depend on the layout, up to rounding.

    Args:
      fn: an ordinary function of arrays, trees of arrays, and nnx modules or optimizers (updated in place, as
        ``nnx.jit`` does). Used as a decorator if left out, of methods as well: ``self`` is the first of the arguments.
      mesh: from :func:`meshpar.mesh`, its axes and sizes (``"data=4, model=2"``, ``{"data": 4, "model": 2}``), or any
        ``jax.sharding.Mesh`` (Explicit axes are treated as Auto). Left out: the mesh of ``jax.set_mesh`` when ``jit`` is called.
      layout: rules ``dim: axis``; a :class:`meshpar.Layout`, its text, or a Flax ``logical_axis_rules`` list.
      dims: tree-path patterns → dims, for what carries no Flax metadata: ``{"batch/tokens": "batch seq"}``.
      lowering: ``"shard_map"``: meshpar partitions, and what the plan lists is what is sent. ``"jit"``: XLA partitions, guided by
        sharding constraints from the plan, whose figures are then estimates. ``"auto"``, the default: ``"shard_map"``, or
        ``"jit"`` where an op of the program has no local form; then a warning and the plan name the op and its line.
      overlap: collective-matmul mode of the ``"shard_map"`` lowering, for all-gather → matmul and matmul → reduce-scatter pairs.
        ``"ring"``: in blocks, each sent while another is multiplied. ``"xla"``, ``"off"``: by collectives of their own.
        ``"auto"``, the default under ``"shard_map"``: whichever leaves less communication exposed by the plan's estimate, so
        ``"xla"`` where the chip is not known. ``"pallas"``: by one TPU kernel that sends while it multiplies, where it takes the
        pair, as ``"auto"`` elsewhere; never a default, since it was not timed. The plan's ``overlaps`` have every decision, its
        reason and gain.
        ``"auto"`` and ``"pallas"`` also send a sum that ends split as a whole one, for twice the bytes, where that is shorter;
        each such collective says so (``algorithm="whole"``, ``why``). The others send the fewest bytes.
      strict: two names for one dim of the program are an error instead of a warning.
      static_argnums, static_argnames, donate_argnums, donate_argnames, keep_unused: as in ``jax.jit``.
      options: ``"auto"``: for TPUs, the options of their compiler that :mod:`meshpar.hardware.options` has for the chip and what
        the plan sends, as far as the compiler at hand knows them (within another ``jax.jit``, which refuses options, none).
        ``"off"`` or None: none. The plan's ``options`` say which, why, and what was left out.
      compiler_options: as in ``jax.jit``; they win.
      calibration: the result of :func:`calibrate`, or the file it was saved to. ``.plan`` and ``overlap="auto"`` then use the
        measured efficiencies instead of those of the chip table; devices that are not in the table (CPUs) get estimates too.

    Returns:
      A :class:`Jitted` with the signature of ``fn``: call it; ``.plan(*args)``, ``.check(*args)``, ``.lower(*args)``,
      ``.trace(*args)``, ``.compile(*args)``, ``.eval_shape(*args)``. Arguments that lie elsewhere are brought into place.

    Raises:
      UnsupportedError: no function; a lowering or an ``overlap`` that does not exist, or one that the ``"jit"`` lowering leaves
        to XLA; a static or donated argument that the function does not have; a calibration that cannot be read.
      MeshError: text that is no mesh of the devices here, or a mesh with Manual axes.
      LayoutSyntaxError, AxisConflictError: a layout that cannot be read.
      MeshparError: the rest at the first call or plan; see :mod:`meshpar.errors`.
    """
    if fn is None:
        return functools.partial(jit, mesh=mesh, layout=layout, **options)
    _check_function(fn, "jit")
    return Jitted(fn, device_mesh(mesh), Layout(layout), _step_options("jit", options))


@options_apart
@takes_step_options
def plan(
    fn: Callable[..., Any], *args: Any, mesh: MeshLike | None = None, layout: LayoutLike, topology: str | None = None,
    kwargs: Mapping[str, Any] | None = None, **keywords: Unpack[CallKeywords],
) -> Plan:  # fmt: skip
    """What a layout makes each device hold and send, without devices and without compiling.

    Args:
      fn: a function, e.g. a train step.
      *args: its arguments; arrays or ``jax.ShapeDtypeStruct``.
      **keywords: those by keyword.
      kwargs: more keyword arguments of ``fn``: those that are called as an option of ``plan`` is. (Where ``fn`` has an argument
        of that name, a bare keyword is refused unless the argument is given by position or ``kwargs`` is given.)
      mesh: a mesh, a ``jax.sharding.AbstractMesh``, or axes and sizes, ``"data=64, model=8"`` (-1 fills the topology). Left
        out: the mesh of ``jax.set_mesh`` or ``jax.sharding.use_abstract_mesh``.
      layout, dims, lowering, overlap, strict, options, …: as in :func:`meshpar.jit`, and with the same defaults.
      topology: what an abstract mesh lies on, for times: ``"v5p:8x8x8"``, ``"2x v5e:16x16"``, ``"4x h100:8"`` (nodes of GPUs).
        Neither devices nor a compiler are needed. A mesh over devices knows its own.
      donate_argnums, donate_argnames: arguments whose memory the results may take; as in ``jax.jit``.
      calibration: as in :func:`meshpar.jit`; the plan names it. With one of devices that have no topology text (CPUs), an abstract
        mesh without ``topology`` is one of these.

    Returns:
      A :class:`meshpar.Plan`: print it, or read ``inputs``, ``outputs``, ``collectives``, ``memory``, ``time``, ``notes``,
      ``joins``; ``replan(layout=…)`` plans the same program otherwise, without tracing it again.

    Raises:
      MeshError: a topology that is not known, that the mesh does not fill, or beside a mesh of devices; a calibration of other
        devices.
      MeshparError: as :func:`meshpar.jit`; and what does not fit the arguments; see :mod:`meshpar.errors`.
    """
    _check_function(fn, "plan")
    options, call = split_keywords(keywords, kwargs)
    where = auto_mesh(planned_mesh(mesh, topology))
    return Jitted(fn, where, Layout(layout), StepOptions(**options), topology=topology).plan(*args, **call)


@takes_step_options
def init(
    create: Callable[P, R], *, mesh: MeshLike | None = None, layout: LayoutLike, **options: Unpack[StepKeywords]
) -> Jitted[P, R]:
    """Make parameters and optimizer state born sharded: no device ever holds them whole.

    Args:
      create: makes the state (``create(rng)``): trees of arrays, linen variables with metadata, nnx modules and optimizers.
      mesh, layout, and the other options: as in :func:`meshpar.jit`; rules for dims that the state does not have are ignored.
      dims: patterns over the tree paths of what ``create`` returns.

    Returns:
      A function with the arguments of ``create``, whose results are sharded as the layout says.

    Raises:
      MeshparError: as :func:`meshpar.jit`.
    """
    _check_function(create, "init")
    return Jitted(create, device_mesh(mesh), Layout(layout), _step_options("init", options), init=True)


def shardings(tree: Any, layout: LayoutLike, mesh: MeshLike | None = None, *, dims: DimsPatterns = None) -> Any:
    """The ``NamedSharding`` that a layout gives to every array of a tree: for the user's own ``jax.jit`` or ``jax.device_put``.

    The shardings are those with which :func:`init` returns the tree. Nothing is traced, so an array without a name of its own
    (Flax metadata, ``dims``) is replicated; optimizer state has the names of the parameters with the same path.

        state_shardings = mp.shardings(state, "embed: data; mlp: model", mesh, dims={"*/kernel": "embed mlp"})
        step = jax.jit(train_step, in_shardings=(state_shardings, None), out_shardings=(state_shardings, None))

    Args:
      tree: arrays or ``jax.ShapeDtypeStruct``, linen variables with metadata; of an nnx module, its ``nnx.state``.
      layout: as in :func:`jit`; rules for dims that the tree does not have are ignored.
      mesh: as in :func:`jit`, or an abstract mesh.
      dims: tree-path patterns → dims; paths are relative to the tree: ``{"params/up": "embed mlp"}``.

    Returns:
      A tree like ``tree`` with a ``jax.sharding.NamedSharding`` for every array; None for a leaf that is no array.

    Raises:
      UnknownAxisError, DivisibilityError: a rule that does not fit the mesh or an array.
      PatternError, RankError: a pattern that matches no array, or one of another rank.
      UnknownDimError: no array has a named dim.
      MeshError: no mesh, or one with Manual axes.
    """
    rules, where = Layout(layout), device_mesh(mesh)
    tree = nnx.state(tree) if is_graph_node(tree) else tree
    named = named_tree(tree, path_dims(dims))
    if rules.rules and not any(names and any(names) for _, names in named) and any(np.ndim(x.value) for x, _ in named):
        raise UnknownDimError(
            "no array of the tree has a named dim",
            fixes=['name them by their tree paths: dims={"*/kernel": "embed mlp"}', "or by Flax metadata"],
        )

    def of(leaf: Leaf, names: Dims | None) -> NamedSharding | None:
        if is_static(leaf.value):
            return None
        shape = np.shape(leaf.value)
        dims = names or (None,) * len(shape)
        return NamedSharding(where, rules.spec(dims, where, shape, scope=leaf.kind, path=leaf.path))

    return jax.tree.unflatten(jax.tree.structure(tree), [of(leaf, names) for leaf, names in named])


@options_apart
@takes_step_options
def check(
    fn: Callable[..., Any],
    *args: Any,
    layouts: Any,
    mesh: Meshes = None,
    meshes: Meshes = None,
    lowerings: Sequence[Lowering] | None = None,
    tolerance: float = 1e-5,
    raises: bool = True,
    kwargs: Mapping[str, Any] | None = None,
    **keywords: Unpack[CallKeywords],
) -> Report:
    """Run a function sharded in every way asked for; compare every leaf of its results with the run on one device.

    The arguments are copied: nothing of the caller's is donated or updated. State that the function updates in place
    (nnx modules, optimizers) is compared as well.

    Args:
      fn: a function as :func:`meshpar.jit` takes it, e.g. a train step, or what ``mp.jit`` returned.
      *args: its arguments: arrays, trees of arrays, random keys, nnx modules and optimizers.
      **keywords: those by keyword.
      kwargs: more keyword arguments of ``fn``: those that are called as an option of ``check`` is.
      layouts: a layout or several; each a :class:`meshpar.Layout`, its text, or a Flax rule list.
      mesh: a mesh or several; each as ``mp.mesh`` makes it or as text for it. The default: all n devices as 1×n, 2×n/2
        and 2×2×n/4 over the layout's axes in the order of its rules, with an idle axis for the sizes that are left;
        those over which a size does not divide are skipped, and the report says so.
      meshes: the same as ``mesh``; one of the two is given.
      dims, static_argnums, …: as in :func:`meshpar.jit`; by default those of ``fn`` if ``mp.jit`` returned it. Nothing is donated.
      lowerings: several lowerings, in place of ``lowering``; an ``overlap`` is used by those that take one.
      tolerance: the largest difference allowed, as a part of the largest value of the leaf, for f32 and wider; narrower
        floats get more by their precision, at most 16 of their ulps. Integers, booleans and keys must be equal, NaNs
        and infinities at the same places.
      raises: raise at the first difference; else only note it in the report.

    Returns:
      A :class:`meshpar.types.Report`: print it, or read ``ok`` and ``rows``.

    Raises:
      CheckError: a leaf differs by more than rounding (:mod:`meshpar.verify.check` defines it): its path, by how much, the first op
        that goes wrong.
      MeshError: fewer devices than a mesh needs; both ``mesh`` and ``meshes``.
      DivisibilityError: a size that does not divide over a mesh that was given, or over each of the default ones.
    """
    _check_function(fn, "check")
    if mesh is not None and meshes is not None:
        raise MeshError("mp.check was given both mesh= and meshes=", fixes=["all meshes in one of them"])
    options, call = split_keywords(keywords, kwargs)
    overlap, lowering = options.pop("overlap", None), options.pop("lowering", None)
    lowerings = lowerings or (lowering or (fn.lowering if isinstance(fn, Jitted) else "auto"),)
    steps = _steps(fn, {**options, **NO_DONATION})

    def subject(m: Mesh, layout: Layout, lowering: Lowering) -> Any:
        mode = None if lowering == "jit" else overlap
        step = steps(mesh=auto_mesh(m), layout=layout, lowering=lowering, overlap=mode)
        return step._check_subject(args, call)

    for each in lowerings:
        check_lowering(each, overlap if len(lowerings) == 1 else None)
    return check_layouts(
        subject, layouts=layouts, meshes=meshes if mesh is None else mesh, lowerings=lowerings, tolerance=tolerance,
        raises=raises,
    )  # fmt: skip


@options_apart
@takes_step_options
def compile(
    fn: Callable[..., Any], *args: Any, mesh: MeshLike | None = None, layout: LayoutLike | None = None,
    topology: str | None = None, effort: Effort = "fast", timeout: float | None = None, cache: bool = True,
    progress: Progress = None, kwargs: Mapping[str, Any] | None = None, **keywords: Unpack[CallKeywords],
) -> Compiled:  # fmt: skip
    """Compile a function under a layout with the real compiler, ahead of time and without the hardware.

    The compiler runs in a process of its own, so that its crash is an error here; one at a time on a small machine
    (``MESHPAR_COMPILES`` at once, else one for every four cores). Results are kept by content in ``MESHPAR_CACHE``, else in the
    user's cache folder: source lines do not count as content, so that those of a cached result are of the first compilation.

    Args:
      fn: a function, or what :func:`meshpar.jit` returned (then layout, dims, lowering, static and donated arguments are its own).
      *args: its arguments; arrays or ``jax.ShapeDtypeStruct``.
      **keywords: those by keyword.
      kwargs: more keyword arguments of ``fn``: those that are called as an option of ``compile`` is.
      mesh: a mesh; or an abstract mesh, or axes and sizes (``"data=16, model=16"``), with ``topology``. Left out: the mesh of
        ``jax.set_mesh``.
      layout, dims, lowering, donate_argnames, …: as in :func:`meshpar.jit`; what is donated matters to the peak memory.
      topology: ``"v5e:16x16"``, ``"v5p:8x8x8"``, ``"tpu7x:4x4x4"``, ``"2x v6e:16x16"``, ``"h200:8"``, ``"b200:8"``. Left out, the
        mesh says it. A mesh of CPU devices without ``topology`` is compiled for CPUs.
      effort: ``"fast"``, or ``"full"``: the compiler's default.
      timeout: seconds the compiler may take.
      cache: whether to look on disk, and to write there.
      progress: a line on stderr; None: on a terminal only; or a function of its text.

    Returns:
      A :class:`Compiled`.

    Raises:
      OutOfMemoryError: it does not fit; with what is held, and the rules that would hold less.
      CompilerError: the compiler refuses, crashed, or took too long.
      MeshError: an unknown topology, a mesh that does not fill it, a compiler that is not installed, or a calibration of other
        devices.
    """
    _check_function(fn, "compile")
    options, call = split_keywords(keywords, kwargs)
    if not isinstance(fn, Jitted):
        if layout is None:
            raise UnsupportedError(
                "mp.compile needs a layout",
                fixes=['mp.compile(step, state, batch, mesh="data=16, model=16", topology="v5e:16x16", layout=…)'],
            )
        where = auto_mesh(mesh_to_compile_for(mesh, topology))
        fn = Jitted(fn, where, Layout(layout), StepOptions(**options))
        mesh = topology = None
    elif own := [
        *(["layout"] if layout is not None else []),
        *(k for k, v in options.items() if k != "compiler_options" and v != getattr(StepOptions, k, None)),
    ]:
        raise UnsupportedError(
            f"{', '.join(own)}: what mp.jit made of a function has its own",
            fixes=["leave it out, or step.on(layout=…, lowering=…) before, or give the function itself"],
        )
    return fn.compile(
        *args, mesh=mesh, topology=topology, effort=effort, timeout=timeout, cache=cache, progress=progress,
        compiler_options=options.get("compiler_options"), kwargs=call,
    )  # fmt: skip


@options_apart
@takes_step_options
def search(
    fn: Callable[..., Any] | Mapping[str, Callable[..., Any]], *args: Any, topology: str, mesh: MeshSizes | None = None,
    fixed: LayoutLike = "", forbid: str | Sequence[str] = (), objective: Objective = "time", memory_fraction: float = 0.85,
    max_axes: int = 3, max_plans: int = 400, time_limit: float | None = None, layouts: Iterable[LayoutLike] = (),
    verify: int = 0, choices: Mapping[str, Sequence[Any]] | None = None, progress: Progress = None,
    kwargs: Mapping[str, Any] | None = None, **keywords: Unpack[CallKeywords],
) -> Search:  # fmt: skip
    """The layout and the mesh with which a step takes the least time on a slice, as far as plans tell.

    The known schemes (``mp.layouts``) are planned on every mesh with as many axes as they take; from the best of them, rules are
    changed one dim after the other for as long as that helps. Every candidate is planned exactly, as :func:`meshpar.plan` does;
    nothing is compiled but with ``verify``. Memory that does not fit is refused. Without ``time_limit`` the result is
    deterministic. The seconds are the plan's estimates: what is found is a layout to try.

    Args:
      fn: a function, e.g. a train step; or several of the same arguments by name, of which one is chosen as well.
      *args: its arguments; arrays or ``jax.ShapeDtypeStruct``.
      **keywords: those by keyword.
      kwargs: more keyword arguments of ``fn``: those that are called as an option of ``search`` is.
      topology: the slice, ``"v5e:16x16"``, as in :func:`meshpar.plan`.
      mesh: the only mesh to try, as text; default: all with at most ``max_axes`` axes, called ``data``, ``model``, ``third``, after
        ``slice`` where there are several slices.
      dims, lowering, donate_argnames, …: as in :func:`meshpar.jit`.
      fixed: rules that every layout begins with: ``"batch: data"``.
      forbid: dims that are never split: ``"head_dim, seq"``.
      objective: ``"time"``: the shortest step of those that fit; ``"memory"``: the smallest peak.
      memory_fraction: the part of a device's memory that a plan's peak may take.
      max_plans: how many candidates are planned at most.
      time_limit: seconds after which no more plans are begun.
      layouts: of your own, planned beside the others on the meshes that have their axes.
      verify: how many of the best are compiled (as :func:`meshpar.compile`: the first at full effort, which takes minutes for a
        large model); one that the compiler refuses is passed over.
      choices: more options with the values to choose from: ``{"overlap": ["auto", "xla"], "microbatches": [1, 2, 4]}``.
        ``overlap`` is that of the lowering; every other one is a static keyword argument of ``fn``. Each combination of values
        is a program that is traced and searched; ``max_plans`` counts for each.
      progress: a line on stderr; None: on a terminal only; or a function of its text.

    Returns:
      :class:`meshpar.types.Search`: print it; ``best.mesh`` and ``best.layout`` are text for :func:`meshpar.jit`; ``rows``,
      ``front``, ``why(layout)``, ``plan()``, ``to_json()``. Interrupted (Ctrl-C) after its first plan, it has the best
      so far. Where nothing fits, ``fits`` is False and ``best`` is what needs the least memory.

    Raises:
      MeshError: a topology that is not known; a mesh that does not fill it; ``fixed`` names an axis that no mesh has; a
        calibration of other devices.
      UnknownDimError: ``fixed`` or ``forbid`` names a dim that the program does not have.
      UnsupportedError: options out of range; ``fixed`` splits a dim that ``forbid`` names.
    """
    if max_axes < 1:
        raise UnsupportedError(f"max_axes={max_axes!r}: a mesh has at least one", fixes=["max_axes=1, 2 or 3"])
    if time_limit is not None and not time_limit > 0:
        raise UnsupportedError(f"time_limit={time_limit!r}: a time limit is above 0", fixes=["leave it out for none"])
    options, call = split_keywords(keywords, kwargs)
    programs = dict(_variants(fn, choices or {}, StepOptions(**options)))
    mesh = mesh_text(parse_mesh(mesh)) if isinstance(mesh, Mapping) else mesh

    def compiled(row: Row, whole: bool) -> str:
        program = programs[row.variant]
        found = compile(
            program.fn, *args, mesh=row.mesh, topology=topology, layout=row.layout, effort="full" if whole else "fast",
            progress=progress, kwargs={**call, **program.keywords}, **vars(program.options),
        )  # fmt: skip
        schedule = (
            "" if found.exposed is None or not whole else f", {format_seconds(found.exposed.schedule)} by its schedule"
        )
        return f"compiled: {format_memory(found.memory.peak)}, sends {format_bytes(found.bytes_sent)}{schedule}"

    where = auto_mesh(planned_mesh(mesh or "data=-1", topology))
    with progress_line(f"searching {topology}", progress) as tell:
        bases = {
            name: Jitted(program.fn, where, Layout(""), program.options, topology=topology)
            .plan(*args, **{**call, **program.keywords})
            for name, program in programs.items()
        }  # fmt: skip
        return search_from(
            bases, topology, fixed=fixed, forbid=forbid, mesh=mesh, objective=objective,
            memory_fraction=memory_fraction, max_axes=max_axes, max_plans=max_plans, time_limit=time_limit,
            layouts=layouts, verify=verify, compiled=compiled, tell=tell,
        )  # fmt: skip


@options_apart
@takes_step_options
def calibrate(
    fn: Callable[..., Any], *args: Any, layouts: Any, mesh: Meshes = None, meshes: Meshes = None, rounds: int = 9,
    max_layouts: int = 4, tolerance: float = 1e-5, progress: Progress = None, kwargs: Mapping[str, Any] | None = None,
    **keywords: Unpack[CallKeywords],
) -> CalibrationResult:  # fmt: skip
    """Measure a step under a few layouts on the devices that are here, and fit the chip's efficiencies to what was measured.

    Every layout is planned, compiled and run once; its results are compared with those of the first, which they equal up to
    rounding. Then each is timed in turn, round after round. What is fitted is what plans are priced with (``calibration=`` of
    :func:`plan`, :func:`jit` and :func:`search`): the part of the peak rate that products, memory traffic and links reach. Devices
    that the chip table does not have, CPUs, have nominal peak rates.

    The arguments are copied: nothing of the caller's is donated or updated. A run takes one set of them beside the caller's.

    Args:
      fn: a function, e.g. a train step, or what :func:`jit` made of one (then dims, donated and static arguments are its own).
      *args: its arguments: arrays, trees of arrays, random keys, nnx modules and optimizers.
      **keywords: those by keyword.
      kwargs: more keyword arguments of ``fn``: those that are called as an option of ``calibrate`` is.
      layouts: texts, :class:`Layout` and Flax rule lists, each measured on every mesh; pairs (mesh, layout); or what
        :func:`search` returned, whose best rows are measured.
      mesh, meshes: one of the two: a mesh or several, as for :func:`check`. Not for pairs and searches, which have their own;
        default: one axis over all devices, for layouts that have one.
      dims, lowering, donate_argnames, …: as in :func:`jit`; donated arguments are copied before every run, outside of the measured
        time.
      rounds: how often each layout is measured.
      max_layouts: of a search, how many of its rows that fit.
      tolerance: as in :func:`check`.
      progress: a line on stderr; None: on a terminal only; or a function of its text.

    Returns:
      :class:`meshpar.types.CalibrationResult`: print it; ``rows`` best first, ``best.mesh`` and ``best.layout`` are text for
      :func:`jit`;
      ``calibration.save("chip.json")``.

    Raises:
      CheckError: two layouts give other numbers, and rounding does not explain it: the path of the result.
      CompilerError: a layout does not compile, or has no room to run.
      MeshError: one device, or fewer than a mesh needs; both ``mesh`` and ``meshes``; no mesh where a layout has several axes.
      UnsupportedError: no layouts; options out of range; devices of several kinds.
      MeshparError: a layout that cannot be planned, before anything runs.
    """
    _check_function(fn, "calibrate")
    if mesh is not None and meshes is not None:
        raise MeshError("mp.calibrate was given both mesh= and meshes=", fixes=["all meshes in one of them"])
    options, call = split_keywords(keywords, kwargs)
    steps = _steps(fn, options)
    pairs = list(_pairs(layouts, mesh if meshes is None else meshes, max_layouts))
    with contextlib.ExitStack() as stack:
        candidates = []
        tell = stack.enter_context(progress_line("calibrating", progress))
        for where, layout in pairs:
            subject = stack.enter_context(steps(mesh=where, layout=layout)._check_subject(args, call))
            candidates.append(Candidate(str(layout), subject))
        return calibrate_candidates(candidates, rounds=rounds, tolerance=tolerance, tell=tell)


def _steps(fn: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Jitted[..., Any]]:
    """Makes the step of a mesh, a layout and perhaps other options: given a function, with these options; given a ``Jitted``, with
    its own options, of which these replace some.

    Raises:
      UnsupportedError, LayoutSyntaxError: options that do not exist.
    """
    if isinstance(fn, Jitted):
        return functools.partial(fn._with, **options)
    base = StepOptions(**options)
    return lambda mesh, layout, **changed: Jitted(fn, mesh, layout, base.changed(**changed))


def _pairs(layouts: Any, meshes: Any, max_layouts: int) -> Iterator[tuple[Mesh, Layout]]:
    """(mesh, layout) of everything that is to be measured, each once.

    Raises:
      MeshError: a layout has several axes, and there is no mesh.
    """
    if isinstance(layouts, Search):
        rows = [r for r in layouts.rows if r.fits and r.variant == layouts.best.variant][:max_layouts]
        layouts = [(r.mesh, r.layout) for r in rows]
    single = isinstance(layouts, str | Layout | Mapping)
    items: list[Any] = [layouts] if single or _is_pair(layouts) else list(layouts)
    asked = None if meshes is None else [meshes] if isinstance(meshes, Mesh | str | Mapping) else list(meshes)
    found: dict[tuple[Any, ...], tuple[Mesh, Layout]] = {}

    def add(where: MeshLike, layout: Layout) -> None:
        made = device_mesh(where)
        if not isinstance(made, Mesh):
            raise MeshError("an abstract mesh has no devices to measure on", fixes=['mp.mesh("data=4, model=2")'])
        found.setdefault((tuple(made.shape.items()), str(layout)), (made, layout))

    for item in items if all(map(_is_pair, items)) else []:
        if asked is not None:
            raise MeshError("mesh= beside layouts that have their own meshes", fixes=["leave it out"])
        add(item[0], Layout(item[1]))
    for layout in [] if found or not items else each_layout(items if not single else items[0]):
        axes = list(dict.fromkeys(a for r in layout.rules for a in r.axes)) or ["data"]
        if asked is None and len(axes) > 1:
            raise MeshError(
                f"layout `{layout}` has the axes {', '.join(axes)}, and no mesh says their sizes",
                fixes=[f'mesh="{axes[0]}=…, {axes[1]}=…"', "or pairs: layouts=[(mesh, layout), …]"],
            )
        for where in asked if asked is not None else [f"{axes[0]}={len(jax.devices())}"]:
            add(where, layout)
    yield from found.values()


def _is_pair(item: Any) -> bool:
    """Whether it is (mesh, layout): mesh text has an ``=``, as no name in a Flax rule list does."""
    first = item[0] if isinstance(item, tuple | list) and len(item) == 2 else None
    return isinstance(first, Mesh) or (isinstance(first, str) and "=" in first)


class _Variant(NamedTuple):
    """A program of a search: a function, its own keyword arguments, and the options under which it is planned."""

    fn: Callable[..., Any]
    keywords: dict[str, Any]
    options: StepOptions


def _variants(
    fn: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    choices: Mapping[str, Sequence[Any]],
    options: StepOptions,
) -> Iterator[tuple[str, _Variant]]:
    """(name, program) of every function with every combination of choices: given choices ``{"remat": ["full", "none"]}`` for one
    function, the names ``"remat=full"`` and ``"remat=none"``.

    Raises:
      UnsupportedError: no function, choices that are no list, or an overlap that does not exist.
    """
    functions = dict(fn) if isinstance(fn, Mapping) else {"": fn}
    for function in functions.values():
        _check_function(function, "search")
    for name, values in choices.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise UnsupportedError(
                f"choices={{{name!r}: {values!r}}}: it is a list of values",
                fixes=[f"choices={{{name!r}: [{values!r}]}}"],
            )
    for (function_name, function), *values in itertools.product(functions.items(), *choices.values()):
        keywords = dict(zip(choices, values, strict=True))
        name = ", ".join(filter(None, [function_name, *(f"{k}={v}" for k, v in keywords.items())]))
        mode = keywords.pop("overlap", options.overlap)
        check_lowering(options.lowering, mode)
        yield name, _Variant(function, keywords, options.changed(overlap=mode).with_static(keywords))


@options_apart
@takes_step_options
def lab(
    fn: Callable[..., Any], *args: Any, mesh: MeshLike | None = None, topology: str | None = None,
    layout: LayoutLike | None = None, layouts: Mapping[str, str] | None = None, kwargs: Mapping[str, Any] | None = None,
    **keywords: Unpack[CallKeywords],
) -> Lab:  # fmt: skip
    """A page on which layouts and meshes are tried: rules are edited, figures of the plan follow.

    Nothing runs and nothing is compiled until the page is asked to. What is shown are the plan's estimates.

    Args:
      fn: a function, e.g. a train step.
      *args: its arguments; arrays or ``jax.ShapeDtypeStruct``.
      **keywords: those by keyword.
      kwargs: more keyword arguments of ``fn``: those that are called as an option of ``lab`` is.
      mesh, topology: where the page begins, as in :func:`meshpar.plan`; default: one axis over all of the topology.
      layout: with which it begins, read in order; default: FSDP, as far as the program has dims for it.
      layouts: name → more layouts that the page offers to begin with, beside ``mp.layouts``.
      dims, lowering, donate_argnames, …: as in :func:`meshpar.jit`.

    Returns:
      A :class:`meshpar.types.Lab`. A notebook shows it (with the extra ``lab``); ``serve()`` opens it in a browser; ``mesh``,
      ``layout`` and ``plan`` are those that the page shows.

    Raises:
      MeshError: neither a mesh nor a topology, a topology that is not known, or a calibration of other devices.
      MeshparError: as :func:`meshpar.plan`, but for what concerns the layout, which the page says.
    """
    _check_function(fn, "lab")
    if mesh is None and topology is None:
        try:
            mesh = context_mesh()
        except MeshError:
            raise MeshError("no machine is given", fixes=['topology="v5e:16x16"', 'mesh="data=4, model=2"']) from None
    if isinstance(mesh, Mesh):
        topology = topology or topology_of(list(mesh.devices.flat))
    if mesh is None:
        sizes = {"data": device_count(topology or "")}
    else:
        sizes = dict(planned_mesh(mesh if isinstance(mesh, str | Mapping) else dict(mesh.shape), topology).shape)
    where = mesh_text(sizes)
    options, call = split_keywords(keywords, kwargs)
    step = StepOptions(**options)
    base = Jitted(fn, auto_mesh(planned_mesh(where, topology)), Layout(""), step, topology=topology).plan(*args, **call)
    if layout is None:
        names = base.program.all_names()
        layout = "; ".join(f"{dim}?: {next(iter(sizes))}" for dim in ("batch", "embed") if dim in names)

    def compiled(draft: Draft, tell: Callable[[str], None]) -> Compiled:
        where = (
            draft.mesh if draft.topology is not None else make_mesh(draft.mesh)
        )  # without a topology: the devices here
        return compile(
            fn, *args, mesh=where, topology=draft.topology, layout=draft.layout, progress=tell, kwargs=call, **vars(step),
        )  # fmt: skip

    name = getattr(fn, "__name__", "step")
    return Lab(
        Session(
            base, name=name if name.isidentifier() else "step", start=Draft(where, topology, _layout_text(layout)),
            layouts=layouts or {}, compile=compiled,
        )
    )  # fmt: skip


def _layout_text(layout: LayoutLike) -> str:
    """What is shown of a layout: a text as it stands, which may have an error; comments are left to it."""
    return layout if isinstance(layout, str) else str(Layout(layout))


def local_sgd(
    step: Callable[..., Any], *, over: str, every: int, outer: optax.GradientTransformation, mesh: Mesh, layout: LayoutLike,
    dims: DimsPatterns = None, lowering: Lowering = "auto",
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
        dims=path_dims(dims), lowering=lowering, jit=jit, init=init,
    )  # fmt: skip


# -- what users hand in


def _check_function(fn: Any, name: str) -> None:
    if isinstance(fn, Jitted) and name in ("jit", "init", "plan"):
        called = getattr(fn, "__name__", "step")
        raise UnsupportedError(
            f"mp.{name} takes a function, and {called} is what mp.jit made of one",
            fixes=[
                f"{called}.plan(…)",
                f"{called}.on(mesh, layout=…) for another mesh or layout, or {called}.__wrapped__",
            ],
        )
    if not callable(fn):
        raise UnsupportedError(f"mp.{name} takes a function, not {fn!r}", fixes=[f"mp.{name}(step, mesh=…, layout=…)"])


def _step_options(api: str, options: Mapping[str, Any]) -> StepOptions:
    """The options of ``mp.jit`` or ``mp.init``.

    Raises:
      TypeError: a keyword that is no option.
      UnsupportedError, LayoutSyntaxError: a value that an option does not have.
    """
    for name in options:
        if name not in OPTIONS:
            raise TypeError(f"{api}() got an unexpected keyword argument {name!r}")
    return StepOptions(**options)
