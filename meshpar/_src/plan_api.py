"""The public plan: a plan of :mod:`plan` with methods for its costs, reports and replanning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax.sharding import AbstractMesh, Mesh

from . import report
from .cost.caching import with_shared_results
from .cost.decoding import Decoding, decoding_of
from .cost.memory import Memory, memory_of
from .cost.time import Time, time_of
from .hardware.calibration import CalibrationLike, calibrations
from .hardware.compiler_options import OptionsLike, check_options
from .layout import Layout
from .mesh import MeshLike, planned_mesh
from .passes import replan
from .passes.lowering import AUTO
from .plan import plan as record
from .plan.text import plan_steps
from .units import mesh_text

if TYPE_CHECKING:
    from .runs import RunPlan
    from .verify.profile import PlanProfile
    from .verify.prove import Proof


class Plan(record.Plan, report.Document):
    """The plan of a program under a layout: what each device stores, sends and computes, and why. No devices are needed.

    ``print(plan)`` shows it as a table, ``plan.save("plan.html")`` as a page.

    Example:
      >>> plan = mp.plan(train_step, params, x, mesh=mesh, layout="batch: data", dims=dims)
      >>> for c in plan.collectives:
      ...     print(c.op, c.axes, c.dims, c.total_bytes)
      all-reduce ('data',)  6.0
      all-reduce ('data',) mlp embed 98304.0
      all-reduce ('data',) embed mlp 98304.0
      >>> plan.replan(layout="batch, embed: data").memory.peak < plan.memory.peak
      True
    """

    @classmethod
    def of(cls, plan: record.Plan) -> Plan:
        """The public form of a plan of the planner; it shares the cached results."""
        out = object.__new__(cls)
        vars(out).update(vars(plan))
        return out

    @property
    def memory(self) -> Memory:
        """Bytes on a device over a step: the peak, its line, by kind."""
        return memory_of(self)

    @property
    def time(self) -> Time | None:
        """Seconds of a step by kind; None if the chip is unknown."""
        return time_of(self)

    @property
    def seconds(self) -> float | None:
        """The estimate of a step's seconds (:attr:`cost.time.Time.seconds` says how); None: chip not known."""
        return None if self.time is None else self.time.seconds

    @property
    def decoding(self) -> Decoding | None:
        """Tokens per second, the limit of HBM and the largest batch, of a plan :meth:`with_tokens`; None for others."""
        return decoding_of(self)

    def with_tokens(self, dim: str) -> Plan:
        """This plan as the one of a step that generates one token of each sequence, such as a step of decoding.

        Reports and :attr:`decoding` then have the time per token compared with the limit of HBM, tokens per second, and the largest
        batch that fits.

        Args:
          dim: the dim of the sequences, ``"batch"``.

        Raises:
          UnknownDimError: no argument has the dim.

        Example:
          >>> step = lambda weights, x: x @ weights["up"]
          >>> plan = mp.plan(step, params, x, mesh="model=8", topology="v5e:2x4", layout="mlp: model", dims=dims)
          >>> plan.with_tokens("batch").decoding.sequences
          32
        """
        out = with_shared_results(self, request=replace(self.request, tokens=dim))
        decoding_of(out)  # raises UnknownDimError
        return out

    def replan(
        self,
        *,
        layout: Any = None,
        mesh: MeshLike | None = None,
        topology: str | None = None,
        strict: bool = False,
        lowering: str | None = None,
        overlap: str | None = None,
        options: OptionsLike | None = None,
        calibration: CalibrationLike = None,
    ) -> Plan:
        """The plan of the same program under another layout or on another mesh: nothing is traced or named again.

        Args:
          layout: as in :func:`meshpar.plan`; default: this plan's.
          mesh: a mesh, or text; default: this plan's.
          topology: the topology of ``mesh``, if it is abstract; default: this plan's; "": none.
          strict: as in :func:`meshpar.plan`; a strict plan stays strict.
          lowering, overlap, options, calibration: as in :func:`meshpar.plan`; default: the options of this plan. For a plan of
            ``lowering="jit"``, an overlap other than ``"off"`` means ``lowering="auto"``.

        Raises:
          UnknownAxisError, UnknownDimError, DivisibilityError, JoinError: as for any plan.
          MeshError: a mesh that does not fill the topology.
        """
        request = self.request
        topology = self.topology if topology is None and not isinstance(mesh, Mesh) else topology or None
        if lowering is None and request.lowering == "jit" and overlap not in (None, "off"):
            lowering = AUTO
        changes: dict[str, Any] = {
            "layout": None if layout is None else Layout(layout),
            "mesh": planned_mesh(mesh, topology) if isinstance(mesh, str | Mapping | AbstractMesh) else mesh,
            "lowering": lowering,
            "overlap": overlap,
            "options": None if options is None else check_options(options),
            "calibrations": None if calibration is None else calibrations(calibration),
        }
        changes = {name: value for name, value in changes.items() if value is not None}
        request = replace(request, topology=topology, strict=strict or request.strict, **changes)
        return Plan.of(replan(self, request))

    def to_json(self) -> str:
        """The plan as JSON: mesh, chip, calibration, layout, lowering, inputs, outputs, constants, collectives, arrivals,
        transfers, paths of donated arguments, memory, time, decoding, options, joins, notes, unnamed dims."""
        return report.plan_json(self)

    def show(self, pattern: str = "*") -> None:
        """Print how arguments are sharded: a grid of the shards of each, with the devices that store them.

        Devices are numbered in the order of the mesh. Lines between shards have the colour of the axis that shards the dim.

        Args:
          pattern: of paths in the tree of arguments, ``"*/up"``, as in ``dims=``.

        Raises:
          PatternError: the pattern matches no argument.

        Example:
          >>> plan = mp.plan(train_step, params, x, mesh=mesh, layout="batch: data; mlp: model", dims=dims)
          >>> plan.show("*/up")
          params/up  float32[64, 256]  embed mlp:model
          2 shards of float32[64, 128] on 4 devices each, 32.0 KiB a device
                    mlp:model 2 × 128
                   ┌─────────┬─────────┐
          embed 64 │ 0 2 4 6 │ 1 3 5 7 │
                   └─────────┴─────────┘
        """
        print(report.shown_text(report.shards_renderable(self, pattern)))

    def steps_text(self) -> str:
        """The program that every device runs as text, a line for each step: results, operands, the axes of their dims, your line.

        The lines below a step list its collectives: bytes that a device sends per call, and the cause.
        """
        return plan_steps(self)

    @property
    def calibration(self) -> dict[str, Any] | None:
        """The calibration used: the devices it was measured on, and the fractions of peak rates; None: the chip table."""
        return report.calibration_rates(self)

    def diff(self, other: record.Plan) -> report.PlanDiff:
        """The two plans side by side: print it, ``save("diff.html")`` it."""
        return report.PlanDiff(self, other)

    def run_plan(
        self, tokens: float, *, topologies: Sequence[str] | None = None, mesh: str | None = None, **options: Any
    ) -> RunPlan:
        """Days, goodput and cost of a training run of this step under failures of chips, and the best save interval.

        A step takes the seconds of the plan. Failures are a Poisson process; each one returns the job to its last complete
        checkpoint. The save interval minimises Daly's (2006) expected time; ``trials`` simulated runs give the other numbers, as
        the 5th, 50th and 95th percentile.

        Args:
          tokens: of the run, or examples.
          topologies: topologies to compare, each with a plan of this program; default: the topology of this plan.
          mesh: the mesh on each topology, in which a size of -1 fills it; default: this plan's, the size of whose first axis is -1.
          step_tokens: tokens of a step; default: the number of elements of the largest argument of integers with a dim ``batch``.
          mtbf: mean time between failures of one chip: seconds, or text such as ``"40000h"``. Default ``"50000h"``.
          restart: from a failure until the job starts again; default ``"10m"``.
          compile_time: seconds or text, at each start; default ``"1m"``.
          save_time: for which a save blocks the job; default: of the copy to host memory, as :class:`meshpar.Checkpoints` copies.
          bandwidth: bytes/s of each chip to and from storage; default 1.2e8.
          price: chip → price of an hour, or a TOML or JSON file of it; None: no cost.
          trials: simulated runs for each topology; default 1000.

        Returns:
          A report: print it, show it in a notebook, ``save("run.html")`` it. It has the source of every default.

        Raises:
          UnsupportedError: an option that cannot be read; the chip or the tokens of a step are not known; a run that hardly
            progresses.
          MeshError: a mesh that does not fill a topology.

        Example:
          >>> plan = mp.plan(train_step, params, x, mesh="data=8", topology="v5e:2x4", layout="batch: data", dims=dims)
          >>> run = plan.run_plan(1e12, step_tokens=x.shape[0], mtbf="40000h")
          >>> run.best.save_every > 1
          True
        """
        from .runs import RunOptions, run_plan_of

        if topologies is None and mesh is None:
            return run_plan_of([self], tokens, RunOptions(**options))
        filled = mesh or mesh_text({axis: -1 if k == 0 else n for k, (axis, n) in enumerate(self.sizes.items())})
        plans = [self.replan(mesh=filled, topology=where) for where in topologies or [self.topology]]
        return run_plan_of(plans, tokens, RunOptions(**options))

    def compare(self, trace: str | Path) -> PlanProfile:
        """Planned and measured seconds side by side: of the step, of each loop, of each collective.

        In the compiled program and in traces of a step that was lowered to ``shard_map``, collectives have the names of the plan:
        ``all-gather embed mlp | embed: data``.

        Args:
          trace: a folder that ``jax.profiler.trace`` wrote while the step ran, or one of its ``.xplane.pb`` files.

        Returns:
          A report: print it, show it in a notebook, ``save("profile.html")`` it.

        Raises:
          UnsupportedError: there is no such trace, or it has no run of the step.

        Example:
          >>> with jax.profiler.trace("trace"):
          ...     jax.block_until_ready(step(params, x))
          >>> step.plan(params, x).compare("trace").runs
          1
        """
        from .verify.profile import profile

        return profile(self, trace)

    def prove(self) -> Proof:
        """Prove that the per-device program of the plan computes the function as it was written; see :func:`meshpar.prove`.

        Nothing runs and nothing is compiled.

        Returns:
          A :class:`meshpar.types.Proof`.

        Raises:
          UnsupportedError: a plan of ``lowering="jit"``, whose program XLA partitions.

        Example:
          >>> plan = mp.plan(train_step, params, x, mesh=mesh, layout="batch: data", dims=dims)
          >>> plan.prove().proven
          True
        """
        from .verify.proofs import prove_plan

        return prove_plan(self)

    def __repr__(self) -> str:
        return report.plan_line(self)

    def __rich__(self) -> Any:
        return report.plan_renderable(self)

    def save(self, path: str | Path) -> None:
        """Write the plan to a file: ``.html``, a page of its own (nothing from the network); ``.json``; ``.txt``;
        ``.perfetto.json``, the timeline of the step in the Chrome trace event format, for https://ui.perfetto.dev.

        The trace has a thread for each lane: compute, loops, ICI, DCN, copies to and from the host. Times are microseconds. The
        arguments of an event are its dims, axes, bytes, cause (the rule of a collective) and line.

        Raises:
          UnsupportedError: another suffix; a trace of a plan without a chip, which has no times.
        """
        super().save(path)

    def _writers(self) -> dict[str, Callable[[], str]]:
        return {".perfetto.json": lambda: report.trace_json(self), **super()._writers()}

    def _page(self) -> str:
        return report.plan_page(self)

    def _repr_html_(self) -> str:
        return report.plan_cell(self)
