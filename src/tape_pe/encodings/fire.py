"""FIRE: functional interpolation for relative positions (Li et al., arXiv 2310.04418).

    score[h, i, j] = q_i k_j / sqrt(D) + f_h(phi[i, j])
    phi[i, j]      = ln(|c (i - j)| + 1) / (ln(|c max(i, |m L0|)| + 1) + 1e-6)

where i is the query's position. f is an MLP 1 -> W -> H with a ReLU, c scales distances, and |m L0| is the length below
which distances are no longer divided by more than their own maximum. Each layer has its own f, c and m; L0 is fixed.
f's last bias shifts all scores of a row alike, so softmax ignores it and its gradient is zero but for rounding.

Where the bias is materialized, the MLP's hidden layer is `[B | 1, W, N, Nk]`, the largest tensor of the encoding;
activation checkpointing keeps it for one layer at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import initialization as init

from tape_pe.encodings.base import Encoding, EncodingOptions, EncodingSizes, LayerEncoding, Tokens
from tape_pe.encodings.relative import RelativeBias

EPSILON = 1e-6


@dataclass(frozen=True)
class FireOptions(EncodingOptions):
    """Options of FIRE.

    Attributes:
        hidden_width: W, width of the MLP.
        initial_c: what c starts at.
        initial_length: L0, the length that |m L0| starts at, in tokens.
    """

    hidden_width: int = 32
    initial_c: float = 0.1
    initial_length: float = 512.0

    def __post_init__(self) -> None:
        if self.hidden_width < 1:
            raise ValueError(f"encoding_options.hidden_width={self.hidden_width}: at least 1 is needed")
        for name in ("initial_c", "initial_length"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"encoding_options.{name}={value}: a positive number is needed")


class FireBias(RelativeBias):
    """f_h(phi[i, j]). In one pair the MLP is a sum over its hidden units, of all pairs it is a matrix product.

    Args:
        tokens: all tokens.
        layer: whose weights to use.
        dtype: of the result and of all computation.
    """

    gathers_gradients = False  # every pair reads all weights

    def __init__(self, tokens: Tokens, layer: FireLayer, dtype: torch.dtype) -> None:
        super().__init__(tokens, layer.out_bias.shape[0])
        self.dtype = dtype
        self.c = layer.c.to(dtype).squeeze(0)
        self.length = (layer.length_factor.to(dtype).squeeze(0) * layer.options.initial_length).abs()
        self.hidden_weight, self.hidden_bias = layer.hidden_weight.to(dtype).squeeze(1), layer.hidden_bias.to(dtype)
        self.out_weight, self.out_bias = layer.out_weight.to(dtype), layer.out_bias.to(dtype)

    def interpolated(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """phi, in [0, 1] for keys that are not later than the query; arguments as in `at`."""
        i, j = self.positions_of(batch, query, key)
        largest = torch.log1p((self.c * torch.maximum(i.to(self.dtype), self.length)).abs()) + EPSILON
        return torch.log1p((self.c * (i - j).to(self.dtype)).abs()) / largest

    def at(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        phi = self.interpolated(batch, head, query, key)
        out = self.out_bias[head]
        for number in range(self.hidden_bias.shape[0]):  # kernels have no inner dimension to sum over
            unit = torch.full_like(head, number)
            hidden = torch.relu(self.hidden_weight[unit] * phi + self.hidden_bias[unit])
            out = out + self.out_weight[head, unit] * hidden
        return out

    def materialize(self) -> Tensor:
        phi = self.interpolated(*self.pairs()).squeeze(1)
        with torch.autocast(self.device.type, enabled=False):
            # Heads and hidden units stand before the pairs of tokens, so that the result is contiguous.
            hidden = torch.relu(self.hidden_weight[:, None] * phi.flatten(1)[:, None] + self.hidden_bias[:, None])
            out = self.out_weight @ hidden + self.out_bias[:, None]
        return out.unflatten(2, phi.shape[1:])


class FireLayer(LayerEncoding):
    """A layer's MLP over interpolated distances.

    Parameters: `c` `[1]`, `length_factor` `[1]` (m), and the MLP's `hidden_weight` `[W, 1]`, `hidden_bias` `[W]`,
    `out_weight` `[H, W]` and `out_bias` `[H]`.
    """

    def __init__(self, sizes: EncodingSizes, options: FireOptions) -> None:
        super().__init__()
        self.options = options
        self.c = nn.Parameter(torch.empty(1))
        self.length_factor = nn.Parameter(torch.empty(1))
        self.hidden_weight = nn.Parameter(torch.empty(options.hidden_width, 1))
        self.hidden_bias = nn.Parameter(torch.empty(options.hidden_width))
        self.out_weight = nn.Parameter(torch.empty(sizes.num_attention_heads, options.hidden_width))
        self.out_bias = nn.Parameter(torch.empty(sizes.num_attention_heads))
        self.init_own_weights()

    def init_own_weights(self) -> None:
        """c and m as the options have them; the MLP as torch's `nn.Linear`, since its input is in [0, 1] and small
        weights would leave the bias next to constant."""
        init.constant_(self.c, self.options.initial_c)
        init.ones_(self.length_factor)
        for weight, bias in ((self.hidden_weight, self.hidden_bias), (self.out_weight, self.out_bias)):
            bound = weight.shape[1] ** -0.5
            init.uniform_(weight, -bound, bound)
            init.uniform_(bias, -bound, bound)

    def bias(self, query: Tensor, key: Tensor, tokens: Tokens) -> FireBias:
        """`[B | 1, H, N, Nk]` in fp32, or in wider queries' dtype."""
        return FireBias(tokens, self, torch.promote_types(query.dtype, torch.float32))


class Fire(Encoding):
    """FIRE; all of it is in the layers."""

    summary = "Adds to each score an MLP of the distance, relative to the query's position."
    paper = "Li et al., arXiv 2310.04418"
    extrapolates = "yes; distances are interpolated into the trained range"
    cost = "an MLP 1 -> 32 -> H per score and layer"
    options_class = FireOptions

    @classmethod
    def layer(cls, sizes: EncodingSizes, options: EncodingOptions, layer_idx: int) -> LayerEncoding:
        """A `FireLayer`."""
        assert isinstance(options, FireOptions)
        return FireLayer(sizes, options)
