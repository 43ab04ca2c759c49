"""Exported steps: the StableHLO of a lowered step with its layout, in a file that another process loads without the step's code."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...errors import MeshError, MeshparError, UnsupportedError
from ..dims import format_dims
from ..flax import flatten_named, variables
from ..iterables import grouped
from ..plan.plan import ShardedArray
from ..units import mesh_text
from .arguments import Call, is_static
from .compiled import CompiledStep

FORMAT = 1
"""Version of the file format."""


@dataclass(frozen=True, slots=True)
class ExportedArray:
    """An argument or result of an exported step.

    Attributes:
      path: in the tree of arguments, from the argument's name, or in the tree of results.
      dims: the names of its dims as text, ``_`` for one without a name.
      shape, dtype: of the global array.
      spec: the mesh axes of every dim.
    """

    path: str
    dims: str
    shape: tuple[int, ...]
    dtype: str
    spec: tuple[tuple[str, ...], ...]

    @property
    def partition_spec(self) -> PartitionSpec:
        """Its ``PartitionSpec``."""
        return PartitionSpec(*(axes or None for axes in self.spec))


@dataclass(eq=False)
class Exported:
    """A step as StableHLO, with the sharding of every argument and result by name.

    It is called with the arguments of the step, and runs on a mesh with the axes that it was exported for. Arguments may be any
    trees with the same paths. Results are dicts and tuples by their paths; of a step that updates nnx modules, a dict of the
    modules' new variables, with the result of the step as ``"result"``.

    Attributes:
      name: of the function.
      axes: axis → size, in the order of the mesh.
      layout, lowering: as text.
      platforms: that it was lowered for, ``("cpu",)``.
      arguments: the names of the positional arguments, in order.
      inputs, outputs: every array of the arguments and results.
      donated: the paths of the donated inputs.
      program: the ``jax.export.Exported``, a function of flat arguments.
      mesh: the devices that calls run on; None: calls are errors until :meth:`on` has given a mesh.
    """

    name: str
    axes: Mapping[str, int]
    layout: str
    lowering: str
    platforms: tuple[str, ...]
    arguments: tuple[str, ...]
    inputs: tuple[ExportedArray, ...]
    outputs: tuple[ExportedArray, ...]
    donated: tuple[str, ...]
    program: Any
    mesh: Mesh | None = None

    def on(self, mesh: Mesh) -> Exported:
        """The same step on the devices of another mesh.

        Raises:
          MeshError: other axes, or a platform that it was not exported for.
        """
        if dict(mesh.shape) != dict(self.axes) or tuple(mesh.axis_names) != tuple(self.axes):
            raise MeshError(
                f"{self.name} was exported for a mesh {mesh_text(self.axes)}, and this one is {mesh_text(mesh.shape)}",
                fixes=[f'mp.mesh("{mesh_text(self.axes)}")', "or export the step for this mesh"],
            )
        platform = mesh.devices.flat[0].platform
        if platform not in self.platforms:
            raise MeshError(
                f"{self.name} was exported for {', '.join(self.platforms)}, and the devices of this mesh are {platform}",
                fixes=["export it with platforms=[…]"],
            )
        return replace(self, mesh=mesh)

    def shardings(self) -> dict[str, NamedSharding]:
        """Path → sharding, of every input.

        Raises:
          MeshError: it has no mesh.
        """
        mesh = self._devices()
        return {x.path: NamedSharding(mesh, x.partition_spec) for x in self.inputs}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step. Arguments are resharded if they have another sharding.

        Raises:
          MeshError: it has no mesh.
          UnsupportedError: arguments whose paths, shapes or dtypes differ from the exported step's.
        """
        shardings = self.shardings()
        leaves = self._leaves(args, kwargs)
        placed = [jax.device_put(leaves[x.path], shardings[x.path]) for x in self.inputs]
        return _nested({x.path: y for x, y in zip(self.outputs, self._run(*placed), strict=True)})

    def save(self, path: str | Path) -> None:
        """Write it to a file, which :meth:`load` reads. Needs the extra ``export``."""
        Path(path).write_bytes(self.serialize())

    @classmethod
    def load(cls, source: str | Path | bytes, mesh: Mesh | None = None) -> Exported:
        """Load a step that :meth:`save` wrote. It needs neither the step's code nor the classes of its arguments.

        Args:
          source: a file, or its content.
          mesh: the devices to run on: a mesh with the axes that the step was exported for. Left out, the step cannot run.

        Raises:
          UnsupportedError: no exported step, a file that cannot be read, or the package ``flatbuffers`` is not installed.
          MeshError: a mesh of other axes, or on another platform.

        Example:
          >>> mp.jit(lambda x: x * 2, mesh=mesh, layout="batch: data", dims={"x": "batch embed"}).export(x).save("double.zip")
          >>> double = mp.types.Exported.load("double.zip", mesh)
          >>> bool((double(x) == 2 * x).all())
          True
        """
        name = "these bytes are" if isinstance(source, bytes) else f"{source} is"
        try:
            exported = _deserialize(source if isinstance(source, bytes) else Path(source).read_bytes())
        except OSError as error:
            raise UnsupportedError(
                f"{source} cannot be read: {error.strerror or error}",
                fixes=["the path of a file that `step.export(…).save(…)` wrote"],
            ) from error
        except MeshparError:
            raise
        except Exception as error:  # of zipfile, zlib, json, flatbuffers or JAX, each of which has its own
            raise UnsupportedError(
                f"{name} no exported step: {type(error).__name__}: {error}",
                fixes=["a file that `step.export(…).save(…)` wrote"],
            ) from error
        return exported if mesh is None else exported.on(mesh)

    def serialize(self) -> bytes:
        """The content of its file: a zip archive with ``step.json``, the attributes, and ``step.bin``, which ``jax.export`` reads.

        Raises:
          UnsupportedError: the package ``flatbuffers`` is not installed.
        """
        facts = {k: v for k, v in vars(self).items() if k not in ("program", "mesh", "_run")}
        facts.update(format=FORMAT, axes=dict(self.axes))
        facts.update({side: [asdict(x) for x in getattr(self, side)] for side in ("inputs", "outputs")})
        _check_flatbuffers()
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("step.json", json.dumps(facts, indent=1))
            archive.writestr("step.bin", bytes(self.program.serialize()))
        return out.getvalue()

    @cached_property
    def _run(self) -> Callable[..., Any]:
        """The program under ``jax.jit``, with the shardings of its arguments and results."""
        mesh = self._devices()
        ins, outs = ([NamedSharding(mesh, x.partition_spec) for x in side] for side in (self.inputs, self.outputs))
        donated = tuple(i for i, x in enumerate(self.inputs) if x.path in self.donated)
        return jax.jit(self.program.call, in_shardings=tuple(ins), out_shardings=outs, donate_argnums=donated)

    def _devices(self) -> Mesh:
        if self.mesh is None:
            raise MeshError(
                f"{self.name} has no devices to run on",
                fixes=[f'mp.types.Exported.load(…, mesh=mp.mesh("{mesh_text(self.axes)}"))'],
            )
        return self.mesh

    def _leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Path → array of a call's arguments.

        Raises:
          UnsupportedError: other paths, shapes or dtypes than the inputs of the step.
        """
        if len(args) > len(self.arguments):
            raise UnsupportedError(
                f"{self.name} takes {len(self.arguments)} positional arguments, and {len(args)} were given",
                fixes=[f"its arguments are {', '.join(self.arguments)}"],
            )
        named = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        leaves = {
            leaf.path: leaf.value
            for name, x in named.items()
            for leaf in flatten_named(variables(x), tuple(name.split("/")))
        }
        expected = {x.path for x in self.inputs}
        differences = {"missing": sorted(expected - leaves.keys()), "unknown": sorted(leaves.keys() - expected)}
        clauses = [f"{', '.join(of[:4])}{', …' * bool(of[4:])} {what}" for what, of in differences.items() if of]
        if clauses:
            raise UnsupportedError(
                f"{self.name}: the arguments do not have the paths of the exported step: {'; '.join(clauses)}",
                fixes=["`exported.inputs` lists the paths, shapes and dtypes"],
            )
        for x in self.inputs:
            shape, value = np.shape(leaves[x.path]), leaves[x.path]
            dtype = jax.dtypes.canonicalize_dtype(getattr(value, "dtype", None) or np.asarray(value).dtype)
            if (shape, str(dtype)) != (x.shape, x.dtype):
                text = f"the step was exported for {x.dtype}{list(x.shape)}, and this is {dtype}{list(shape)}"
                fixes = ["export the step for these shapes and dtypes"]
                raise UnsupportedError(f"{x.path}: {text}", path=x.path, shape=shape, fixes=fixes)
        return leaves


def export_step(
    compiled: CompiledStep,
    call: Call,
    name: str,
    arguments: Sequence[str],
    platforms: Sequence[str] | None,
    disabled_checks: Sequence[Any],
) -> Exported:
    """The export of a compiled step; see :meth:`jitted.Jitted.export`.

    Args:
      call: a call of the step.
      name: of the function; arguments: the names of its positional arguments.
    """
    plan = compiled.plan
    mesh = compiled.in_shardings[0].mesh if compiled.in_shardings else compiled.out_shardings[0].mesh
    assert isinstance(mesh, Mesh)
    platform = mesh.devices.flat[0].platform
    hosted = next((h.path for h in (*plan.inputs, *plan.outputs) if h.on_host), None)
    if hosted is not None:
        raise UnsupportedError(
            f"{hosted}: it is in host memory, which jax.export does not keep",
            path=hosted,
            fixes=["export a step whose arguments and results are in device memory"],
        )
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in compiled.traced.avals]
    how: Any = {"in_shardings": tuple(compiled.in_shardings), "out_shardings": list(compiled.out_shardings)}
    run = jax.jit(compiled.flat, **how, donate_argnums=compiled.donated, keep_unused=True)
    export = jax.export.export(run, platforms=list(platforms or [platform]), disabled_checks=list(disabled_checks))
    try:
        program = export(*avals)
    except NotImplementedError as error:
        raise UnsupportedError(
            f"{name} cannot be exported: {error}",
            fixes=["leave callbacks (jax.pure_callback, jax.debug.print) out of the step"],
        ) from error
    except ValueError as error:
        targets = sorted(set(re.findall(r'custom_call @?"?([\w.$-]+)', str(error))))
        if not targets:
            raise
        raise UnsupportedError(
            f"{name} cannot be exported: JAX guarantees no compatibility of its custom calls {', '.join(targets)}",
            fixes=[
                'another implementation of the kernel that makes this custom call, such as implementation="xla"',
                "or disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name)], if the same version loads it",
            ],
        ) from error
    paths, static = _result_paths(compiled, call.nodes, arguments), {k for k, _ in call.statics}
    return Exported(
        name=name,
        axes=dict(mesh.shape),
        layout=str(plan.requested_layout),
        lowering=plan.lowering,
        platforms=tuple(program.platforms),
        arguments=tuple(a for i, a in enumerate(arguments) if i not in static),
        inputs=tuple(_array(x, x.path) for x in plan.inputs),
        outputs=tuple(map(_array, plan.outputs, paths)),
        donated=tuple(plan.inputs[i].path for i in compiled.donated),
        program=program,
        mesh=mesh if platform in program.platforms else None,
    )


def _deserialize(content: bytes) -> Exported:
    """The step in the content of a file, without a mesh; raises errors of several packages if it is damaged."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        facts, program = json.loads(archive.read("step.json")), archive.read("step.bin")
    if facts.pop("format") != FORMAT:
        newer = "the step was exported by a newer version of meshpar"
        raise UnsupportedError(newer, fixes=["pip install --upgrade meshpar"])
    for side in ("inputs", "outputs"):
        arrays = ({**x, "shape": tuple(x["shape"]), "spec": tuple(map(tuple, x["spec"]))} for x in facts[side])
        facts[side] = tuple(ExportedArray(**x) for x in arrays)
    facts.update({k: tuple(facts[k]) for k in ("platforms", "arguments", "donated")})
    _check_flatbuffers()
    exported = Exported(**facts, program=jax.export.deserialize(bytearray(program)))
    program = exported.program
    for named, avals in ((exported.inputs, program.in_avals), (exported.outputs, program.out_avals)):
        if [(x.shape, x.dtype) for x in named] != [(a.shape, str(a.dtype)) for a in avals]:
            raise ValueError("step.json and step.bin have other arrays")
    return exported


