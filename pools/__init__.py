"""Pools: what pages are made of, and the shared memory that holds them.

Owns: PoolLayout (the geometry, derived from the tensors themselves) and SharedPool (memory that a worker shares with
its sidecar). Must not: move a page, talk to a socket, or import torch unless it was handed a torch tensor.
"""

from .layout import PoolLayout
from .shared import SharedPool

__all__ = ["PoolLayout", "SharedPool"]
