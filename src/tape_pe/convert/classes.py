"""Classes of converted models, `TapeLlamaForCausalLM` and its kind, made from transformers' own.

`tape_pe.convert` gives them to a model, so that `save_pretrained` writes a config of the type `tape_llama`, which
`AutoModelForCausalLM.from_pretrained` reads back once this package is imported: never as a plain Llama. They can be
imported from here by name.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from tape_pe.convert.config import TapeConfig
from tape_pe.convert.form import RotaryForm
from tape_pe.convert.install import install_layers, uninstall_layers
from tape_pe.convert.layers import TapeDecoderLayer, set_class
from tape_pe.convert.structure import Structure, build_structure, find_decoder
from tape_pe.encodings.base import LayerEncoding

PREFIX = "Tape"
TYPE_PREFIX = "tape_"

_AUTO_CLASSES: tuple[tuple[Any, Any], ...] = (
    (AutoModel, MODEL_MAPPING_NAMES),
    (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    (AutoModelForQuestionAnswering, MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES),
    (AutoModelForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
    (AutoModelForTokenClassification, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
)

# What `AutoModelForCausalLM` can load without conversion in the same process. Others convert as well if they can be
# exact, and load after `register_architecture`.
MODEL_TYPES = (
    *("arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "granite"),
    *("helium", "llama", "ministral", "mistral", "mixtral", "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen3"),
    *("qwen3_moe", "seed_oss", "smollm3", "starcoder2"),
)


class TapeModelMixin(PreTrainedModel):
    """In front of a model class of transformers: builds TAPE into its layers, as its config says."""

    tape_base: type[PreTrainedModel]

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if not is_converted(self):
            install(self, _structure_of(self), TapeConfig.from_dict(config.tape))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, LayerEncoding):
            module.init_own_weights()
        else:
            super()._init_weights(module)


def is_converted(model: nn.Module) -> bool:
    """Whether TAPE is in a model (or in what a wrapper such as PEFT's holds)."""
    return any(isinstance(module, TapeDecoderLayer) for module in model.modules())


def check_converted(model: nn.Module) -> None:
    """Raises ValueError unless TAPE is in a model."""
    if not is_converted(model):
        raise ValueError(f"model={type(model).__name__}: not converted by tape_pe.convert")


def install(model: PreTrainedModel, structure: Structure, config: TapeConfig) -> None:
    """Puts TAPE into a model: its layers, its classes and its config."""
    install_layers(structure, config)
    model_config: Any = model.config
    forms = list(dict.fromkeys(plan.form for plan in structure.layers if plan.form is not None))
    config_class: Any = type(model_config)
    if not config_class.model_type.startswith(TYPE_PREFIX):
        model_config.__class__ = tape_config_class(config_class)
    model_config.tape = config.to_dict()
    model_config.tape_forms = [form.to_dict() for form in forms]
    model_config.tape_layers = [None if plan.form is None else forms.index(plan.form) for plan in structure.layers]
    for module in (model, structure.decoder):
        if not isinstance(module, TapeModelMixin):
            base: Any = type(module)
            set_class(module, tape_model_class(base))
            _CAN_RECORD_REGISTRY[module] = module._can_record_outputs


def uninstall(model: PreTrainedModel) -> None:
    """Undoes `install`."""
    model_config: Any = model.config
    decoder = model.base_model
    for module in {model, decoder}:
        if isinstance(module, TapeModelMixin):
            set_class(module, type(module).tape_base)
    uninstall_layers(decoder)
    if type(model_config).model_type.startswith(TYPE_PREFIX):
        model_config.__class__ = type(model_config).__mro__[1]
    for name in ("tape", "tape_forms", "tape_layers"):
        model_config.__dict__.pop(name, None)


def _structure_of(model: PreTrainedModel) -> Structure:
    """The structure that a config of a converted model describes."""
    config: Any = model.config
    forms = [RotaryForm(**values) for values in config.tape_forms]
    return build_structure(
        find_decoder(model), [None if index is None else forms[index] for index in config.tape_layers]
    )


@cache
def tape_config_class(base: Any) -> type[PreTrainedConfig]:
    """The config class of converted models whose config is a `base`."""
    name = f"{PREFIX}{base.__name__}"
    return type(name, (base,), {"__module__": __name__, "model_type": f"{TYPE_PREFIX}{base.model_type}"})


@cache
def tape_model_class(base: Any) -> type[TapeModelMixin]:
    """The class that models of class `base` get when they are converted."""
    values = {
        "__module__": __name__,
        "config_class": tape_config_class(base.config_class),
        "tape_base": base,
        # Loaded in half precision, position weights stay fp32, as conversion makes them.
        "_keep_in_fp32_modules_strict": [*(base._keep_in_fp32_modules_strict or ()), "tape"],
    }
    return type(f"{PREFIX}{base.__name__}", (TapeModelMixin, base), values)


def __getattr__(name: str) -> Any:
    base = getattr(transformers, name.removeprefix(PREFIX), None) if name.startswith(PREFIX) else None
    if isinstance(base, type) and issubclass(base, PreTrainedConfig):
        return tape_config_class(base)
    if isinstance(base, type) and issubclass(base, PreTrainedModel):
        return tape_model_class(base)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register_architecture(model_type: str) -> None:
    """Lets the Auto classes load converted models whose base has this `model_type`, such as `"llama"`.

    Raises:
        ValueError: transformers has no causal language model of this type.
    """
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if name is None:
        raise ValueError(f"model_type={model_type!r}: transformers has no causal language model of this type")
    tape_type = f"{TYPE_PREFIX}{model_type}"
    if tape_type in CONFIG_MAPPING:
        return
    config_class = tape_config_class(getattr(transformers, CONFIG_MAPPING_NAMES[model_type]))
    AutoConfig.register(tape_type, config_class)
    for auto_class, names in _AUTO_CLASSES:
        if model_type in names:
            auto_class.register(config_class, _lazy_class(names[model_type], config_class))
    # `Trainer` reads here which models shift labels themselves, for label smoothing.
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[tape_type] = f"{PREFIX}{name}"


def _lazy_class(name: str, config_class: type[PreTrainedConfig]) -> type:
    """What an Auto class needs of a model class, without importing the modeling file before it is used."""

    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        return tape_model_class(getattr(transformers, name)).from_pretrained(*args, **kwargs)

    def _from_config(*args: Any, **kwargs: Any) -> Any:
        return tape_model_class(getattr(transformers, name))._from_config(*args, **kwargs)

    methods = {method.__name__: staticmethod(method) for method in (from_pretrained, _from_config)}
    return type(f"{PREFIX}{name}", (), {"config_class": config_class, "__module__": __name__, **methods})


for _model_type in MODEL_TYPES:
    register_architecture(_model_type)
