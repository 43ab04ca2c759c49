"""The public functions that take a function, a mesh and a layout: ``mp.jit``, ``mp.plan``, ``mp.init``, ``mp.check``,
``mp.search``, …"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack, overload

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from ...errors import MeshError, UnknownDimError, UnsupportedError
from ..dims import Dims
from ..flax import Leaf, variables
from ..hardware.topology import topology_of
from ..keywords_and_flags import options_of, takes_options
from ..lab import Lab
from ..lab.session import Draft, Session
from ..layout import Layout
from ..measurement import CalibrationResult, Candidate
from ..measurement import calibrate as calibrate_candidates
from ..mesh import MeshLike, MeshSizes, auto_mesh, checked_mesh, context_mesh, device_mesh, planned_mesh
from ..mesh import mesh as make_mesh
from ..plan.checks import check_spelling
from ..plan_api import Plan
from ..program import Program
from ..program.names_as_path_patterns import patterns_of
from ..progress import Progress, progress_line
from ..search import Row, Search, SearchOptions
from ..search import search as search_from
from ..units import format_bytes, format_memory, format_seconds, mesh_text
from ..verify.aot import Compiled, Effort, compile_lowered, mesh_to_compile_for
from ..verify.check import Report, Subject, check_layouts, each_layout
from ..verify.prove import Proof, prove_program
from .arguments import is_static
from .jitted import NO_DONATION, Jitted, LayoutLike, P, R, with_devices
from .options import CallKeywords, DimsPatterns, Lowering, SearchCallKeywords, StepKeywords, StepOptions, path_dims
from .tracing import metadata_names, named_tree

Meshes = Mesh | MeshSizes | Sequence[Mesh | MeshSizes] | None


@overload
def jit(
    fn: Callable[P, R], *, mesh: MeshLike | None = None, layout: LayoutLike, **options: Unpack[StepKeywords]
) -> Jitted[P, R]: ...
@overload
def jit(
    fn: None = None, *, mesh: MeshLike | None = None, layout: LayoutLike, **options: Unpack[StepKeywords]
) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...
@takes_options(StepOptions)
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
        ``nnx.jit`` does). Left out: ``jit`` is a decorator, of methods as well, whose ``self`` is the first argument.
      mesh: from :func:`meshpar.mesh`, its axes and sizes (``"data=4, model=2"``, ``{"data": 4, "model": 2}``), or any
        ``jax.sharding.Mesh``; with Explicit axes, results are arrays of that mesh. Left out: the mesh of ``jax.set_mesh`` when
        ``jit`` is called.
      layout: rules ``dim: axis``; a :class:`meshpar.Layout`, its text, or a Flax ``logical_axis_rules`` list.
      dims: tree-path patterns → dims, in place of Flax metadata: ``{"batch/tokens": "batch seq"}``. ``"auto"``, the default where
        neither patterns nor metadata name a dim: names are inferred from the uses of each dim, see :func:`infer_dims`; with an
        entry ``"*": "auto"``, for the arrays that no other pattern matches. ``{}``: they are not.
      names: for a model that cannot be edited: a name in its metadata or constraints → the name that it has in this step; None: it
        has none. ``{"act_batch": "batch", "act_emb": None}``.
      lowering: ``"shard_map"``: meshpar partitions the program, which sends exactly the collectives of the plan. ``"jit"``: XLA
        partitions it, guided by sharding constraints from the plan, whose numbers are then estimates. ``"auto"``, the default:
        ``"shard_map"``, or ``"jit"`` if an op of the program has no local form (a warning and the plan then name the op and its
        line), or if the plan under ``"jit"`` is shorter by over 0.5 % (``plan.lowering_reason`` then has the seconds of both).
      overlap: collective-matmul mode of the ``"shard_map"`` lowering, for all-gather → matmul and matmul → reduce-scatter pairs.
        ``"ring"``: chunked, so that each chunk is sent while another is multiplied. ``"xla"``, ``"off"``: as separate collectives.
        ``"auto"``, the default under ``"shard_map"``: the one with less exposed communication by the plan's estimate;
        ``"xla"`` if the chip is unknown. ``"pallas"``: a TPU kernel that sends while it multiplies, for the pairs that it supports,
        else as ``"auto"``; opt-in, because it was not measured. The plan's ``overlaps`` list every decision, its reason and gain.
        ``"auto"`` and ``"pallas"`` also replace a reduce-scatter by an all-reduce and a local slice, which sends twice the bytes,
        where that is faster (``algorithm="all_reduce"`` of the collective, with the reason in ``why``).
      schedule: order of the work of a pipeline (a rule for the stacked dim of layers): ``"1f1b"``: the backward pass of a
        microbatch begins as soon as its loss is known; ``"gpipe"``: after the forward passes of all microbatches, whose activations
        are then all stored. ``"1f1b-overlap"``: the backward pass begins a tick later, and one loop runs a layer of it with a layer
        of the forward pass of another microbatch, so that the collectives of one overlap with the matmuls of the other.
        ``"zb"`` (zero bubble): as ``"1f1b"``, with the gradients of the layers' weights in slots of their own,
        in which no stage is idle; a device needs memory for the values of the backward pass that they read.
      gather: when a pipeline or another loop over microbatches (:func:`meshpar.train.accumulate_gradients`) all-gathers weights
        that are sharded along a dim that the activations have too (FSDP): ``"microbatch"``: where they are used, for each
        microbatch; the gradients of each microbatch are reduce-scattered. ``"step"``: once, before the first microbatch; the
        gradients are reduced once, after the last one. It sends less, and a device needs memory for the unsharded weights (of
        a pipeline: of its stage), in the dtype in which they are used, and for their gradients. ``"auto"``: the step is
        planned both ways, and the one that
        takes less time is used, of those that fit into the memory of the chip; where the chip is not known, the one that sends
        less. The default is ``"microbatch"`` in pipelines and ``"auto"`` elsewhere. Weights that a loop over layers slices are
        gathered in each microbatch. ``plan.pipeline.gather`` is the choice for a pipeline.
      strict: two names for one dim of the program are an error instead of a warning.
      static_argnums, static_argnames, donate_argnums, donate_argnames, keep_unused: as in ``jax.jit``.
      options: ``"auto"``: for TPUs, the compiler options of :mod:`hardware.compiler_options` for the chip and the collectives of
        the plan, without those that the installed compiler does not know; none within another ``jax.jit``, which refuses options.
        ``"off"`` or None: none. The path of a file that ``meshpar tune-options`` wrote for this program: those of ``"auto"``, and
        the file's; not for another chip, or with another version of libtpu. The plan's ``options`` list them, the reasons, and
        the ones left out.
      compiler_options: as in ``jax.jit``; they take precedence.
      calibration: the result of :func:`calibrate`, or the file it was saved to. ``.plan`` and ``overlap="auto"`` then use the
        measured efficiencies instead of the chip table's, and give estimates for devices that are not in the table (CPUs).

    Returns:
      A :class:`Jitted` with the signature of ``fn``: call it; ``.plan(*args)``, ``.check(*args)``, ``.lower(*args)``,
      ``.trace(*args)``, ``.compile(*args)``, ``.eval_shape(*args)``. Arguments with another sharding are resharded.

    Raises:
      UnsupportedError: ``fn`` is not a function; an unknown ``lowering`` or ``overlap``, or a combination that does not exist; a
        static or donated argument that the function does not have; a calibration that cannot be read.
      MeshError: a mesh that does not fit the local devices, or one with Manual axes.
      LayoutSyntaxError, AxisConflictError: a layout that cannot be read.
      MeshparError: other errors, at the first call or plan; see :mod:`meshpar.errors`.

    Example:
      >>> step = mp.jit(train_step, mesh=mesh, layout="batch: data; mlp: model", dims=dims)
      >>> new_params, loss = step(params, x)
      >>> tuple(new_params["up"].sharding.spec)
      (None, 'model')
    """
    if fn is None:
        return functools.partial(jit, mesh=mesh, layout=layout, **options)
    _check_function(fn, "jit")
    return Jitted(fn, device_mesh(mesh), Layout(layout), options_of(StepOptions, options))


