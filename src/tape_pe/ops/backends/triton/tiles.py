"""Tile sizes of the kernels: one table, which launchers and compile checks both read."""

from __future__ import annotations

from typing import NamedTuple

import torch

WIDTHS = (16, 32, 64, 128)
"""Channels of a head for which there are tiles; keys, values and states have equally many."""
MAX_CHUNKS = 64
"""Programs among which `decode` splits the keys, at most."""
DECODE_ROWS = (16, 32, 64)
"""Rows of `decode`, at least query heads of a group times queries. With more than the last, `forward` is used. All but
the first take twice the warps."""

DECODE_QUERIES = 16
"""With more queries than this, `forward` is used."""


class Tile(NamedTuple):
    """How a kernel is cut into programs.

    Attributes:
        queries: queries of a block; of `decode`, the least number of rows.
        keys: keys of a block.
        warps: warps of a program.
        stages: blocks whose loads are under way together.
    """

    queries: int
    keys: int
    warps: int
    stages: int


# By how numbers are multiplied and by kernel; for heads of up to 64 and of up to 128 channels. Each was chosen among a
# few that compile with Triton 3.7, 3.8 and 3.9 without spilling registers and within the shared memory of a
# multiprocessor; none has been timed yet.
# Without tensor cores ("ieee") heads of 128 channels do not fit the registers.
_GENERAL: dict[tuple[str, str], tuple[Tile, Tile] | tuple[Tile]] = {
    ("half", "forward"): (Tile(64, 32, 4, 3), Tile(64, 32, 8, 3)),
    ("half", "query_gradient"): (Tile(64, 32, 4, 2), Tile(64, 32, 8, 2)),
    ("half", "key_gradient"): (Tile(32, 128, 8, 2), Tile(32, 64, 8, 2)),
    ("half", "decode"): (Tile(16, 64, 4, 2), Tile(16, 64, 4, 2)),
    ("tf32", "forward"): (Tile(128, 32, 8, 2), Tile(32, 32, 8, 1)),
    ("tf32", "query_gradient"): (Tile(64, 32, 8, 2), Tile(32, 32, 8, 1)),
    ("tf32", "key_gradient"): (Tile(32, 32, 8, 2), Tile(16, 32, 8, 1)),
    ("tf32", "decode"): (Tile(16, 32, 4, 2), Tile(16, 16, 8, 2)),
    ("ieee", "forward"): (Tile(32, 32, 8, 2),),
    ("ieee", "query_gradient"): (Tile(32, 32, 8, 1),),
    ("ieee", "key_gradient"): (Tile(16, 32, 8, 1),),
    ("ieee", "decode"): (Tile(16, 16, 4, 2),),
}
_HOPPER = {
    **_GENERAL,
    ("half", "forward"): (Tile(128, 64, 8, 2), Tile(128, 64, 8, 2)),
    ("half", "query_gradient"): (Tile(128, 64, 8, 2), Tile(128, 32, 8, 2)),
}


def tile(kernel: str, capability: tuple[int, int], width: int, precision: str) -> Tile:
    """The tile of `"forward"`, `"query_gradient"`, `"key_gradient"` or `"decode"`.

    Args:
        kernel: name.
        capability: compute capability of the device; Hopper (9.0) has larger tiles and shared memory.
        width: channels of a head, one of `WIDTHS`.
        precision: `"half"` for numbers of 16 bits; for fp32 `"tf32"` or `"ieee"`, the latter up to 64 channels.

    Raises:
        ValueError: there are no tiles for the width.
    """
    if not has_tiles(width, precision):
        raise ValueError(f"head_dim={width}: there are no tiles for it with the precision {precision!r}")
    table = _HOPPER if capability[0] == 9 else _GENERAL
    return table[precision, kernel][0 if width <= 64 else 1]


@torch.compiler.assume_constant_result
def precision(dtype: torch.dtype) -> str:
    """How products of numbers are computed: of fp32 as torch's own, see `torch.set_float32_matmul_precision`."""
    if dtype != torch.float32:
        return "half"
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # where set, the older way to ask is an error
        return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def has_tiles(width: int, precision: str) -> bool:
    """Whether there are tiles of a width."""
    return width in WIDTHS and not (width == 128 and precision == "ieee")
