"""The decoder, registered with transformers' Auto classes when this package is imported."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tape_pe.models.cache import TapeCache
from tape_pe.models.configuration import TapeLMConfig
from tape_pe.models.decoder import TapeCausalLMOutput, TapeLMForCausalLM, TapeLMModel

AutoConfig.register(TapeLMConfig.model_type, TapeLMConfig)
AutoModel.register(TapeLMConfig, TapeLMModel)
AutoModelForCausalLM.register(TapeLMConfig, TapeLMForCausalLM)

__all__ = ["TapeCache", "TapeCausalLMOutput", "TapeLMConfig", "TapeLMForCausalLM", "TapeLMModel"]
