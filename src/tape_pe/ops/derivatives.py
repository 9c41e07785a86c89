"""Which derivatives are being computed."""

from __future__ import annotations

import torch.autograd.forward_ad as fwAD
from torch import Tensor


def has_tangents(*tensors: Tensor | None) -> bool:
    """Whether one of the tensors carries a forward-mode derivative."""
    return any(fwAD.unpack_dual(tensor).tangent is not None for tensor in tensors if tensor is not None)


def refuse_tangents(backend: str, *tensors: Tensor | None) -> None:
    """Raises NotImplementedError for forward-mode derivatives, which the backend would leave out."""
    if has_tangents(*tensors):
        raise NotImplementedError(f"{backend} has no forward-mode derivatives, which backend='reference' has")