@takes_options(StepOptions)
def plan(
    fn: Callable[..., Any],
    *args: Any,
    mesh: MeshLike | None = None,
    layout: LayoutLike,
    topology: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[CallKeywords],
) -> Plan:
    """The plan of a function under a layout: what each device stores, sends and computes. It needs no devices and compiles nothing.

    Args:
      fn: a function, e.g. a train step.
      *args: its arguments; arrays or ``jax.ShapeDtypeStruct``.
      **options: options as named below; other keywords are keyword arguments of ``fn``.
      kwargs: keyword arguments of ``fn`` with the name of an option of ``plan``. (If ``fn`` has an argument of that name, the bare
        keyword is an error unless the argument is given by position or ``kwargs`` is given.)
      mesh: a mesh, a ``jax.sharding.AbstractMesh``, or axes and sizes, ``"data=64, model=8"`` (-1 fills the topology). Left
        out: the mesh of ``jax.set_mesh`` or ``jax.sharding.use_abstract_mesh``.
      layout, dims, lowering, overlap, strict, options, …: as in :func:`meshpar.jit`, and with the same defaults.
      topology: the topology of an abstract mesh, for times: ``"v5p:8x8x8"``, ``"2x v5e:16x16"``, ``"4x h100:8"`` (nodes of GPUs).
        Neither devices nor a compiler are needed. A mesh of devices has its own topology.
      donate_argnums, donate_argnames: arguments whose memory the results may reuse; as in ``jax.jit``.
      calibration: as in :func:`meshpar.jit`; the plan names it. With a calibration of devices without topology text (CPUs), an
        abstract mesh without ``topology`` is a mesh of such devices.

    Returns:
      A :class:`meshpar.Plan`: print it, or read ``inputs``, ``outputs``, ``collectives``, ``memory``, ``time``, ``notes``,
      ``joins``; ``replan(layout=…)`` plans the same program otherwise, without tracing it again.

    Raises:
      MeshError: an unknown topology, a topology that the mesh does not fill, or a topology with a mesh of devices; a calibration of
        other devices.
      MeshparError: as :func:`meshpar.jit`; dims, sizes or rules that do not fit the arguments; see :mod:`meshpar.errors`.

    Example:
      >>> plan = mp.plan(train_step, params, x, mesh="data=64, model=8", topology="v5p:8x8x8", layout="mlp: model", dims=dims)
      >>> sorted({c.op for c in plan.collectives})
      ['all-reduce']
      >>> plan.memory.peak < plan.chip.hbm, plan.seconds > 0
      (True, True)
    """
    return _step_on("plan", fn, mesh, layout, topology, options).plan(*args, **(kwargs or {}))


@takes_options(StepOptions)
def init(
    create: Callable[P, R], *, mesh: MeshLike | None = None, layout: LayoutLike, **options: Unpack[StepKeywords]
) -> Jitted[P, R]:
    """Create parameters and optimizer state already sharded, so that no device allocates a full-size array.

    Args:
      create: returns the state (``create(rng)``): trees of arrays, linen variables with metadata, nnx modules and optimizers.
      mesh, layout, and the other options: as in :func:`meshpar.jit`; rules for dims that the state does not have are ignored.
      dims: patterns over the tree paths of what ``create`` returns. No names are inferred, as ``create`` does not use what it
        makes: without names or Flax metadata the state is replicated, with a ReplicatedWarning. :func:`infer_dims` of the
        step returns them.

    Returns:
      A function with the arguments of ``create``, whose results are sharded as the layout says.

    Raises:
      MeshparError: as :func:`meshpar.jit`.

    Example:
      >>> init = mp.init(create, mesh=mesh, layout="embed: data; mlp: model", dims=weights)
      >>> tuple(init(jax.random.key(0))["up"].sharding.spec)
      ('data', 'model')
      >>> init.abstract(jax.random.key(0))["up"].shape
      (64, 256)
    """
    _check_function(create, "init")
    return Jitted(create, device_mesh(mesh), Layout(layout), options_of(StepOptions, options), init=True)


