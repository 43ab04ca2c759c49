"""Layers as modules of Flax Linen."""

from .._src.layers.moe.linen import MoE

__all__ = ["MoE"]
