"""Equal halo exchanges of one array are sent once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from ..plan.plan import Plan
from ..plan.steps import Body, Call, Run, Step, with_bodies


def merge_equal_sends(plan: Plan) -> Body:
    """The steps without the collectives of an op whose elements an earlier op of the same body has received.

    ``conv(x, a) + conv(x, b)`` with rows of ``x`` sharded exchanges rows once. The lowering does the same
    (:class:`rules.halo.Exchanged`); results of ops in a loop or branch are not used outside, nor the other way round.

    Example::

          every device of data=4 runs:
          x: float32[rows=16:data]
          a: float32[3]
          b: float32[2]
          %1 = conv_general_dilated x, a: float32[rows:data]
              sends 4 B per call: the last row of the device before
              sends 4 B per call: the first row of the device after
          %2 = conv_general_dilated x, b: float32[rows:data]
        -     sends 4 B per call: the first row of the device after
          %3 = add %1, %2: float32[rows:data]
          return %3
    """
    return plan.body if all(c.content is None for c in plan.body.sends) else _merged(plan.body, set())


def _merged(body: Body, received: set[Hashable]) -> Body:
    """A body without the collectives in ``received``, to which its others are added."""
    steps: list[Step] = []
    for step in body.steps:
        if isinstance(step, Run) and step.collectives:
            sent = []
            for c in step.collectives:
                key = None if c.content is None else (step.operands[c.content[0]], c.content[1], c.axes)
                if key is None or key not in received:
                    sent.append(c)
                    received.add(key)
            steps.append(step if len(sent) == len(step.collectives) else replace(step, collectives=tuple(sent)))
        else:
            bodies = tuple(_merged(b, received if isinstance(step, Call) else set()) for b in step.bodies)
            steps.append(with_bodies(step, bodies))
    return body.with_steps(steps)