def infer_dims(fn: Callable[..., Any], *args: Any, dims: Any = None, **keywords: Any) -> dict[str, str]:
    """Names for the dims of a step's arguments, from their uses in the step.

    The known schemes have the same names: ``batch``, ``seq``, ``vocab``, ``embed``, ``mlp``, ``heads``, ``kv_heads``,
    ``head_dim``, ``layers``, ``expert``, ``channels``, ``height``, ``width``, ``classes``, ``rank``. A step without ``dims=`` and
    without Flax metadata gets the same names, so this function is needed only to read or change them, and for the
    weights of :func:`meshpar.init`, which sees no use of them. A wrong name costs time, never a result.

    Args:
      fn: a function, e.g. a train step. It is traced, nothing is compiled.
      *args: its arguments; arrays or ``jax.ShapeDtypeStruct``.
      **keywords: its keyword arguments, and options of :func:`meshpar.jit`.
      dims: tree-path patterns → dims that are known, as in :func:`meshpar.jit`: these names win, and other dims are inferred.

    Returns:
      Tree-path patterns → dims, for ``dims=``: the shortest patterns that fit, ``dims`` first. Dims without evidence are ``_``.

    Example:
      >>> mp.infer_dims(train_step, params, x)
      {'*/down': 'mlp embed', '*/up': 'embed mlp', 'x': 'batch embed'}
    """
    patterns = _given(dims)
    return {**patterns, **patterns_of(named_program(fn, *args, dims=dims, **keywords))}


def _given(dims: Any) -> dict[str, Any]:
    """The patterns of ``dims=`` without ``"*": "auto"``."""
    pairs = () if dims is None or dims == "auto" else dims.items() if isinstance(dims, Mapping) else dims
    return {pattern: names for pattern, names in pairs if (pattern, names) != ("*", "auto")}


def named_program(fn: Callable[..., Any], *args: Any, dims: Any = None, **keywords: Any) -> Program:
    """The program of a step with inferred names for all dims that ``dims`` and metadata leave unnamed."""
    where = {"mesh": "data=1", "layout": "", "dims": [*_given(dims).items(), ("*", "auto")]}
    return plan(fn, *args, **where, **keywords).program.traced


def shardings(
    tree: Any,
    layout: LayoutLike,
    mesh: MeshLike | None = None,
    *,
    dims: DimsPatterns = None,
    names: Mapping[str, str | None] | None = None,
) -> Any:
    """The ``NamedSharding`` that a layout gives to every array of a tree: for the user's own ``jax.jit`` or ``jax.device_put``.

    The shardings are those with which :func:`init` returns the tree. Nothing is traced, so an array without a name of its own
    (Flax metadata, ``dims``) is replicated; optimizer state has the names of the parameters with the same path::

        state_shardings = mp.shardings(state, "embed: data; mlp: model", mesh, dims={"*/kernel": "embed mlp"})
        step = jax.jit(train_step, in_shardings=(state_shardings, None), out_shardings=(state_shardings, None))

    Args:
      tree: arrays or ``jax.ShapeDtypeStruct``, linen variables with metadata; of an nnx module, its ``nnx.state``.
      layout: as in :func:`jit`; rules for dims that the tree does not have are ignored, unless one is spelled nearly as a dim
        that it has.
      mesh: as in :func:`jit`, or an abstract mesh.
      dims: tree-path patterns → dims; paths are relative to the tree: ``{"params/up": "embed mlp"}``.
      names: other names for the names in the metadata, as in :func:`jit`.

    Returns:
      A tree like ``tree`` with a ``jax.sharding.NamedSharding`` for every array; None for a leaf that is no array.

    Raises:
      UnknownAxisError, DivisibilityError: a rule that does not fit the mesh or an array.
      PatternError, RankError: a pattern that matches no array, or one of another rank.
      UnknownDimError: no array has a named dim; a rule with a misspelled one.
      MeshError: no mesh, or one with Manual axes.

    Example:
      >>> placed = mp.shardings(params, "embed: data; mlp: model", mesh, dims=weights)
      >>> tuple(placed["up"].spec)
      ('data', 'model')
      >>> placed["up"].shard_shape((64, 256))
      (16, 128)
    """
    where, patterns = device_mesh(mesh), path_dims(dims, names)
    tree = variables(tree)
    named = named_tree(tree, patterns)
    rules = Layout(layout).with_axis_names(metadata_names((leaf for leaf, _ in named), patterns), where)
    check_spelling(rules, {name for _, names in named for name in names or () if name})
    if rules.rules and not any(names and any(names) for _, names in named) and any(np.ndim(x.value) for x, _ in named):
        raise UnknownDimError(
            "no array of the tree has a named dim",
            fixes=['name them by their tree paths: dims={"*/kernel": "embed mlp"}', "or by Flax metadata"],
        )

    def of(leaf: Leaf, names: Dims | None) -> NamedSharding | None:
        """The sharding of a leaf with these dim names (None: replicated); None for a leaf that is not an array."""
        if is_static(leaf.value):
            return None
        shape = np.shape(leaf.value)
        dims = names or (None,) * len(shape)
        return NamedSharding(where, rules.spec(dims, where, shape, scope=leaf.kind, path=leaf.path))

    return jax.tree.unflatten(jax.tree.structure(tree), [of(leaf, names) for leaf, names in named])


