"""Learned absolute positions (Gehring et al., arXiv 1705.03122; GPT-2): p[n] = W[n], added to the token embeddings.

W has `max_position_embeddings` rows; a position beyond them is an error.
"""

from __future__ import annotations

from torch import Tensor, nn

from tape_pe.encodings.base import Encoding, EncodingOptions, EncodingSizes, Tokens
from tape_pe.encodings.bounds import row_indices


class Learned(Encoding):
    """Adds a trained row per position.

    Parameters: `position_embeddings.weight` `[max_position_embeddings, hidden_size]`.
    """

    summary = "Adds a trained row per position to the token embeddings."
    paper = "Gehring et al., arXiv 1705.03122"
    extrapolates = "no: bounded by max_position_embeddings"
    cost = "one addition to the embeddings"

    def __init__(self, sizes: EncodingSizes, options: EncodingOptions) -> None:
        super().__init__(sizes, options)
        self.position_embeddings = nn.Embedding(sizes.max_position_embeddings, sizes.hidden_size)

    @classmethod
    def longest_text(cls, sizes: EncodingSizes, options: EncodingOptions) -> int:
        """As many tokens as there are rows."""
        return sizes.max_position_embeddings

    def embed(self, tokens: Tokens) -> Tensor:
        """The rows of the new tokens, `[B | 1, N, hidden_size]`.

        Raises:
            ValueError: a position at or beyond `max_position_embeddings`.
        """
        bound = self.sizes.max_position_embeddings
        rows = row_indices(tokens, bound, f"encoding='learned' has max_position_embeddings={bound}")
        return self.position_embeddings(rows)
