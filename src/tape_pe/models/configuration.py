"""Configuration of the decoder."""

# Annotations stay objects here (no `from __future__ import annotations`): `strict` checks values against them, but
# checks nothing where they are strings.

import math
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig
from transformers.activations import ACT2FN

from tape_pe.encodings import EncodingOptions, EncodingSizes, get_encoding
from tape_pe.ops.frequencies import check_scaling, complete_scaling

# Keys that `PreTrainedConfig` consumes, or that saved configs hold, without a field of their own.
_FOREIGN_KEYS = frozenset(
    {
        "attn_implementation",
        "auto_map",
        "experts_implementation",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "quantization_config",
        "rope_scaling",
        "rope_theta",
        "tokenizer_class",
        "torch_dtype",
    }
)


@strict
class TapeLMConfig(PreTrainedConfig):
    """Configuration of `TapeLMForCausalLM`, a Llama-style pre-norm decoder with a choice of positional encodings.

    Attributes:
        vocab_size: number of tokens.
        hidden_size: width of the token stream, `[B, N, hidden_size]` between layers.
        intermediate_size: width of the gated MLP.
        num_hidden_layers: number of layers.
        num_attention_heads: H, heads of the queries.
        num_key_value_heads: Hkv, heads of keys, values and position states; `None` is H.
        head_dim: D, channels per head; `None` is `hidden_size / num_attention_heads`.
        hidden_act: activation of the gated MLP, a name that transformers knows, such as `"silu"`.
        max_position_embeddings: the length in tokens that the model is made for. Encodings with a table as long as this
            (such as `"learned"`) refuse longer texts, some frequency rules count from it; for others it is a note.
        initializer_range: standard deviation of random start weights.
        rms_norm_eps: epsilon of the RMS norms.
        use_cache: whether forward returns a cache by default.
        pad_token_id: id of the padding token.
        bos_token_id: id of the first token.
        eos_token_id: id (or ids) of the last token.
        tie_word_embeddings: whether the head shares the weights of the embedding.
        rope_parameters: base and frequency rule as in transformers 5: `{"rope_type": "default",
            "rope_theta": 10000.0}`, see `tape_pe.ops.rotary_frequencies`. The older `rope_scaling` and `rope_theta`
            are read too, and `type` for `rope_type`.
        encoding: name of a positional encoding, such as `"tape"`, `"rope"` or `"nope"`; `tape encodings` and
            `tape_pe.encodings.ENCODINGS` list them.
        encoding_options: options of that encoding, for example `{"position_size": 48}` for `"tape"`, whose options are
            `tape_pe.encodings.tape.TapeOptions`.

    Raises:
        ValueError: an unknown key or encoding, or sizes that do not fit each other. The message names the key, its
            value and the rule.
    """

    model_type = "tape_lm"
    keys_to_ignore_at_inference = ["cache", "position_states"]  # noqa: RUF012  (Trainer adds a list to it)

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 1024
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None
    encoding: str = "tape"
    encoding_options: dict | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        known = _FOREIGN_KEYS | set(GenerationConfig._get_default_generation_params())
        unknown = sorted(key for key in kwargs if key not in known and not key.startswith("_"))
        if unknown:
            fields = ", ".join(name for name in type(self).__annotations__ if name != "model_type")
            raise ValueError(f"{unknown[0]}={kwargs[unknown[0]]!r}: not a key of TapeLMConfig, which has {fields}")
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.num_attention_heads < 1:
            raise ValueError(f"num_attention_heads={self.num_attention_heads}: at least 1 is needed")
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size={self.hidden_size}: not a multiple of num_attention_heads="
                    f"{self.num_attention_heads}; give head_dim if that is meant"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.rope_parameters is not None:
            self.rope_parameters = dict(self.rope_parameters)  # the caller's dictionary stays as it is
        if kwargs.get("rope_scaling") is not None:
            kwargs["rope_scaling"] = dict(kwargs["rope_scaling"])
        self.encoding_options = dict(self.encoding_options or {})
        super().__post_init__(**kwargs)
        self.rope_parameters = complete_scaling(self.rope_parameters or {}, self.max_position_embeddings)
        self._check()

    def validate_rope(self) -> None:
        """Does nothing: `_check` knows more rules than transformers, which would warn of those that it does not."""

    def _check(self) -> None:
        sizes = self.encoding_sizes()
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1 is needed")
        if sizes.num_attention_heads % sizes.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads}: must divide num_attention_heads="
                f"{self.num_attention_heads}"
            )
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"pad_token_id={self.pad_token_id}: not a token of vocab_size={self.vocab_size}")
        for name, value in (("initializer_range", self.initializer_range), ("rms_norm_eps", self.rms_norm_eps)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value}: a positive number is needed")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act={self.hidden_act!r}: known activations are {', '.join(ACT2FN)}")
        check_scaling(sizes.rope_parameters, sizes.head_dim)
        get_encoding(self.encoding).check(sizes, self.parsed_encoding_options())

    def encoding_sizes(self) -> EncodingSizes:
        """The sizes that encodings depend on."""
        # `__post_init__` has filled these in.
        assert self.num_key_value_heads is not None
        assert self.head_dim is not None
        assert self.rope_parameters is not None
        return EncodingSizes(
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            num_hidden_layers=self.num_hidden_layers,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=self.rope_parameters,
            initializer_range=self.initializer_range,
        )

    def parsed_encoding_options(self) -> EncodingOptions:
        """`encoding_options`, checked."""
        return get_encoding(self.encoding).options_class.from_dict(self.encoding, self.encoding_options or {})