@takes_options(StepOptions)
def check(
    fn: Callable[..., Any],
    *args: Any,
    layout: Any = None,
    mesh: Meshes = None,
    lowerings: Sequence[Lowering] | None = None,
    tolerance: float = 1e-5,
    raises: bool = True,
    progress: Progress = "auto",
    kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[CallKeywords],
) -> Report:
    """Run a function under several layouts, meshes and lowerings, and compare all its results with the unsharded run on one device.

    This is a test, of these numbers on these devices; :func:`prove` proves a program without running it. The arguments are
    copied: the caller's are neither donated nor updated. State that the function updates in place (nnx modules, optimizers) is
    compared as well.

    Args:
      fn: a function as :func:`meshpar.jit` takes it, e.g. a train step, or a :class:`Jitted`.
      *args: its arguments: arrays, trees of arrays, random keys, nnx modules and optimizers.
      **options: options as named below; other keywords are keyword arguments of ``fn``.
      kwargs: keyword arguments of ``fn`` with the name of an option of ``check``.
      layout: a layout or several; each a :class:`meshpar.Layout`, its text, or a Flax rule list. The default for a ``Jitted`` is
        its own layout, and then its own mesh.
      mesh: a mesh or several; each a ``Mesh`` or text for :func:`meshpar.mesh`. The default: all n devices as 1×n, 2×n/2
        and 2×2×n/4 over the layout's axes in the order of its rules, with an idle axis for the remaining devices. Default
        meshes over which a size does not divide are skipped and reported.
      dims, static_argnums, …: as in :func:`meshpar.jit`; the default for a ``Jitted`` is its own option. Nothing is donated.
      lowerings: several lowerings, in place of ``lowering``; an ``overlap`` is used by those that take one.
      tolerance: the largest difference allowed, relative to the largest value of the leaf, for f32 and wider; larger for
        narrower floats by their precision, at most 16 ulps. Integers, booleans and keys must be equal, NaNs
        and infinities must have the same positions.
      raises: raise at the first difference; else record it in the report only.
      progress: ``"auto"``: one line with the elapsed time, in a terminal or a notebook only; True: elsewhere too, on stderr; False:
        none; or a function of its text.

    Returns:
      A :class:`meshpar.types.Report`: print it, or read ``ok`` and ``rows``.

    Raises:
      CheckError: a leaf differs by more than rounding (:mod:`verify.check` defines it): its path, the difference, and the
        first op with a wrong result.
      MeshError: fewer devices than a mesh needs; a ``Jitted`` for a mesh without devices.
      UnsupportedError: no layout, for a function that has none.
      DivisibilityError: a size that does not divide over a given mesh, or over any of the default meshes.

    Example:
      >>> report = mp.check(train_step, params, x, layout=["batch: data", "batch, embed: data"], mesh="data=8", dims=dims)
      >>> report.ok, len(report.rows)
      (True, 2)
    """
    _check_function(fn, "check")
    layout, mesh = _layout_and_mesh(fn, layout, mesh, "check")
    if lowerings is not None:
        options["lowering"] = lowerings[0] if len(lowerings) == 1 else "auto"
    step = _placeless(fn, {**options, **NO_DONATION})
    lowerings = tuple(lowerings or (step.lowering,))

    def subject(mesh: Mesh, layout: Layout, lowering: Lowering) -> contextlib.AbstractContextManager[Subject]:
        return step._with(mesh=auto_mesh(mesh), layout=layout, lowering=lowering)._check_subject(args, kwargs or {})

    with progress_line("checking", progress) as tell:
        return check_layouts(
            subject, layouts=layout, meshes=mesh, lowerings=lowerings, tolerance=tolerance, raises=raises, tell=tell
        )


@takes_options(StepOptions)
def prove(
    fn: Callable[..., Any],
    *args: Any,
    mesh: MeshLike | None = None,
    layout: LayoutLike | None = None,
    topology: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    program: Callable[..., Any] | None = None,
    **options: Unpack[CallKeywords],
) -> Proof:
    """Prove that the per-device program of a function computes the function as it was written, for these shapes on this mesh.

    It is a certificate for one program: :func:`check` runs a function and compares numbers, ``prove`` runs and compiles nothing. It
    relates every value on a device to a value of the function (a block, a part of a sum, a copy), equation by equation, by
    lemmas that know neither planner nor lowering. Shapes, meshes and models may have their real sizes.

    Args:
      fn: a function, e.g. a train step.
      *args: its arguments; arrays or ``jax.ShapeDtypeStruct``.
      **options: options as named below; other keywords are keyword arguments of ``fn``.
      mesh, layout, topology, kwargs, dims, …: as in :func:`plan`; a step of :func:`jit` is proven under its own layout and mesh.
      program: a program of the same arguments, with a ``jax.shard_map`` of your own inside, which is proven in place of meshpar's;
        it needs no layout.

    Returns:
      A :class:`meshpar.types.Proof`: print it, or read ``proven``, ``results``, ``failed``, ``assumptions``. A result is
      ``proven``, ``not verified`` (an op without a lemma, or an expression in another form), or ``refused`` (relations that
      contradict each other).

    Raises:
      UnsupportedError: ``lowering="jit"``: XLA partitions the program; a function without a layout.
      MeshparError: as :func:`plan`.

    Example:
      >>> proof = mp.prove(train_step, params, x, mesh="data=4, model=2", layout="batch: data; mlp: model", dims=dims)
      >>> proof.proven, proof.share
      (True, 1.0)
      >>> local = lambda x: jax.lax.psum(x.sum(), "data")
      >>> own = jax.shard_map(local, mesh=mp.mesh("data=8"), in_specs=jax.P("data"), out_specs=jax.P())
      >>> mp.prove(lambda x: x.sum(), jax.ShapeDtypeStruct((64,), "float32"), program=own).status
      'proven'
    """
    if program is not None:
        written, own = (jax.make_jaxpr(f)(*args, **(kwargs or {})) for f in (fn, program))
        return prove_program(written, own)
    return _step_on("prove", fn, mesh, layout, topology, options).plan(*args, **(kwargs or {})).prove()


