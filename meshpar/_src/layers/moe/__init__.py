"""Mixtures of experts: routers, and a layer whose result no layout changes."""

from .layer import MoEAux as MoEAux
from .layer import MoEExecution as MoEExecution
from .layer import moe as moe
from .router_parts import Routing as Routing
from .routers import ROUTERS as ROUTERS
from .routers import update_bias as update_bias
