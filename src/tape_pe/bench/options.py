"""Options of `tape bench`, and the shapes that they stand for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from tape_pe.encodings import get_encoding
from tape_pe.models import TapeLMConfig
from tape_pe.ops.backends import select_backend

LEVELS = ("op", "layer", "model")
PHASES = ("forward", "forward+backward", "step", "prefill", "decode", "generate")
CLOCKS = ("wall", "cpu")
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Shape:
    """The sizes of one measurement.

    Attributes:
        length: N, tokens of a row; with a cache, tokens that it holds.
        batch_size: B, rows.
        heads: H, heads of the queries.
        kv_heads: Hkv, heads of keys, values and states.
        head_dim: D, channels per head.
        dtype: dtype of weights and activations, by its name in torch.
        layers: layers of the model; a layer that is measured alone is one in the middle, neither first nor last.
        intermediate_size: width of the MLP.
        vocab_size: tokens that the model knows.
        position_size: I, width of TAPE's position MLP.
        new_tokens: tokens to generate.
    """

    length: int = 1024
    batch_size: int = 1
    heads: int = 12
    kv_heads: int = 12
    head_dim: int = 64
    dtype: str = "float32"
    layers: int = 2
    intermediate_size: int = 3072
    vocab_size: int = 1024
    position_size: int = 48
    new_tokens: int = 32

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return getattr(torch, self.dtype)

    def config(self, encoding: str) -> TapeLMConfig:
        """The configuration of a decoder of these sizes.

        Raises:
            ValueError: sizes that no decoder with this encoding can have.
        """
        options = (
            {"position_size": self.position_size} if encoding == "tape" else get_encoding(encoding).example_options
        )
        return TapeLMConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.heads * self.head_dim,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.length + self.new_tokens,
            encoding=encoding,
            encoding_options=dict(options),
        )


PUBLISHED = Shape(layers=12, vocab_size=32000)
"""The 155M decoder whose cost is published: 12 layers x 768, 12 heads, I = 48, N = 1024 (arXiv 2501.00712)."""


@dataclass(frozen=True)
class BenchOptions:
    """What to measure. Every list of sizes is an axis: all combinations are measured.

    Attributes:
        levels: `"op"`, rotation, attention and position update alone; `"layer"`, a decoder layer; `"model"`, a decoder.
        phases: `"forward"`; `"forward+backward"`; `"step"`, the same of a model with its loss and its optimizer;
            `"prefill"`, forward that fills a cache; `"decode"`, one token after LENGTH cached ones; `"generate"`,
            NEW_TOKENS tokens one by one after a prompt of LENGTH.
        encodings: encodings to compare; RoPE is always among them. Ops are those of `rope` and `tape`.
        backends: attention backends to try beside the one that `tape info` marks as chosen. RoPE also runs on `sdpa`,
            and the faster of its backends is what others are compared with.
        lengths: N, tokens of a row; with a cache, tokens that it holds.
        batch_sizes: B, rows.
        heads: H, heads of the queries.
        kv_heads: Hkv, heads of keys, values and states; default: as many as queries have.
        head_dims: D, channels per head.
        dtypes: `float32`, `bfloat16`, `float16`, `float64`.
        threads: threads of the CPU; default: what torch takes, and one to check the targets.
        layers: layers of the model; the last one updates no states.
        intermediate_size: width of the MLP; default: four times that of the model.
        vocab_size: tokens that the model knows; few, so that the head does not hide the layers.
        position_size: I, width of TAPE's position MLP; default: 4 * Hkv.
        new_tokens: tokens to generate.
        memory_lengths: lengths at which a process of its own measures the peak memory of a model; `[]` for none.
        seconds: time to spend on each comparison, after warming up; default: 0.3, and 4 to check the targets.
        rounds: least number of rounds of each comparison, however long they take.
        clock: `"wall"`, or `"cpu"`: the time that the process had the CPU, which other processes disturb less.
        device: such as `cpu` or `cuda`; default: the GPU if any.
        seed: of weights, inputs and the order of the variants in a round.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    levels: tuple[str, ...] = LEVELS
    phases: tuple[str, ...] = PHASES
    encodings: tuple[str, ...] = ("rope", "tape")
    backends: tuple[str, ...] = ()
    lengths: tuple[int, ...] = (128, 512, 1024)
    batch_sizes: tuple[int, ...] = (1,)
    heads: tuple[int, ...] = (12,)
    kv_heads: tuple[int, ...] = ()
    head_dims: tuple[int, ...] = (64,)
    dtypes: tuple[str, ...] = ("float32",)
    threads: tuple[int, ...] = ()
    layers: int = 2
    intermediate_size: int | None = None
    vocab_size: int = 1024
    position_size: int | None = None
    new_tokens: int = 32
    memory_lengths: tuple[int, ...] = (1024, 2048)
    seconds: float | None = None
    rounds: int = 3
    clock: str = "wall"
    device: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, list):
                object.__setattr__(self, f.name, tuple(value))
        for name, allowed in (("levels", LEVELS), ("phases", PHASES), ("dtypes", DTYPES), ("clock", CLOCKS)):
            values = getattr(self, name) if name != "clock" else (self.clock,)
            for value in values:
                if value not in allowed:
                    raise ValueError(f"{name}={value!r}: it must be one of {', '.join(allowed)}")
        for name in _COUNTS:
            self._check_counts(name)
        for name in ("levels", "phases", "encodings", "lengths", "batch_sizes", "heads", "head_dims", "dtypes"):
            if not getattr(self, name):
                raise ValueError(f"{name}=(): it must hold at least one value")
        if self.seconds is not None and not 0 < self.seconds < float("inf"):
            raise ValueError(f"seconds={self.seconds}: it must be a positive number")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}: it must be at least 0")
        self._check_device()
        for name in self.encodings:
            get_encoding(name)
        for shape in self.shapes():
            for name in self.encodings:
                shape.config(name)

    def _check_counts(self, name: str) -> None:
        value = getattr(self, name)
        several = value if isinstance(value, tuple) else () if value is None else (value,)
        if len(set(several)) < len(several) or any(type(one) is not int or one < 1 for one in several):
            rule = "hold positive integers, each only once" if isinstance(value, tuple) else "be a positive integer"
            raise ValueError(f"{name}={value}: it must {rule}")

    def _check_device(self) -> None:
        from tape_pe.evaluate import check_device

        device = check_device(self.device)
        object.__setattr__(self, "device", str(device))
        if self.clock == "cpu" and device.type != "cpu":
            raise ValueError(f"clock='cpu': it does not see what {device.type} does; use 'wall'")
        for backend in self.backends:
            select_backend(device, backend)

    def shapes(self) -> Iterator[Shape]:
        """All combinations of the axes, lengths fastest."""
        axes = (self.dtypes, self.batch_sizes, self.heads, self.head_dims, self.kv_heads or (0,), self.lengths)
        for dtype, batch_size, heads, head_dim, kv_heads, length in itertools.product(*axes):
            kv_heads = kv_heads or heads
            yield Shape(
                length=length,
                batch_size=batch_size,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                dtype=dtype,
                layers=self.layers,
                intermediate_size=self.intermediate_size or 4 * heads * head_dim,
                vocab_size=self.vocab_size,
                position_size=self.position_size or 4 * kv_heads,
                new_tokens=self.new_tokens,
            )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


_COUNTS = (
    "lengths", "batch_sizes", "heads", "kv_heads", "head_dims", "threads", "layers", "intermediate_size", "vocab_size",
    "position_size", "new_tokens", "memory_lengths", "rounds",
)  # fmt: skip