@takes_options(StepOptions)
def compile(
    fn: Callable[..., Any],
    *args: Any,
    mesh: MeshLike | None = None,
    layout: LayoutLike | None = None,
    topology: str | None = None,
    effort: Effort = "fast",
    timeout: float | None = None,
    cache: bool = True,
    progress: Progress = "auto",
    kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[CallKeywords],
) -> Compiled:
    """Compile a function under a layout with the real compiler, ahead of time and without the hardware.

    The compiler runs in a separate process, so that a crash of it is an error of this function. ``MESHPAR_COMPILES`` processes run
    at once (default: one for every four cores). Results are cached by content in ``MESHPAR_CACHE``, by default in the user's
    cache folder; source lines are not part of the key, so that a cached result has the source lines of its first compilation.

    A program that JAX partitions without meshpar (a ``jax.stages.Lowered``; or, without ``layout``, the result of ``jax.jit``) is
    compiled as it is: its shardings determine the devices, and ``mesh`` only names the axes of its collectives.

    Args:
      fn: a function; a :class:`Jitted`, which has its own layout, dims, lowering, static and donated arguments; or a lowered
        program.
      *args: its arguments; arrays or ``jax.ShapeDtypeStruct``. A ``jax.stages.Lowered`` has none.
      **options: options as named below; other keywords are keyword arguments of ``fn``.
      kwargs: keyword arguments of ``fn`` with the name of an option of ``compile``.
      mesh: a mesh; or an abstract mesh, or axes and sizes (``"data=16, model=16"``), with ``topology``. Left out: the mesh of
        ``jax.set_mesh``.
      layout, dims, lowering, donate_argnames, …: as in :func:`meshpar.jit`; donated arguments reduce the peak memory.
      topology: ``"v5e:16x16"``, ``"v5p:8x8x8"``, ``"tpu7x:4x4x4"``, ``"2x v6e:16x16"``, ``"h200:8"``, ``"b200:8"``. Left out, the
        topology of the mesh. A mesh of CPU devices without ``topology`` is compiled for CPUs.
      effort: ``"fast"``, or ``"full"``: the compiler's default.
      timeout: seconds the compiler may take.
      cache: read and write the cache on disk.
      progress: ``"auto"``: one line with the elapsed time, in a terminal or a notebook only; True: elsewhere too, on stderr; False:
        none; or a function of its text.

    Returns:
      A :class:`meshpar.types.Compiled`.

    Raises:
      OutOfMemoryError: the program does not fit in memory; with the largest arrays, and the rules that would shard them.
      CompilerError: the compiler rejects the program, crashed, or took too long.
      MeshError: no mesh, an unknown topology, a mesh that does not fill it, a compiler that is not installed, or a calibration of
        other devices.

    Example:
      >>> compiled = mp.compile(train_step, params, x, mesh="data=8", layout="batch: data", dims=dims)
      >>> compiled.memory.peak > 0
      True
      >>> mp.compile(jax.jit(lambda x: x @ x.T), x).memory.peak > 0
      True
    """
    how: Any = {"effort": effort, "timeout": timeout, "cache": cache, "progress": progress}
    how.update(kwargs=kwargs, compiler_options=options.pop("compiler_options", None))
    if isinstance(fn, jax.stages.Lowered) or (layout is None and not isinstance(fn, Jitted) and hasattr(fn, "lower")):
        own = {"layout": layout, "topology": topology, **options}
        if given := [name for name, value in own.items() if value is not None]:
            raise UnsupportedError(
                f"{', '.join(given)}: a lowered program has its own layout and devices",
                fixes=["leave it out, or give the function itself and a layout"],
            )
        axes = None if mesh is None else auto_mesh(planned_mesh(mesh, None))
        return compile_lowered(fn, *args, name=getattr(fn, "__name__", None), mesh=axes, **how)
    _check_function(fn, "compile")
    if not isinstance(fn, Jitted):
        fn = _placeless(fn, options)._with(layout=_layout_of(fn, layout, "compile"))
        mesh, topology = auto_mesh(mesh_to_compile_for(mesh, topology)), None
    elif own := [k for k, v in {"layout": layout, **options}.items() if v != getattr(StepOptions, k, None)]:
        raise UnsupportedError(
            f"{', '.join(own)}: the result of mp.jit has its own",
            fixes=["leave it out, or step.on(layout=…, lowering=…) before, or give the function itself"],
        )
    return fn.compile(*args, mesh=mesh, topology=topology, **how)


