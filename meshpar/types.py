"""Classes that meshpar functions return or accept, for annotations and ``isinstance``; they are not made by hand.

``mp.Layout``, ``mp.Plan``, ``mp.Precision`` and ``mp.Checkpoints`` are at the top level.
"""

from .cost.decoding import Decoding
from .exported import Exported, ExportedArray
from .hardware.calibration import Calibration
from .jitted import Jitted
from .lab import Lab
from .layers.loss_scale import NoiseScale
from .layout import Rule
from .measurement import CalibrationResult, CalibrationRow
from .plan.collectives import Collective
from .pods.local_sgd import LocalSgd
from .program.kernels import KernelSend, KernelWork
from .quantization import Quantized
from .report import PlanDiff
from .search import Row, Search
from .verify.aot import Compiled
from .verify.check import Report
from .verify.profile import Measured, PlanProfile

__all__ = [
    "Calibration",
    "CalibrationResult",
    "CalibrationRow",
    "Collective",
    "Compiled",
    "Decoding",
    "Exported",
    "ExportedArray",
    "Jitted",
    "KernelSend",
    "KernelWork",
    "Lab",
    "LocalSgd",
    "Measured",
    "NoiseScale",
    "PlanDiff",
    "PlanProfile",
    "Quantized",
    "Report",
    "Row",
    "Rule",
    "Search",
]
