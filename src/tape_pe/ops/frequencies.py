"""Frequency rules: how fast each channel pair turns, and how that is stretched to lengths beyond the trained ones.

A rule is a dictionary in the form of Hugging Face's `rope_parameters` (or the older `rope_scaling`, with `type` for
`rope_type`) and has no memory: what was computed before, for whatever length, changes nothing.

The rules that read the length (`"dynamic"`, `"dynamic_yarn"`, `"longrope"`) turn all tokens of a sequence by the length
that it has now. So a sequence that grows beyond the original length changes the frequencies of its first tokens too,
and keys that a cache holds keep those of the length at which they were written, as in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ORIGINAL = "original_max_position_embeddings"
_LISTS = ("short_factor", "long_factor")
_MAY_BE_ZERO = ("mscale", "mscale_all_dim", "beta_fast", "beta_slow")
# Keys that configs carry for rules that do not read them: nothing is lost if they have one of these values, or any.
_HARMLESS: dict[str, tuple[Any, ...] | None] = {
    _ORIGINAL: None,
    "finetuned": None,
    "factor": (1,),
    "partial_rotary_factor": (1,),
}


class Frequencies(NamedTuple):
    """What a rule gives.

    Attributes:
        inverse: angular frequencies in radians per position, `[D / 2]`, or `[..., D / 2]` for the lengths `[...]` of a
            rule that reads them; fp64 (fp32 on devices without it).
        attention_factor: factor of cos and sin; its square scales the attention scores.
    """

    inverse: Tensor
    attention_factor: float


class _Rule(NamedTuple):
    """A frequency rule.

    Attributes:
        apply: `(frequencies, parameters, lengths) -> Frequencies`, with the unscaled frequencies `[D / 2]` and
            lengths `[..., 1]`.
        required: keys that it needs, all positive numbers (or lists of them).
        optional: further keys that it reads.
        reads_length: whether the length matters.
    """

    apply: Callable[[Tensor, Mapping[str, Any], Tensor | None], Frequencies]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    reads_length: bool = False


def rotary_frequencies(
    head_dim: int,
    *,
    theta: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    lengths: Tensor | None = None,
    device: torch.device | None = None,
) -> Frequencies:
    """Angular frequencies theta^(-2j/D), j < D/2, with a frequency rule applied.

    Rules, by `rope_type` (f is `factor`, L `original_max_position_embeddings`, N the length):

    * `"default"`: none.
    * `"linear"`: frequencies / f (position interpolation, Chen et al., arXiv 2306.15595).
    * `"ntk"`: base theta * f^(D / (D - 2)) (NTK-aware scaling of the base, whatever the length).
    * `"dynamic"`: base theta * (f N / L - (f - 1))^(D / (D - 2)) once N exceeds L (dynamic NTK). L counts where it is
      given; transformers always takes `max_position_embeddings`, the default here.
    * `"yarn"`: w (g + (1 - g) / f), g a ramp from 1 for pairs that turn more than `beta_fast` times in L to 0 for those
      that turn less than `beta_slow` times; cos and sin times 0.1 ln(f) + 1 (Peng et al., arXiv 2309.00071).
    * `"dynamic_yarn"`: `"yarn"`, with unscaled frequencies while N is at most L.
    * `"llama3"`: frequencies / f for wavelengths above L / `low_freq_factor`, unscaled below L / `high_freq_factor`,
      interpolated between (Llama 3.1).
    * `"longrope"`: frequencies / `short_factor`[j], or / `long_factor`[j] once N exceeds L; cos and sin times
      sqrt(1 + ln(f) / ln(L)) (Ding et al., arXiv 2402.13753).

    Args:
        head_dim: D, even.
        theta: the base.
        scaling: a rule; `None` is `"default"`. A key whose value is `None` is not given.
        lengths: N of each sequence, `[...]`; needed by the rules that read it.
        device: device of the result.

    Raises:
        ValueError: `head_dim` is not positive and even, `theta` is not positive, or see `check_scaling`.
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim={head_dim}: rotary encodings need a positive even head_dim")
    if not _is_positive(theta):
        raise ValueError(f"rope_theta={theta}: the base must be positive")
    scaling = check_scaling(scaling, head_dim)
    dtype = torch.float32 if device is not None and device.type == "mps" else torch.float64
    exponents = torch.arange(0, head_dim, 2, dtype=dtype, device=device) / head_dim
    return apply_rule(theta**-exponents, scaling, lengths, theta=theta)