@takes_options(StepOptions, SearchOptions)
def search(
    fn: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    *args: Any,
    topology: str | None = None,
    choices: Mapping[str, Sequence[Any]] | None = None,
    progress: Progress = "auto",
    kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[SearchCallKeywords],
) -> Search:
    """Search for the mesh and the layout with the shortest step on a topology, by the estimates of plans.

    The known schemes (``mp.layouts``) are planned on every mesh with as many axes as they need. A descent from the best of them
    then changes the rules of one dim at a time while that helps. Every candidate is planned exactly, as by :func:`meshpar.plan`;
    nothing is compiled unless ``verify`` is given. Candidates that exceed the memory are rejected. Without ``time_limit`` the
    result is deterministic. The seconds are estimates of plans, not measurements.

    For a step with a loop over layers inside of a loop over microbatches, layouts with stages are searched after the others, on
    meshes with a further axis ``stage``; ``stages`` of the result says whether they pay. For the best of them, every schedule,
    ``gather="step"`` and several rounds are planned as well: ``best.schedule`` and ``best.gather`` are the choice, text for
    :func:`meshpar.jit`. ``forbid="layers"`` leaves stages out.

    Args:
      fn: a function, e.g. a train step; or name → function, several with the same arguments, of which one is selected as well.
      *args: its arguments; arrays or ``jax.ShapeDtypeStruct``.
      **options: options as named below; other keywords are keyword arguments of ``fn``.
      kwargs: keyword arguments of ``fn`` with the name of an option of ``search``.
      topology: the slice, ``"v5e:16x16"``, as in :func:`meshpar.plan`.
      mesh: the only mesh to try, as text; default: all with at most ``max_axes`` axes, called ``data``, ``model``, ``third``, after
        ``slice`` where there are several slices. The result names each by the dims that it shards: ``data`` shards the batch;
        others are ``model``, ``expert``, ``context``, ``replica`` and ``idle``. Axes of ``mesh`` and of ``fixed`` keep their names.
      dims, lowering, donate_argnames, …: as in :func:`meshpar.jit`.
      fixed: rules that every layout begins with: ``"batch: data"``.
      forbid: dims that are never split: ``"head_dim, seq"``.
      objective: ``"time"``: the shortest step of those that fit; ``"memory"``: the smallest peak.
      memory_fraction: the largest peak of a plan, as a fraction of a device's memory.
      max_plans: the largest number of candidates that are planned. Of a program whose layers may be stages, two fifths of them (and
        of the time) are reserved for these candidates.
      time_limit: seconds after which no more plans are started.
      layouts: additional layouts to plan, on the meshes that have their axes.
      verify: number of best candidates to compile, as by :func:`meshpar.compile` (the first at full effort, which takes minutes for
        a large model). Candidates that the compiler rejects are skipped.
      choices: further options and their possible values: ``{"overlap": ["auto", "xla"], "microbatches": [1, 2, 4]}``.
        ``overlap`` is the option of the lowering; all others are static keyword arguments of ``fn``. Each combination of values
        is a program that is traced and searched; ``max_plans`` applies to each.
      progress: ``"auto"``: one line with the elapsed time, in a terminal or a notebook only; True: elsewhere too, on stderr; False:
        none; or a function of its text.

    Returns:
      :class:`meshpar.types.Search`: print it; ``best.mesh`` and ``best.layout`` are text for :func:`meshpar.jit`; ``rows``,
      ``front``, ``why(layout)``, ``plan()``, ``to_json()``. After an interrupt (Ctrl-C) it has the best candidate up to then. If no
      candidate fits, ``fits`` is False and ``best`` is the one that needs the least memory.

    Raises:
      MeshError: no topology, or an unknown one; a mesh that does not fill it; ``fixed`` names an axis that no mesh has; a
        calibration of other devices.
      UnknownDimError: ``fixed`` or ``forbid`` names a dim that the program does not have.
      UnsupportedError: options out of range; ``fixed`` splits a dim that ``forbid`` names.

    Example:
      >>> found = mp.search(train_step, params, x, topology="v5e:2x2", mesh="data=4", dims=dims, max_plans=10)
      >>> found.fits, found.best.mesh
      (True, 'data=4')
    """
    settings, step = options_of(SearchOptions, options), options_of(StepOptions, options)
    if topology is None:
        raise MeshError(
            "a search needs a chip, for its memory and for times: topology=… is missing",
            fixes=['topology="v5e:2x4": 8 chips (meshpar search --topology v5e:2x4); nothing runs on them'],
        )
    where, arguments = auto_mesh(planned_mesh(settings.mesh or "data=-1", topology)), kwargs or {}
    programs = {
        name: (Jitted(function, where, Layout(""), options, topology=topology), {**arguments, **chosen})
        for name, function, chosen, options in _variants(fn, choices or {}, step)
    }
    with progress_line(f"searching {topology}", progress) as report_progress:

        def compiled(row: Row, full_effort: bool) -> str:
            """Compile a candidate, and return one line with its memory, bytes sent and, at full effort, seconds of the
            schedule."""
            program, keywords = programs[row.variant]
            candidate = program._with(layout=Layout(row.layout), **row.stages)
            how: Any = {"effort": "full" if full_effort else "fast", "progress": report_progress, "kwargs": keywords}
            result = candidate.compile(*args, mesh=row.mesh, topology=topology, **how)
            seconds = result.exposed.schedule if result.exposed is not None and full_effort else None
            schedule = "" if seconds is None else f", {format_seconds(seconds)} by its schedule"
            return f"compiled: {format_memory(result.memory.peak)}, sends {format_bytes(result.bytes_sent)}{schedule}"

        bases = {name: program.plan(*args, **keywords) for name, (program, keywords) in programs.items()}
        return search_from(bases, topology, settings, compiled, report_progress)


