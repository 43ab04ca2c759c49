"""Routing tokens to experts: `route` decides, `permute` copies rows to the experts, `combine` adds
them back."""

from meshpar_kernels.routing.api import combine as combine
from meshpar_kernels.routing.api import permute as permute
from meshpar_kernels.routing.api import route as route
from meshpar_kernels.routing.plan import RoutePlan as RoutePlan