def apply_rule(frequencies: Tensor, scaling: Mapping[str, Any], lengths: Tensor | None, *, theta: float) -> Frequencies:
    """Applies a checked rule to frequencies `[D / 2]`, which may be trained ones; `theta` is their base."""
    rule = RULES[rule_name(scaling)]
    if rule.reads_length and lengths is None:
        raise ValueError(f"lengths=None: rope_type={rule_name(scaling)!r} depends on the length")
    return rule.apply(frequencies, {**scaling, "rope_theta": theta}, None if lengths is None else lengths[..., None])


def rule_name(scaling: Mapping[str, Any] | None) -> Any:
    """The name of a rule: its `rope_type`, or `type` in older configs, or `"default"`."""
    scaling = scaling or {}
    return scaling.get("rope_type") or scaling.get("type") or "default"


def reads_length(scaling: Mapping[str, Any] | None) -> bool:
    """Whether a rule depends on the length."""
    return RULES[rule_name(scaling)].reads_length


def complete_scaling(scaling: Mapping[str, Any], max_position_embeddings: int) -> dict[str, Any]:
    """Fills in what a rule takes from the model's length: `original_max_position_embeddings`, and then `factor`.

    As in transformers, a missing original length is `max_position_embeddings`, and a missing factor of the rules that
    compare the two lengths (YaRN and LongRoPE) is `max_position_embeddings` over the original length.
    """
    scaling = dict(scaling)
    name = rule_name(scaling)
    rule = RULES.get(name)
    if rule is not None and _ORIGINAL in rule.required:
        if scaling.get(_ORIGINAL) is None:
            scaling[_ORIGINAL] = max_position_embeddings
        original = scaling[_ORIGINAL]
        if name in ("yarn", "dynamic_yarn", "longrope") and scaling.get("factor") is None and _is_positive(original):
            scaling["factor"] = max_position_embeddings / original
    return scaling


def check_scaling(scaling: Mapping[str, Any] | None, head_dim: int | None = None) -> Mapping[str, Any]:
    """Checks a rule and returns it (an empty one for `None`).

    Raises:
        ValueError: unknown `rope_type` or key, or a parameter that is missing, not positive or of the wrong length. The
            message names the key, its value and the rule.
    """
    if scaling is None:
        return {}
    name = rule_name(scaling)
    if name not in RULES:
        raise ValueError(f"rope_type={name!r}: known frequency rules are {', '.join(RULES)}")
    rule = RULES[name]
    known = {"rope_type", "rope_theta", "type", *rule.required, *rule.optional}
    for key, value in scaling.items():
        allowed = _HARMLESS.get(key, ())
        if key not in known and value is not None and allowed is not None and value not in allowed:
            raise ValueError(f"rope_parameters.{key}={value!r}: rope_type={name!r} reads {', '.join(sorted(known))}")
    for key in rule.required:
        value = scaling.get(key)
        values = value if key in _LISTS and isinstance(value, (list, tuple)) else [value]
        if not values or not all(_is_positive(v) for v in values):
            raise ValueError(f"rope_parameters.{key}={value!r}: rope_type={name!r} needs a positive number")
        if key in _LISTS and head_dim is not None and len(values) != head_dim // 2:
            raise ValueError(
                f"rope_parameters.{key} has {len(values)} numbers: head_dim={head_dim} needs {head_dim // 2}"
            )
    for key in rule.optional:
        _check_optional(key, scaling.get(key))
    _check_order(name, scaling)
    return scaling


def _check_optional(key: str, value: Any) -> None:
    """Checks a key that a rule reads but does not need; `None` is not given."""
    if key == "truncate":
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"rope_parameters.{key}={value!r}: true or false is needed")
    elif value is not None and not _is_positive(value) and not (key in _MAY_BE_ZERO and value == 0):
        raise ValueError(f"rope_parameters.{key}={value!r}: a positive number is needed")


def _check_order(name: str, scaling: Mapping[str, Any]) -> None:
    """Checks numbers of a rule that must stand in an order."""
    if name == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        if not high > low:
            raise ValueError(f"rope_parameters.high_freq_factor={high!r}: must be above low_freq_factor={low!r}")
    elif "yarn" in name:
        fast, slow = _betas(scaling)
        if fast < slow:
            raise ValueError(f"rope_parameters.beta_fast={fast!r}: must not be below beta_slow={slow!r}")
    elif name == "longrope" and scaling[_ORIGINAL] <= 1:
        raise ValueError(f"rope_parameters.{_ORIGINAL}={scaling[_ORIGINAL]!r}: LongRoPE needs a length above 1")


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _default(frequencies: Tensor, scaling: Mapping[str, Any], lengths: Tensor | None) -> Frequencies:
    return Frequencies(frequencies, 1.0)


