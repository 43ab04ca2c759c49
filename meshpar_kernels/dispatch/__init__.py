"""Exchange of tokens with the devices of their experts, and the ragged all-to-all that it uses."""

from meshpar_kernels.dispatch.api import expert_combine as expert_combine
from meshpar_kernels.dispatch.api import expert_dispatch as expert_dispatch
from meshpar_kernels.dispatch.api import ragged_all_to_all as ragged_all_to_all
from meshpar_kernels.dispatch.plan import Dispatch as Dispatch
