"""Moving the storage of CPU torch tensors into shared memory, under the tensors' feet.

Owns: the one place that touches a tensor's storage. Must not: allocate or own shared memory. Torch is imported inside
the functions: whoever calls them has brought it.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

from pdxfer.core.reasons import Refused

from .tensors import is_torch


def check_movable(tensor: Any, who: str) -> None:
    """Raise Refused('bad_layout') unless this is a plain CPU torch tensor."""
    if not is_torch(tensor):
        raise Refused(
            "bad_layout",
            f"{who}: a {type(tensor).__name__}, expected a torch tensor; for numpy use SharedPool.allocate and views()",
        )
    if tensor.device.type != "cpu":
        raise Refused("bad_layout", f"{who}: lies on {tensor.device}, expected cpu")
    if tensor.requires_grad:
        raise Refused("bad_layout", f"{who}: requires gradients, expected a cache tensor without")


def storages_of(tensors: Sequence[Any]) -> dict[int, list[Any]]:
    """Tensors by their storage, in the order of the first of each."""
    out: dict[int, list[Any]] = {}
    for tensor in tensors:
        out.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    return out


def move_storage(group: Sequence[Any], mapping: mmap.mmap, offset: int, who: str) -> None:
    """Copy the storage that these tensors share to ``mapping[offset:]`` and let it live there.

    Newer torch can swap the memory of a storage, and every view anywhere follows. Older torch can only point each
    tensor at a new storage: there a view that was not passed would silently stay behind, so it is refused by name.
    """
    import torch

    old = group[0].untyped_storage()
    size = old.nbytes()
    target = torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=offset)
    with torch.inference_mode():  # also tensors that were made in inference mode may be changed here
        source = torch.empty(0, dtype=torch.uint8).set_(old, 0, (size,), (1,))
        target.copy_(source)
        del source
        if _can_swap(old):
            old._swap_data_ptr_(target.untyped_storage())
            return
        _point(group, target.untyped_storage(), old, who)


def _can_swap(storage: Any) -> bool:
    return hasattr(storage, "_swap_data_ptr_")


def _point(group: Sequence[Any], target: Any, old: Any, who: str) -> None:
    import torch

    known: dict[int, Any] = {id(t): t for t in group}
    for tensor in group:
        base = tensor._base  # the tensor that this one is a view of shares the storage too
        if base is not None:
            known[id(base)] = base
    # One reference per tensor, and `old` itself.
    strangers = torch._C._storage_Use_Count(old._cdata) - len(known) - 1
    if strangers > 0:
        raise Refused(
            "bad_layout",
            f"{who}: {strangers} more tensors share a storage with the ones passed, and this torch"
            f" ({torch.__version__}) cannot move those along; drop them or pass them too",
        )
    for tensor in known.values():
        tensor.set_(target, tensor.storage_offset(), tensor.shape, tensor.stride())
