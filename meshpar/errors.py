"""Errors that name the tensor, the dim, the axis, the sizes, the rule, the user's line and the fix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class MeshparError(ValueError):
    """Base of all meshpar errors: a headline, then the facts, one a line, then the ways to fix it.

    The facts are also attributes (``None`` where one does not apply): ``path``, ``pattern``, ``shape``, ``dims``,
    ``dim``, ``axis``, ``rule``, ``source``, ``fixes``.
    """

    def __init__(
        self,
        headline: str,
        *,
        path: str | None = None,
        pattern: str | None = None,
        shape: Sequence[int] | None = None,
        dtype: object = None,
        dims: str | None = None,
        dim: str | None = None,
        axis: str | None = None,
        rule: str | None = None,
        source: str | None = None,
        fixes: Sequence[str] = (),
    ):
        """An error whose text is the headline, the facts that are given, and the fixes, each on a line; the arguments
        become attributes."""
        self.headline = headline
        self.path, self.pattern, self.dims, self.dim, self.axis = path, pattern, dims, dim, axis
        self.shape = None if shape is None else tuple(shape)
        self.rule, self.source, self.fixes = rule, source, tuple(fixes)
        sized = "" if self.shape is None else f"[{', '.join(map(str, self.shape))}]"
        tensor = f"{path or ''}  {dtype or ''}{sized}".strip()
        facts = [("tensor", tensor), ("pattern", pattern), ("dims", dims), ("rule", rule), ("at", source)]
        lines = [headline, *(f"  {k:<7} {v}" for k, v in facts if v)]
        for i, fix in enumerate(self.fixes):
            lines.append(f"  {'fix' if i == 0 else '':<7} {fix}")
        super().__init__("\n".join(lines))


class LayoutSyntaxError(MeshparError):
    """A layout, mesh or dims text that cannot be read."""


class UnknownDimError(MeshparError):
    """A rule, pattern or rename names a dim that no value has."""


class UnknownAxisError(MeshparError):
    """A rule names an axis that the mesh does not have."""


class DivisibilityError(MeshparError):
    """A named dim whose size is not a multiple of the axes that its rule gives it."""


class AxisConflictError(MeshparError):
    """One rule, or one explicit spec, asks for the same axis twice."""


class JoinError(MeshparError):
    """Two names for the same dim of the program, under ``strict=True``."""


class PatternError(MeshparError):
    """A ``dims=`` pattern that matches no tensor."""


class RankError(MeshparError):
    """Dims whose number is not the rank of the tensor."""


class MeshError(MeshparError):
    """A mesh that cannot be built from the devices there are."""


class UnsupportedError(MeshparError):
    """A program that the chosen lowering cannot handle."""


class CompilerError(MeshparError):
    """The compiler refused a program, crashed or took too long (raised by :func:`meshpar.compile`).

    Attributes:
      log: the end of the compiler's output.
    """

    log: str = ""


class OutOfMemoryError(CompilerError):
    """A compiled program needs more memory than a device has (raised by :func:`meshpar.compile`).

    Attributes:
      needed, capacity: bytes of a device; None where the compiler does not say.
    """

    needed: float | None = None
    capacity: float | None = None


class TargetError(MeshparError):
    """A target of the command line that cannot be found or called, or that returns something else."""


class CheckError(MeshparError):
    """A layout that changes a number (raised by :func:`meshpar.check`)."""


class AgreementError(MeshparError):
    """Processes that are to run one program differ in a fact of it.

    Attributes:
      process: the process that differs from the first one (or the one that never came).
      field: what differs: ``"layout"``, ``"shapes"``, ``"program"``, …
      values: process → its value, of both.
    """

    process: int | None = None
    field: str = ""
    values: Mapping[int, str] = {}


class LostProcessError(MeshparError):
    """A process that died, was stopped or cannot be reached (printed by those that end because of it; exit status 75)."""


class StuckProcessError(MeshparError):
    """A process that is alive but does not come to the call in which the others wait (printed; exit status 75)."""


class CheckpointError(MeshparError):
    """A checkpoint that is missing or damaged, or lacks an array that is to be restored."""


class DigestError(CheckpointError):
    """A restored array that is not the one that was saved, or an array whose copies on the devices differ."""


class DataPositionError(MeshparError):
    """A position in data that was read in another order, or in other batches."""


class CheckpointWarning(UserWarning):
    """A damaged checkpoint that was put aside for an older one."""


class JoinWarning(UserWarning):
    """Two names turned out to be the same dim of the program; listed once per plan."""


class IndivisibleWarning(UserWarning):
    """Axes do not divide a dim of intermediate values that a rule shards; once per plan that is made.

    This costs communication, or repeated FLOPs: for example, microbatches that have fewer rows than there are devices.
    """


class IdleDevicesWarning(UserWarning):
    """A mesh with fewer devices than there are accelerators, or processes' devices, though ``devices=`` was not given."""


class RepeatedWarning(UserWarning):
    """Much of a step is computed by several devices alike, along an axis that the layout gives to some dim; at the first call."""


class LoweringWarning(UserWarning):
    """``lowering="auto"`` is ``"jit"`` for a program, since an op of it has no local form; once per plan that is made."""


class ReplicatedWarning(UserWarning):
    """Values are replicated although the layout has rules for them; once per plan, or per step.

    It has five causes: none of the rules for an axis takes effect on the program; a rule does not divide an argument whose
    dim only a constraint of the model names; the weights that :func:`meshpar.init` creates have no names; the state of a call is
    sharded over fewer devices than the plan shards it over; a kernel has no factor rule.
    """


class ReshardedWarning(UserWarning):
    """Arguments that every call of a step reshards, since their arrays have another sharding or other devices; at the second call.

    ``jax.jit`` with shardings raises for such arrays.
    """


class TorusWarning(UserWarning):
    """A mesh axis for a ring collective matmul is not a ring of the slice's torus; once per plan, with the cost."""


__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    name for name, x in list(vars().items()) if isinstance(x, type) and issubclass(x, Exception)
]