def _linear(frequencies: Tensor, scaling: Mapping[str, Any], lengths: Tensor | None) -> Frequencies:
    return Frequencies(frequencies / scaling["factor"], 1.0)


def _rebase(frequencies: Tensor, ratio: Tensor | float) -> Tensor:
    """Frequencies of the base theta * ratio^(D / (D - 2)): pair j turns ratio^(2j / (D - 2)) times slower."""
    pairs = len(frequencies)
    if pairs == 1:
        raise ValueError("head_dim=2: this rule raises the base, which a single frequency does not have")
    exponents = torch.arange(pairs, dtype=frequencies.dtype, device=frequencies.device) / (pairs - 1)
    return frequencies * ratio**-exponents


def _ntk(frequencies: Tensor, scaling: Mapping[str, Any], lengths: Tensor | None) -> Frequencies:
    return Frequencies(_rebase(frequencies, float(scaling["factor"])), 1.0)


def _dynamic(frequencies: Tensor, scaling: Mapping[str, Any], lengths: Tensor | None) -> Frequencies:
    assert lengths is not None
    factor = scaling["factor"]
    excess = (lengths.to(frequencies.dtype) / scaling[_ORIGINAL]).clamp(min=1.0)
    return Frequencies(_rebase(frequencies, factor * excess - (factor - 1)), 1.0)


def _yarn(frequencies: Tensor, scaling: Mapping[str, Any], lengths: Tensor | None) -> Frequencies:
    factor, theta = scaling["factor"], scaling["rope_theta"]
    head_dim = 2 * len(frequencies)
    if theta <= 1:
        raise ValueError(f"rope_theta={theta}: YaRN needs a base above 1")

    def pair_that_turns(times: float) -> float:
        turns = scaling[_ORIGINAL] / (times * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(theta))

    low, high = (pair_that_turns(times) for times in _betas(scaling))
    if scaling.get("truncate") is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = (min(max(pair, 0), head_dim - 1) for pair in (low, high))
    if low == high:
        high += 0.001  # a step instead of a ramp
    pairs = torch.arange(len(frequencies), dtype=frequencies.dtype, device=frequencies.device)
    keep = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    return Frequencies(frequencies * (keep + (1 - keep) / factor), _yarn_attention_factor(scaling))


def _betas(scaling: Mapping[str, Any]) -> tuple[float, float]:
    return scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def magnitude(weight: float) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * weight * math.log(scaling["factor"]) + 1.0

    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)


def _dynamic_yarn(frequencies: Tensor, scaling: Mapping[str, Any], lengths: Tensor | None) -> Frequencies:
    assert lengths is not None
    scaled = _yarn(frequencies, scaling, lengths)
    inside = lengths <= scaling[_ORIGINAL]
    return Frequencies(torch.where(inside, frequencies, scaled.inverse), scaled.attention_factor)


def _llama3(frequencies: Tensor, scaling: Mapping[str, Any], lengths: Tensor | None) -> Frequencies:
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling[_ORIGINAL] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return Frequencies(frequencies * (keep + (1 - keep) / scaling["factor"]), 1.0)


def _longrope(frequencies: Tensor, scaling: Mapping[str, Any], lengths: Tensor | None) -> Frequencies:
    assert lengths is not None
    original, factor = scaling[_ORIGINAL], scaling["factor"]
    short, long = (frequencies.new_tensor(scaling[key]) for key in ("short_factor", "long_factor"))
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return Frequencies(frequencies / torch.where(lengths > original, long, short), attention_factor)


_YARN_OPTIONS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")

RULES: dict[str, _Rule] = {
    "default": _Rule(_default),
    "linear": _Rule(_linear, ("factor",)),
    "ntk": _Rule(_ntk, ("factor",)),
    "dynamic": _Rule(_dynamic, ("factor", _ORIGINAL), reads_length=True),
    "yarn": _Rule(_yarn, ("factor", _ORIGINAL), _YARN_OPTIONS),
    "dynamic_yarn": _Rule(_dynamic_yarn, ("factor", _ORIGINAL), _YARN_OPTIONS, reads_length=True),
    "llama3": _Rule(_llama3, ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)),
    "longrope": _Rule(
        _longrope, ("factor", "short_factor", "long_factor", _ORIGINAL), ("attention_factor",), reads_length=True
    ),
}
