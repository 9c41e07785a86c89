"""NoPE: no positional encoding at all; order comes from the causal mask alone (Kazemnejad et al., arXiv 2305.19466)."""

from tape_pe.encodings.base import Encoding


class NoPE(Encoding):
    """Adds nothing, rotates nothing."""

    summary = "No positional encoding at all: order comes from the causal mask alone."
    paper = "Kazemnejad et al., arXiv 2305.19466"
    extrapolates = "runs at any length; gets worse beyond the trained one"
    cost = "nothing"
