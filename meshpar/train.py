"""Functions of a train step: microbatches, precision, loss scales, 8-bit states, adapters, offloading, local SGD, recomputation."""

from ._src.entry.local_sgd import local_sgd
from ._src.layers import checkpoint_policies
from ._src.layers.accumulate import accumulate_gradients, microbatches_for
from ._src.layers.eight_bit_optimizer_state import MOMENTS, low_bits
from ._src.layers.loss_scale import LossScale, noise_scale
from ._src.layers.offload_moments import offload
from ._src.low_rank_adapters import lora
from ._src.precision import Precision

__all__ = [
    "MOMENTS",
    "LossScale",
    "Precision",
    "accumulate_gradients",
    "checkpoint_policies",
    "local_sgd",
    "lora",
    "low_bits",
    "microbatches_for",
    "noise_scale",
    "offload",
]
