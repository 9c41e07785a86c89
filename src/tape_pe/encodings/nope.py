"""NoPE: no positional encoding at all; order comes from the causal mask alone (Kazemnejad et al., arXiv 2305.19466)."""

from tape_pe.encodings.base import Encoding


class NoPE(Encoding):
    """Adds nothing, rotates nothing."""