def _array(x: ShardedArray, path: str) -> ExportedArray:
    return ExportedArray(path, format_dims(x.dims), tuple(x.shape), x.dtype, tuple(axes for _, axes in x.split))


def _result_paths(compiled: CompiledStep, nodes: bool, arguments: Sequence[str]) -> list[str]:
    """The paths of the flat results in the tree of results. Of a step with nnx modules, the new variables have the paths of the
    arguments, and the paths of its result begin with ``result``."""
    traced = compiled.traced
    tree = traced.result([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in compiled.plan.outputs])
    if nodes:
        args, kwargs, out = tree
        tree = {**dict(zip(arguments, args, strict=True)), **kwargs, "result": out}
        leaves = [leaf for name, x in tree.items() for leaf in flatten_named(x, (name,))]
    else:
        leaves = flatten_named(tree)
    return [leaf.path for leaf in leaves if not is_static(leaf.value)]


def _nested(leaves: Mapping[str, Any]) -> Any:
    """The tree with these leaves: dicts by the components of the paths, tuples where the components are 0, 1, …"""
    if set(leaves) == {""}:
        return leaves[""]
    split = ((*path.partition("/")[::2], x) for path, x in leaves.items())
    inner = {first: _nested(dict(of)) for first, of in grouped((first, (rest, x)) for first, rest, x in split).items()}
    return tuple(inner.values()) if list(inner) == [str(i) for i in range(len(inner))] else inner


def _check_flatbuffers() -> None:
    """Raise an UnsupportedError if ``flatbuffers`` is not installed, with which JAX reads and writes files."""
    if importlib.util.find_spec("flatbuffers") is None:
        raise UnsupportedError("jax.export needs flatbuffers for files", fixes=['pip install "meshpar[export]"'])
