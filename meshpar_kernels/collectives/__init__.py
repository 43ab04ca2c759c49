"""Collectives over the axes of a torus: one table, several backends, one choice by cost."""

from meshpar_kernels.collectives.api import all_gather as all_gather
from meshpar_kernels.collectives.api import all_reduce as all_reduce
from meshpar_kernels.collectives.api import all_reduce_small as all_reduce_small
from meshpar_kernels.collectives.api import reduce_scatter as reduce_scatter
from meshpar_kernels.collectives.choose import Axis as Axis
from meshpar_kernels.collectives.choose import Choice as Choice
from meshpar_kernels.collectives.choose import choose as choose
from meshpar_kernels.collectives.native import scatter_in_order as scatter_in_order
