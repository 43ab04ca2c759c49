"""Classes that meshpar functions return or accept, for annotations and ``isinstance``; they are not made by hand.

``mp.Layout``, ``mp.Plan`` and ``mp.Checkpoints`` are at the top level, ``Precision`` and ``LossScale`` in ``mp.train``.
"""

from ._src.cost.decoding import Decoding
from ._src.eight_bit_weights import Quantized
from ._src.entry.exported import Exported, ExportedArray
from ._src.entry.jitted import Jitted
from ._src.entry.local_sgd import LocalSgd
from ._src.hardware.calibration import Calibration
from ._src.lab import Lab
from ._src.layers.loss_scale import NoiseScale
from ._src.layout import Rule
from ._src.low_rank_adapters import Adapted, Adapter
from ._src.measurement import CalibrationResult, CalibrationRow
from ._src.moves.move import Move
from ._src.plan.collectives import Collective
from ._src.program.kernels import KernelSend, KernelWork
from ._src.report import PlanDiff
from ._src.runs import Goodput, RunPlan, RunRow
from ._src.search import Row, Search
from ._src.verify.aot import Compiled
from ._src.verify.check import Report
from ._src.verify.profile import Measured, PlanProfile
from ._src.verify.prove import Proof

__all__ = [
    "Adapted",
    "Adapter",
    "Calibration",
    "CalibrationResult",
    "CalibrationRow",
    "Collective",
    "Compiled",
    "Decoding",
    "Exported",
    "ExportedArray",
    "Goodput",
    "Jitted",
    "KernelSend",
    "KernelWork",
    "Lab",
    "LocalSgd",
    "Measured",
    "Move",
    "NoiseScale",
    "PlanDiff",
    "PlanProfile",
    "Proof",
    "Quantized",
    "Report",
    "Row",
    "Rule",
    "RunPlan",
    "RunRow",
    "Search",
]
