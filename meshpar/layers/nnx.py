"""Layers as modules of Flax NNX."""

from .._src.layers.moe.nnx import MoE

__all__ = ["MoE"]
