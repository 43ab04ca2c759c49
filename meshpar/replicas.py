"""Exchange between replicas of a model, as optax transformations of updates with a leading dim ``replica``.

The gradients of :func:`jax.vmap` over replicas have a dim ``replica``, which a layout shards over a slow axis
(``replica: slice``). A transformation of this module combines them; it is the first of an ``optax.chain``.
"""

from ._src.replicas import CodedState, GossipState, PowerSGDState, adasum, coded, gossip, mean, powersgd

__all__ = ["CodedState", "GossipState", "PowerSGDState", "adasum", "coded", "gossip", "mean", "powersgd"]
