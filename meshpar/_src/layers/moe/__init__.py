"""Mixtures of experts: routers, and a layer whose result no layout changes. Each module uses only the ones below it:

.. code-block:: text

    nnx, linen       the layer as a module of Flax, with its weights
    layer            mp.layers.moe: routes, runs the experts, and adds shared ones
    experts          the experts' feed-forward network as one op: its factor rule, local form and collectives
    exchange_choice  how tokens meet the experts on a mesh: axes, strategy, size of the buffers
    routers          one function for each router, from logits to the choices of the tokens, and their losses
"""

from .layer import MoEAux as MoEAux
from .layer import MoEExecution as MoEExecution
from .layer import moe as moe
from .routers import ROUTERS as ROUTERS
from .routers import Routing as Routing
from .routers import update_bias as update_bias
