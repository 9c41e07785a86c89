"""`generate` for decoders that cache position states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin

from tape_pe.models.cache import TapeCache
from tape_pe.ops import make_segment_ids, segment_positions


class TapeGenerationMixin(GenerationMixin):
    """transformers' `generate` with a `TapeCache`, and with `document_ids` for packed prompts."""

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        cache: TapeCache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        document_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As in transformers; `document_ids` belong to the prompt, and later tokens go on with its last document."""
        inputs = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            cache=cache,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        if document_ids is not None:
            given = inputs["input_ids"] if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
            past = 0 if cache is None else cache.get_seq_length()
            columns = torch.arange(past, past + given.shape[1], device=document_ids.device)
            inputs["document_ids"] = document_ids[:, columns.clamp(max=document_ids.shape[1] - 1)]
        return inputs

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
        """As in transformers, but each document of the prompt counts from 0, as in `forward`."""
        document_ids = model_kwargs.get("document_ids")
        if document_ids is None:
            return super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)
        mask = model_kwargs.get("attention_mask")
        if mask is not None and (missing := mask.shape[1] - document_ids.shape[1]) > 0:
            document_ids = torch.cat([document_ids, document_ids[:, -1:].expand(-1, missing)], dim=1)
        segment_ids = make_segment_ids(mask, document_ids)
        assert segment_ids is not None
        return segment_positions(segment_ids)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        implementation = generation_config.cache_implementation
        if implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={implementation!r}: position states need a TapeCache, which is dynamic"
            )
        if generation_config.use_cache is not False and model_kwargs.get("cache") is None:
            model_kwargs["cache"] = TapeCache()
