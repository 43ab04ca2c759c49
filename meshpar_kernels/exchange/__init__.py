"""Dense exchanges between devices: blocks to all devices, and an array to one."""

from meshpar_kernels.exchange.api import all_to_all as all_to_all
from meshpar_kernels.exchange.api import collective_permute as collective_permute
