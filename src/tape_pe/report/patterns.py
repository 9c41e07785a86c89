"""What a positional encoding does to attention between every two positions, as numbers.

The pattern of a head is the sum of up to three parts, each where the encoding has it:

    rotation    <q'_i, k'_j> / D of queries and keys that are all ones before they are rotated
    bias        what is added to the scores: the bias shared by all layers and the layer's own
    embedding   the cosine of the vectors added to the token embeddings at i and at j

For RoPE the rotation is sum_k cos((i - j) w_k) / (D/2), and for a layer's state z it is Re<z_i, z_j> / (D/2). The parts
have scales of their own: attention scores hold the rotation times sqrt(D) times what queries and keys weigh it with.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tape_pe.encodings import Encoding, LayerEncoding, Tokens
from tape_pe.models import TapeLMConfig, TapeLMForCausalLM
from tape_pe.ops import add_biases, materialized

SHORTEST, LONGEST = 2, 2048


class PatternParts(NamedTuple):
    """The parts of a pattern, each `[H, N, N]` float64 (query, key), or `None` where the encoding has none.

    Attributes:
        rotation: inner products of rotated all-ones queries and keys over D.
        bias: additive bias, shared and the layer's own.
        embedding: cosines of the position embeddings, the same for all heads.
    """

    rotation: np.ndarray | None
    bias: np.ndarray | None
    embedding: np.ndarray | None

    def names(self) -> list[str]:
        """The names of the parts that there are."""
        return [name for name, part in zip(self._fields, self, strict=True) if part is not None]

    def total(self) -> np.ndarray | None:
        """Their sum, `[H, N, N]`; `None` where there is no part."""
        present = [part for part in self if part is not None]
        return np.sum(present, axis=0) if present else None


def position_pattern(
    encoding: str,
    options: Mapping[str, Any] | None = None,
    length: int = 64,
    num_heads: int = 8,
    head_dim: int = 64,
    *,
    max_position_embeddings: int = 1024,
    seed: int = 0,
) -> np.ndarray:
    """The pattern of an untrained encoding in layer 0, see the module's docstring.

    Args:
        encoding: its registered name.
        options: its `encoding_options`.
        length: N, number of positions, 2 to 2048.
        num_heads: H, as many for queries as for keys.
        head_dim: D.
        max_position_embeddings: the length that the decoder is made for.
        seed: seed of the start weights, for encodings that have some.

    Returns:
        `[H, N, N]` float64; row i, column j is what the query at i sees of the key at j. Zero for an encoding without
        parts.

    Raises:
        ValueError: an unknown name, options that are refused, or a length that the encoding cannot have.
    """
    parts = pattern_parts(
        encoding, options, length, num_heads, head_dim, max_position_embeddings=max_position_embeddings, seed=seed
    )
    total = parts.total()
    return np.zeros((num_heads, length, length)) if total is None else total


@torch.no_grad()
def pattern_parts(
    encoding: str,
    options: Mapping[str, Any] | None = None,
    length: int = 64,
    num_heads: int = 8,
    head_dim: int = 64,
    *,
    max_position_embeddings: int = 1024,
    seed: int = 0,
) -> PatternParts:
    """The parts of `position_pattern`, whose arguments these are. Token ids, for encodings that read them, are 0."""
    check_length(length)
    config = TapeLMConfig(
        vocab_size=16,
        hidden_size=num_heads * head_dim,
        intermediate_size=8,
        num_hidden_layers=2,  # in the last layer, an encoding may have no parameters
        num_attention_heads=num_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        encoding=encoding,
        encoding_options=dict(options or {}),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TapeLMForCausalLM(config).double().eval()
    tokens = _tokens(torch.zeros(1, length, dtype=torch.long))
    return _parts(model, 0, model.model.encoding.start(tokens, torch.float64), tokens)


@torch.no_grad()
def model_patterns(model: TapeLMForCausalLM, input_ids: Tensor) -> list[PatternParts]:
    """The patterns of a model's layers, from the states that each layer reads; embeddings count in layer 0 alone.

    Args:
        model: the decoder; it is left as it is.
        input_ids: `[1, N]` the text, which states and some biases depend on.

    Returns:
        One per layer.
    """
    check_length(input_ids.shape[1])
    model = copy.deepcopy(model).cpu().double().eval()
    input_ids = input_ids.cpu()
    states = model(input_ids, output_position_states=True, use_cache=False).position_states
    layers = range(len(model.model.layers))
    return [_parts(model, idx, states[idx] if states else None, _tokens(input_ids)) for idx in layers]


def check_length(length: int) -> None:
    """Refuses numbers of positions that cannot be drawn.

    Raises:
        ValueError: `length` is out of range.
    """
    if not SHORTEST <= length <= LONGEST:
        raise ValueError(f"length is {length}; it must be {SHORTEST} to {LONGEST} positions")


def _tokens(input_ids: Tensor) -> Tokens:
    length = input_ids.shape[1]
    return Tokens(torch.arange(length)[None], length, input_ids=input_ids)


def _parts(model: TapeLMForCausalLM, layer_idx: int, state: Tensor | None, tokens: Tokens) -> PatternParts:
    """The parts in one layer of a float64 model, which reads `state` `[1, Hkv | 1, N, Ds]`."""
    sizes, length = model.config.encoding_sizes(), tokens.num_new
    heads, kv_heads = sizes.num_attention_heads, sizes.num_key_value_heads
    encoding: Encoding = model.model.encoding
    layer: LayerEncoding = model.get_submodule(f"model.layers.{layer_idx}.encoding")
    query = torch.ones(1, heads, length, sizes.head_dim, dtype=torch.float64)
    key = query[:, :kv_heads]
    rotated_query, rotated_key = layer.rotate(query, key, state)

    rotation = None
    if not (torch.equal(rotated_query, query) and torch.equal(rotated_key, key)):
        keys_of_heads = rotated_key.repeat_interleave(heads // kv_heads, dim=1)
        rotation = _numbers(rotated_query @ keys_of_heads.transpose(2, 3) / sizes.head_dim, heads)

    shared, own = encoding.bias(tokens, torch.float64), layer.bias(rotated_query, rotated_key, tokens)
    summed = materialized(add_biases(shared, own))
    bias = None if summed is None else _numbers(summed.double().expand(1, heads, length, length), heads)

    added = encoding.embed(tokens) if layer_idx == 0 else None
    embedding = None
    if added is not None:
        unit = F.normalize(added.double(), dim=-1)
        embedding = _numbers((unit @ unit.transpose(1, 2))[:, None], heads)
    return PatternParts(rotation, bias, embedding)


def _numbers(part: Tensor, heads: int) -> np.ndarray:
    return part[0].expand(heads, -1, -1).numpy().copy()
