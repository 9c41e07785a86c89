"""A new frequency rule for a pretrained model, in the form of transformers' `rope_parameters`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RULES = ("linear", "ntk", "yarn")


def new_rope_parameters(rule: Mapping[str, Any], rotary_dim: int, config: Any) -> dict[str, Any]:
    """The `rope_parameters` of `config` with a rule of context extension put in.

    * `{"rope_type": "linear", "factor": f}`: positions divided by f (Chen et al., arXiv 2306.15595).
    * `{"rope_type": "ntk", "factor": f}`: theta multiplied by f^(D / (D - 2)), which divides the lowest frequency by f
      and leaves the highest; written as a new `rope_theta`.
    * `{"rope_type": "yarn", "factor": f, ...}`: Peng et al., arXiv 2309.00071, with the options of transformers.

    Args:
        rule: the new rule; with models of several rotary tables it is for `full_attention`.
        rotary_dim: D, the rotated channels of a head.
        config: the model's config, which is only read.

    Raises:
        ValueError: no mapping, an unknown rule, a factor below 1, a rule that the model's heads are too small for, or a
            model that has a rule other than the default already.
    """
    if not isinstance(rule, Mapping):
        raise ValueError(f"rope={rule!r}: a mapping is needed, such as {{'rope_type': 'linear', 'factor': 2.0}}")
    rope_type = rule.get("rope_type")
    if rope_type not in RULES:
        raise ValueError(f"rope.rope_type={rope_type!r}: allowed values are {', '.join(RULES)}")
    factor = rule.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor >= 1 or factor == float("inf"):
        raise ValueError(f"rope.factor={factor!r}: a number of at least 1 is needed")
    allowed = {"rope_type", "factor"}
    if rope_type == "yarn":
        allowed |= {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
        allowed |= {"original_max_position_embeddings"}
    for key in rule:
        if key not in allowed:
            raise ValueError(f"rope.{key}={rule[key]!r}: {rope_type} has {', '.join(sorted(allowed))}")
    for key in allowed - {"rope_type", "truncate"}:
        value = rule.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ValueError(f"rope.{key}={value!r}: a positive number is needed")
    own = rope_of_full_attention(config.rope_parameters)
    if own.get("rope_type", "default") != "default":
        raise ValueError(f"rope={dict(rule)!r}: the model has the rule {own['rope_type']!r} already")
    changes = dict(rule)
    if rope_type == "ntk":
        if rotary_dim == 2:
            raise ValueError(f"rope={dict(rule)!r}: ntk needs heads with more than one frequency")
        changes = {"rope_theta": own["rope_theta"] * factor ** (rotary_dim / (rotary_dim - 2))}
    elif rope_type == "yarn" and "original_max_position_embeddings" not in own:
        changes.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    return changed_rope_parameters(config.rope_parameters, changes)


def rope_of_full_attention(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Of a model's `rope_parameters`, those of its full attention: all of them, unless there are several tables."""
    return dict(parameters.get("full_attention", parameters))


def changed_rope_parameters(parameters: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A model's `rope_parameters`, those of its full attention changed."""
    own = {**rope_of_full_attention(parameters), **changes}
    return {**parameters, "full_attention": own} if "full_attention" in parameters else own


def rebuild_rotary(decoder: Any) -> None:
    """Makes a decoder's rotary table anew, from what its config says now."""
    device = next(decoder.rotary_emb.buffers()).device
    decoder.rotary_emb = type(decoder.rotary_emb)(config=decoder.config).to(device)
