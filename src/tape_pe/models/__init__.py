"""The decoder, registered with transformers' Auto classes when this package is imported."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tape_pe.models.cache import TapeCache
from tape_pe.models.configuration import TapeLMConfig
from tape_pe.models.decoder import TapeCausalLMOutput, TapeLMForCausalLM, TapeLMModel

# `Trainer` reads here which models shift labels themselves, for label smoothing.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TapeLMConfig.model_type] = TapeLMForCausalLM.__name__
AutoConfig.register(TapeLMConfig.model_type, TapeLMConfig)
AutoModel.register(TapeLMConfig, TapeLMModel)
AutoModelForCausalLM.register(TapeLMConfig, TapeLMForCausalLM)

__all__ = ["TapeCache", "TapeCausalLMOutput", "TapeLMConfig", "TapeLMForCausalLM", "TapeLMModel"]