@takes_options(StepOptions)
def calibrate(
    fn: Callable[..., Any],
    *args: Any,
    layout: Any = None,
    mesh: Meshes = None,
    rounds: int = 9,
    max_layouts: int = 4,
    tolerance: float = 1e-5,
    progress: Progress = "auto",
    kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[CallKeywords],
) -> CalibrationResult:
    """Measure a step under a few layouts on the attached devices, and fit the chip's efficiencies to the measurements.

    Every layout is planned, compiled and run once, and its results are compared with the first layout's. Then all layouts
    are timed alternately, ``rounds`` times. Fitted are the fractions of the peak rates that matmuls, memory traffic and
    links reach; plans use them through ``calibration=`` of :func:`plan`, :func:`jit` and :func:`search`. Devices
    that are not in the chip table (CPUs) have nominal peak rates.

    The arguments are copied: the caller's are neither donated nor updated. A run needs memory for one copy of them.

    Args:
      fn: a function, e.g. a train step, or a :class:`Jitted`, which has its own dims, donated and static arguments.
      *args: its arguments: arrays, trees of arrays, random keys, nnx modules and optimizers.
      **options: options as named below; other keywords are keyword arguments of ``fn``.
      kwargs: keyword arguments of ``fn`` with the name of an option of ``calibrate``.
      layout: several texts, :class:`Layout` and Flax rule lists, each measured on every mesh; pairs (mesh, layout); or the result
        of :func:`search`, whose best rows are measured. The default for a ``Jitted`` is its own layout, and then its own mesh.
      mesh: a mesh or several, as for :func:`check`. Not for pairs and searches, which have their own meshes. Default: one axis
        over all devices, for layouts with one axis.
      dims, lowering, donate_argnames, …: as in :func:`jit`; donated arguments are copied before every run, which is not timed.
      rounds: number of measurements of each layout.
      max_layouts: of a search, the largest number of rows to measure.
      tolerance: as in :func:`check`.
      progress: ``"auto"``: one line with the elapsed time, in a terminal or a notebook only; True: elsewhere too, on stderr; False:
        none; or a function of its text.

    Returns:
      :class:`meshpar.types.CalibrationResult`: print it; ``rows`` best first, ``best.mesh`` and ``best.layout`` are text for
      :func:`jit`;
      ``calibration.save("chip.json")``.

    Raises:
      CheckError: the results of two layouts differ by more than rounding: the path of the result.
      CompilerError: a layout does not compile, or does not fit in memory.
      MeshError: one device, or fewer than a mesh needs; no mesh where a layout has several axes.
      UnsupportedError: no layouts; options out of range; devices of several kinds.
      MeshparError: a layout that cannot be planned, before anything runs.

    Example:
      >>> layouts = ["batch: data", "embed: data"]
      >>> measured = mp.hardware.calibrate(train_step, params, x, layout=layouts, mesh="data=8", dims=dims, rounds=2)
      >>> sorted(row.layout for row in measured.rows)
      ['batch: data', 'embed: data']
      >>> measured.calibration.save("here.json")
    """
    _check_function(fn, "hardware.calibrate")
    step = _placeless(fn, options)
    pairs = _pairs(*_layout_and_mesh(fn, layout, mesh, "hardware.calibrate"), max_layouts)
    with contextlib.ExitStack() as stack:
        candidates = []
        report_progress = stack.enter_context(progress_line("calibrating", progress))
        for where, one in pairs:
            subject = stack.enter_context(step._with(mesh=where, layout=one)._check_subject(args, kwargs or {}))
            candidates.append(Candidate(str(one), subject))
        return calibrate_candidates(candidates, rounds=rounds, tolerance=tolerance, tell=report_progress)


def _layout_and_mesh(fn: Callable[..., Any], layout: Any, mesh: Meshes, api: str) -> tuple[Any, Meshes]:
    """The layouts and meshes that a function runs under; a ``Jitted`` has its own, where no layout is given.

    Raises:
      UnsupportedError: a function without a layout.
      MeshError: a ``Jitted`` for a mesh without devices.
    """
    if layout is None and mesh is None and isinstance(fn, Jitted):
        mesh = with_devices(fn.mesh, f"mp.{api} runs the step")
    return [_layout_of(fn, None, api)] if layout is None else layout, mesh


def _layout_of(fn: Callable[..., Any], layout: LayoutLike | None, api: str) -> Layout:
    """The given layout, or the layout of a ``Jitted``.

    Raises:
      UnsupportedError: neither.
    """
    if layout is not None:
        return Layout(layout)
    if isinstance(fn, Jitted):
        return fn.layout
    fix = f'mp.{api}(step, state, batch, mesh="data=8", layout="batch: data")'
    raise UnsupportedError(f"mp.{api} needs a layout", fixes=[fix])


def _placeless(fn: Callable[..., Any], options: Mapping[str, Any]) -> Jitted[..., Any]:
    """A step whose mesh and layout are to be replaced: of a function, with these options; of a ``Jitted``, with its own options,
    some of which these replace.

    Raises:
      UnsupportedError, LayoutSyntaxError: options that do not exist.
    """
    if isinstance(fn, Jitted):
        return fn._with(**options)
    return Jitted(fn, AbstractMesh((), ()), Layout(""), options_of(StepOptions, options))


def _step_on(
    api: str,
    fn: Callable[..., Any],
    mesh: MeshLike | None,
    layout: LayoutLike | None,
    topology: str | None,
    options: Mapping[str, Any],
) -> Jitted[..., Any]:
    """The step of a function, or of a ``Jitted``, whose mesh and layout are the default, to be planned on a mesh and a topology.

    Raises:
      UnsupportedError: no function, one without a layout, or options that do not exist.
      MeshError: as :func:`plan`.
    """
    _check_function(fn, api)
    step = _placeless(fn, options)._with(layout=_layout_of(fn, layout, api))
    if isinstance(fn, Jitted) and mesh is None and topology is None:
        return step
    return step._with(mesh=checked_mesh(planned_mesh(mesh, topology)), topology=topology)


def _pairs(layouts: Any, meshes: Any, max_layouts: int) -> list[tuple[Mesh, Layout]]:
    """(mesh, layout) of every measurement, without duplicates.

    Raises:
      MeshError: a layout has several axes, and there is no mesh.
    """
    if isinstance(layouts, Search):
        rows = [r for r in layouts.rows if r.fits and r.variant == layouts.best.variant][:max_layouts]
        layouts = [(r.mesh, r.layout) for r in rows]
    layouts = [layouts] if isinstance(layouts, str | Layout | Mapping) or _is_pair(layouts) else list(layouts)
    given = [meshes] if isinstance(meshes, Mesh | str | Mapping) else meshes
    if layouts and all(map(_is_pair, layouts)):
        if given is not None:
            raise MeshError("mesh= was given with layouts that have their own meshes", fixes=["leave it out"])
        pairs = [(where, Layout(one)) for where, one in layouts]
    else:
        pairs = [(where, one) for one in each_layout(layouts) for where in given or [_only_mesh(one)]]
    found: dict[tuple[Any, ...], tuple[Mesh, Layout]] = {}
    for where, one in pairs:
        made = with_devices(auto_mesh(device_mesh(where)), "layouts are measured on them")
        found.setdefault((tuple(made.shape.items()), str(one)), (made, one))
    return list(found.values())


