"""Adds an encoding of your own, checks it, and trains a decoder with it.

The encoding is KERPLE's logarithmic variant (Chi et al., arXiv 2205.09921): every layer adds

    -r1 * ln(1 + r2 * (i - j)),     r1, r2 > 0, one pair per head and layer

to the score of query i and key j. Run it with `python examples/01_add_an_encoding.py`.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import initialization as init

import tape_pe
from tape_pe.encodings import Encoding, EncodingOptions, LayerEncoding, register_encoding
from tape_pe.testing import ENCODING_CHECKS


@dataclass(frozen=True)
class KerpleOptions(EncodingOptions):
    """Options appear in `encoding_options`; wrong ones are refused here."""

    scale: float = 1.0

    def __post_init__(self):
        if self.scale <= 0:
            raise ValueError(f"encoding_options.scale={self.scale}: must be positive")


class KerpleLayer(LayerEncoding):
    """The part of each layer: two numbers per head."""

    def __init__(self, num_heads, scale):
        super().__init__()
        self.scale = scale
        self.log_r1 = nn.Parameter(torch.empty(num_heads))
        self.log_r2 = nn.Parameter(torch.empty(num_heads))
        self.init_own_weights()

    def init_own_weights(self):
        init.zeros_(self.log_r1)
        init.zeros_(self.log_r2)

    def bias(self, query, key, tokens):
        # Distances come from positions, not from columns: so padding, packing and the cache are right at once.
        distance = tokens.new_position_ids[:, :, None] - tokens.position_ids[:, None, :]
        distance = distance.clamp(min=0)[:, None].float()  # [B | 1, 1, N, Nk]
        r1, r2 = (p.float().exp()[:, None, None] for p in (self.log_r1, self.log_r2))
        return -self.scale * r1 * torch.log1p(r2 * distance)


class Kerple(Encoding):
    """The part of the model: it only says how to build a layer's."""

    options_class = KerpleOptions

    @classmethod
    def layer(cls, sizes, options, layer_idx):
        return KerpleLayer(sizes.num_attention_heads, options.scale)


def main():
    register_encoding("kerple", Kerple)
    for name, check in ENCODING_CHECKS.items():
        check("kerple", {"scale": 0.5})
        print(f"passed: {name.replace('_', ' ')}")

    torch.manual_seed(0)
    config = tape_pe.TapeLMConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        encoding="kerple",
    )
    model = tape_pe.TapeLMForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.arange(24).remainder(6).repeat(8, 1)  # 0 1 2 3 4 5 0 1 2 ...
    for step in range(41):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
