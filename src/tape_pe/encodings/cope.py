"""CoPE: contextual position encoding (Golovneva et al., arXiv 2405.18719).

Positions are counted by the content: every key that a query may see adds its gate, from the key on to the query.

    g[i, j]     = sigmoid(q_i k_j / sqrt(D))             0 where i may not see j
    p[i, j]     = min(sum_{k=j}^{i} g[i, k], P - 1)
    score[i, j] = q_i k_j / sqrt(D) + q_i e[p[i, j]]

e has P rows and is interpolated between whole positions, e[p] = (1 - w) e[floor p] + w e[floor p + 1], w = p - floor p.
Scaling is that of the paper's listing: gates read the scaled scores, q_i e is not scaled. (The released code divides
q_i e by sqrt(D) as well, which is another scale of e.) Heads share e, layers do not. It starts at zero, as in the
paper: a fresh CoPE decoder is a NoPE decoder.

Positions given by the caller play no role; which tokens a query may see does. Every head counts for itself, so gates,
positions and bias are `[B, H, N, Nk]` in every layer: the cost is inherent, and no attention kernel avoids it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from tape_pe.encodings.base import Encoding, EncodingOptions, EncodingSizes, LayerEncoding, Tokens
from tape_pe.ops.masks import dense_mask


@dataclass(frozen=True)
class CopeOptions(EncodingOptions):
    """Options of CoPE.

    Attributes:
        max_positions: P, rows of e: counts above P - 1 are cut off.
    """

    max_positions: int = 64

    def __post_init__(self) -> None:
        if self.max_positions < 2:
            raise ValueError(f"encoding_options.max_positions={self.max_positions}: at least 2 are needed")


class CopeLayer(LayerEncoding):
    """Counts and looks up positions.

    Parameters: `embeddings` `[P, D]`.
    """

    def __init__(self, sizes: EncodingSizes, options: CopeOptions) -> None:
        super().__init__()
        self.embeddings = nn.Parameter(torch.empty(options.max_positions, sizes.head_dim))
        self.init_own_weights()

    def init_own_weights(self) -> None:
        """Zero: positions make no difference yet."""
        init.zeros_(self.embeddings)

    def positions(self, query: Tensor, key: Tensor, tokens: Tokens) -> Tensor:
        """p, `[B, H, N, Nk]` in the dtype of `query`."""
        num_new, num_all = query.shape[2], key.shape[2]
        grouped = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)  # [B, Hkv, G * N, D]
        gates = torch.sigmoid(grouped @ key.transpose(-1, -2) * query.shape[-1] ** -0.5)
        gates = gates.unflatten(2, (-1, num_new)).flatten(1, 2)  # [B, H, N, Nk]
        visible = dense_mask(num_new, num_all, segment_ids=tokens.segment_ids, device=query.device)
        gates = gates.masked_fill(~visible, 0.0)
        return gates.flip(-1).cumsum(dim=-1).flip(-1).clamp(max=self.embeddings.shape[0] - 1)

    def bias(self, query: Tensor, key: Tensor, tokens: Tokens) -> Tensor:
        """q_i e[p[i, j]], `[B, H, N, Nk]` in fp32, or in wider queries' dtype: fp16 and bf16 cannot count."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        with torch.autocast(query.device.type, enabled=False):
            # A cache holds keys in another memory layout, for which products are rounded otherwise.
            query, key = query.to(dtype), key.to(dtype).contiguous()
            positions = self.positions(query, key, tokens)
            whole = positions.detach().floor()
            at_whole = query @ self.embeddings.to(dtype).t()  # [B, H, N, P]
            to_next = F.pad(at_whole.diff(dim=-1), (0, 1))  # P - 1 is reached exactly or not at all
            index = whole.long()
            return at_whole.gather(-1, index) + (positions - whole) * to_next.gather(-1, index)


class Cope(Encoding):
    """CoPE; all of it is in the layers."""

    summary = "Counts positions by the content: gates decide which tokens count."
    paper = "Golovneva et al., arXiv 2405.18719"
    extrapolates = "runs at any length; counts stop at max_positions"
    cost = "a gate, a running sum and a look-up per score and layer"
    options_class = CopeOptions

    @classmethod
    def layer(cls, sizes: EncodingSizes, options: EncodingOptions, layer_idx: int) -> LayerEncoding:
        """A `CopeLayer`."""
        assert isinstance(options, CopeOptions)
        return CopeLayer(sizes, options)