def _only_mesh(layout: Layout) -> str:
    """The mesh of all devices along the axis of a layout with one axis.

    Raises:
      MeshError: the layout has several axes.
    """
    axes = list(layout.axes) or ["data"]
    if len(axes) > 1:
        raise MeshError(
            f"layout `{layout}` has the axes {', '.join(axes)}, and no mesh says their sizes",
            fixes=[f'mesh="{axes[0]}=…, {axes[1]}=…"', "or pairs: layout=[(mesh, layout), …]"],
        )
    return f"{axes[0]}={len(jax.devices())}"


def _is_pair(item: Any) -> bool:
    """Whether it is (mesh, layout): mesh text has an ``=``, as no name in a Flax rule list does."""
    first = item[0] if isinstance(item, tuple | list) and len(item) == 2 else None
    return isinstance(first, Mesh) or (isinstance(first, str) and "=" in first)


def _variants(
    fn: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    choices: Mapping[str, Sequence[Any]],
    options: StepOptions,
) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any], StepOptions]]:
    """(name, function, its own keyword arguments, options) of every function with every combination of choices: given choices
    ``{"remat": ["full", "none"]}`` for one function, the names are ``"remat=full"`` and ``"remat=none"``.

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
        chosen = dict(zip(choices, values, strict=True))
        name = ", ".join(filter(None, [function_name, *(f"{k}={v}" for k, v in chosen.items())]))
        changed = options.changed(overlap=chosen.pop("overlap", options.overlap))
        yield name, function, chosen, changed.with_static(chosen)


@takes_options(StepOptions)
def lab(
    fn: Callable[..., Any],
    *args: Any,
    mesh: MeshLike | None = None,
    topology: str | None = None,
    layout: LayoutLike | None = None,
    layouts: Mapping[str, str] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[CallKeywords],
) -> Lab:
    """An interactive page to edit layouts and meshes, with the numbers of the plan for each edit.

    Nothing runs or is compiled until the user asks for it. The numbers are the plan's estimates.

    Args:
      fn: a function, e.g. a train step.
      *args: its arguments; arrays or ``jax.ShapeDtypeStruct``.
      **options: options as named below; other keywords are keyword arguments of ``fn``.
      kwargs: keyword arguments of ``fn`` with the name of an option of ``lab``.
      mesh, topology: the initial ones, as in :func:`meshpar.plan`; default: one axis over the full topology.
      layout: the initial layout; default: FSDP, as far as the program has dims for it, until the page has planned the known
        layouts; then the best of these.
      layouts: name → more layouts that the page offers, in addition to ``mp.layouts``.
      dims, lowering, donate_argnames, …: as in :func:`meshpar.jit`.

    Returns:
      A :class:`meshpar.types.Lab`. A notebook shows it (with the extra ``lab``); ``serve()`` opens it in a browser; ``mesh``,
      ``layout`` and ``plan`` are those that the page shows.

    Raises:
      MeshError: neither a mesh nor a topology, an unknown topology, or a calibration of other devices.
      MeshparError: as :func:`meshpar.plan`, except errors of the layout, which the page shows.

    Example:
      >>> lab = mp.lab(train_step, params, x, mesh="data=4, model=2", layout="batch: data; mlp: model", dims=dims)
      >>> lab.mesh, str(lab.layout)
      ('data=4, model=2', 'batch: data; mlp: model')
    """
    _check_function(fn, "lab")
    if mesh is None:
        mesh = context_mesh() if topology is None else "data=-1"
    if isinstance(mesh, Mesh):
        topology = topology or topology_of(list(mesh.devices.flat))
    abstract = planned_mesh(mesh if isinstance(mesh, str | Mapping) else dict(mesh.shape), topology)
    where, step = mesh_text(abstract.shape), options_of(StepOptions, options)
    base = Jitted(fn, auto_mesh(abstract), Layout(""), step, topology=topology)
    planned = base.plan(*args, **(kwargs or {}))
    chooses = layout is None
    if layout is None:
        names = planned.program.all_names()
        layout = "; ".join(f"{dim}?: {abstract.axis_names[0]}" for dim in ("batch", "embed") if dim in names)

    def compiled(draft: Draft, tell: Callable[[str], None]) -> Compiled:
        """Compile a draft (mesh, topology and layout) with the real compiler; ``tell`` receives progress texts."""
        # without a topology: the devices of this process
        target = draft.mesh if draft.topology is not None else make_mesh(draft.mesh)
        drafted = base._with(layout=Layout(draft.layout), lowering=draft.lowering or step.lowering)
        return drafted.compile(*args, mesh=target, topology=draft.topology, progress=tell, kwargs=kwargs)

    name = getattr(fn, "__name__", "step")
    session = Session(
        planned,
        name=name if name.isidentifier() else "step",
        start=Draft(where, topology, layout if isinstance(layout, str) else str(Layout(layout))),
        layouts=layouts or {},
        compile=compiled,
    )
    session.chooses = chooses and topology is not None
    same = {"mesh": where, "topology": topology, "layout": "", "layouts": layouts, "kwargs": kwargs}
    session.renamed = lambda patterns: lab(fn, *args, **same, **{**options, "dims": patterns}).session
    return Lab(session)


# -- checks of arguments


def _check_function(fn: Any, name: str) -> None:
    """Raise UnsupportedError if ``fn`` is not a function, or is a ``Jitted`` where ``mp.<name>`` takes the function
    itself."""
    if isinstance(fn, Jitted) and name in ("jit", "init", "plan"):
        called = getattr(fn, "__name__", "step")
        raise UnsupportedError(
            f"mp.{name} takes a function, and {called} is a result of mp.jit",
            fixes=[
                f"{called}.plan(…)",
                f"{called}.on(mesh, layout=…) for another mesh or layout, or {called}.__wrapped__",
            ],
        )
    if not callable(fn):
        raise UnsupportedError(f"mp.{name} takes a function, not {fn!r}", fixes=[f"mp.{name}(step, mesh=…, layout=…)"])
