"""The reference itself, against loops over tokens, heads and blocks."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from tape_pe.ops import reference


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_blocks_are_half_split_pairs_for_two_rows() -> None:
    u = torch.arange(8.0).expand(1, 1, 1, 8)
    assert reference.blocks(u, 2)[0, 0, 0].tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert reference.blocks(u, 4)[0, 0, 0].tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_general_encoding_is_a_scaled_rotation_per_pair() -> None:
    state = random(1, 2, 3, 4)
    encoding = reference.general_encoding(state)
    assert encoding.shape == (1, 3, 4, 2, 2)
    for head in range(2):
        for token in range(3):
            for pair in range(2):
                c, s = state[0, head, token, pair].item(), state[0, head, token, 2 + pair].item()
                assert encoding[0, token, head * 2 + pair].tolist() == [[c, s], [-s, c]]


@pytest.mark.parametrize("causal", [True, False])
def test_general_attention_equals_the_sums_of_the_paper(causal: bool) -> None:
    heads, kv_heads, tokens, width, rows, columns = 4, 2, 5, 6, 3, 2
    query, key = random(1, heads, tokens, width), random(1, kv_heads, tokens, width, seed=1)
    value, encoding = random(1, kv_heads, tokens, 3, seed=2), random(1, tokens, kv_heads * 2, rows, columns, seed=3)
    output, averaged = reference.general_attention(query, key, value, encoding, causal=causal)
    assert averaged.shape == (1, tokens, heads * 2, rows, columns)
    for h in range(heads):
        g = h // 2
        for i in range(tokens):
            seen = range(i + 1) if causal else range(tokens)
            scores = []
            for j in seen:
                score = 0.0
                for m in range(2):  # block m holds channels m, m + 2, m + 4
                    q, k = query[0, h, i, m::2], key[0, g, j, m::2]
                    score += (q @ encoding[0, i, g * 2 + m] @ encoding[0, j, g * 2 + m].T @ k).item()
                scores.append(math.exp(score / math.sqrt(width)))
            weights = [score / sum(scores) for score in scores]
            expected = sum(a * value[0, g, j] for a, j in zip(weights, seen, strict=True))
            torch.testing.assert_close(output[0, h, i], expected)
            expected = sum(a * encoding[0, j, g * 2 : g * 2 + 2] for a, j in zip(weights, seen, strict=True))
            torch.testing.assert_close(averaged[0, i, h * 2 : h * 2 + 2], expected)


def test_general_update_equals_the_sums_of_the_paper() -> None:
    encoding, averaged, gate = random(1, 3, 2, 2, 3), random(1, 3, 4, 2, 3, seed=1), random(1, 3, 5, seed=2)
    mix, up, down = random(4, 8, seed=3), random(5, 4, seed=4), random(4, 5, seed=5)
    updated = reference.general_update(encoding, averaged, gate, mix=mix, up=up, down=down)
    for n in range(3):
        e1 = encoding[0, n].reshape(4, 3) + mix @ averaged[0, n].reshape(8, 3)
        e2 = e1 + down @ torch.diag(gate[0, n]) @ up @ e1
        torch.testing.assert_close(updated[0, n], e2.reshape(2, 2, 3))


def test_rotate_is_a_complex_product() -> None:
    u, phases = random(2, 4, 3, 6), random(2, 2, 3, 3, seed=1)
    state = torch.cat([phases.cos(), phases.sin()], dim=-1)
    rotated = reference.rotate(u, state)
    for b in range(2):
        for h in range(4):
            for n in range(3):
                for j in range(3):
                    z = complex(u[b, h, n, j], u[b, h, n, j + 3]) * cmath.exp(1j * phases[b, h // 2, n, j].item())
                    assert rotated[b, h, n, j].item() == pytest.approx(z.real, abs=1e-12)
                    assert rotated[b, h, n, j + 3].item() == pytest.approx(z.imag, abs=1e-12)


def test_attention_weights_rows_sum_to_one_over_what_they_may_see() -> None:
    query, key, bias = random(2, 4, 3, 6), random(2, 2, 5, 6, seed=1), random(4, 3, 5, seed=2)
    segment_ids = torch.tensor([[-1, 0, 0, 0, 0], [0, 0, 1, 1, -1]])
    weights = reference.attention_weights(query, key, segment_ids=segment_ids, bias=bias)
    for b in range(2):
        for h in range(4):
            for i in range(3):
                own = segment_ids[b, i + 2]
                seen = [j for j in range(i + 3) if segment_ids[b, j] == own >= 0]
                row = torch.zeros(5, dtype=torch.float64)
                if seen:
                    scores = key[b, h // 2] @ query[b, h, i] / math.sqrt(6) + bias[h, i]
                    row[seen] = scores[seen].softmax(0)
                torch.testing.assert_close(weights[b, h, i], row)
    assert not weights[1, :, 2].any()


@pytest.mark.parametrize("norm", ["none", "rms"])
@pytest.mark.parametrize("columns", [4, 2])
def test_contextualize_equals_the_equations_per_token(columns: int, norm: str) -> None:
    state, averaged, gate = random(1, 2, 3, 6), random(1, 4, 3, 6, seed=1), random(1, 3, 5, seed=2)
    mix, up, down = random(2, columns, seed=3), random(5, 2, seed=4), random(2, 5, seed=5)
    new = reference.contextualize(state, averaged, gate, mix=mix, up=up, down=down, norm=norm)
    full = mix if columns == 4 else torch.block_diag(mix[:1], mix[1:])  # [2, 4], each head its own two averages
    for n in range(3):
        z1 = state[0, :, n] + full @ averaged[0, :, n]
        z2 = z1 + sum(gate[0, n, i] * down[:, i : i + 1] @ (up[i : i + 1] @ z1) for i in range(5))
        if norm == "rms":
            z = torch.complex(z2[:, :3], z2[:, 3:])
            z2 = z2 / z.abs().square().mean(dim=-1, keepdim=True).sqrt()
        torch.testing.assert_close(new[0, :, n], z2)
