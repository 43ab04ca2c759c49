"""Exchange between replicas of a model, as optax transformations of updates with a leading dim ``replica``.

The gradients of :func:`jax.vmap` over replicas have a dim ``replica``, which a layout shards over a slow axis
(``replica: slice``). A transformation of this package combines them; it is the first of an ``optax.chain``.

.. code-block:: text

    mean                      the weighted mean, and means of codes with error feedback
    codes                     int8, float8, signs, the largest elements
    powersgd, adasum, gossip  other ways to combine gradients or parameters
    trees                     checks and means of trees with a replica dim
"""

from .adasum import adasum
from .gossip import GossipState, gossip
from .mean import CodedState, coded, mean
from .powersgd import PowerSGDState, powersgd
