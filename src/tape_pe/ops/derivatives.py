"""Which derivatives are being computed."""

from __future__ import annotations

import torch.autograd.forward_ad as fwAD
from torch import Tensor


def has_tangents(*tensors: Tensor | None) -> bool:
    """Whether one of the tensors carries a forward-mode derivative."""
    return any(fwAD.unpack_dual(tensor).tangent is not None for tensor in tensors if tensor is not None)
