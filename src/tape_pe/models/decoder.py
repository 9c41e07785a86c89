"""The decoder: tokens and position states pass through the layers side by side.

It is a Llama-style pre-norm decoder that knows no positional encoding by name: `tape_pe.encodings` says what is added
to the embeddings, which state the first layer reads, how a layer applies it to queries and keys, and how it updates it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import ModelOutput, can_return_tuple

from tape_pe.encodings import LayerEncoding, Tokens, get_encoding
from tape_pe.models.base import TapeLMPreTrainedModel
from tape_pe.models.cache import TapeCache
from tape_pe.models.checks import check_cache, check_labels, check_tokens
from tape_pe.models.configuration import TapeLMConfig
from tape_pe.models.generation import TapeGenerationMixin
from tape_pe.models.packing import predictable_labels, resolve_tokens
from tape_pe.ops import Bias, add_biases, materialized, positional_attention, prepare_bias
from tape_pe.ops.reference import attention_weights


@dataclass
class TapeModelOutput(ModelOutput):
    """Output of `TapeLMModel`.

    Attributes:
        last_hidden_state: `[B, N, hidden_size]`, after the final norm.
        cache: with `use_cache`, the cache with the new tokens added.
        hidden_states: with `output_hidden_states`, the embeddings and every layer's output (the last one after the
            final norm), each `[B, N, hidden_size]`.
        attentions: with `output_attentions`, every layer's attention weights `[B, H, N, Nk]`. Rows sum to 1; rows of
            padding, which see nothing, are 0.
        position_states: with `output_position_states`, the state that each layer reads, the start state first,
            `[B, Hkv, N, D]` packed `[cos | sin]` for most encodings, `[B, Hkv, N, 2D]` for those that say so (such as
            the structures of TAPE whose two channels of a pair differ). Empty for encodings without a state.
    """

    last_hidden_state: Tensor | None = None
    cache: TapeCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    position_states: tuple[Tensor, ...] | None = None


@dataclass
class TapeCausalLMOutput(ModelOutput):
    """Output of `TapeLMForCausalLM`; see `TapeModelOutput` for the fields not named here.

    Attributes:
        loss: with `labels`, the mean cross entropy in nats, a scalar.
        logits: `[B, N, vocab_size]`, or the positions that `logits_to_keep` selects.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: TapeCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    position_states: tuple[Tensor, ...] | None = None


class LayerResult(NamedTuple):
    """What a layer hands on: both streams, and its attention weights if they were asked for."""

    hidden_states: Tensor
    state: Tensor | None
    attentions: Tensor | None


class SelfAttention(nn.Module):
    """Causal grouped-query attention that averages values, and states where the encoding wants it."""

    def __init__(self, config: TapeLMConfig, layer_idx: int) -> None:
        super().__init__()
        sizes = config.encoding_sizes()
        heads, kv_heads, head_dim = sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim
        self.layer_idx = layer_idx
        self.head_dim = head_dim
        self.q_proj = nn.Linear(config.hidden_size, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        state: Tensor | None,
        bias: Bias | None,
        encoding: LayerEncoding,
        tokens: Tokens,
        cache: TapeCache | None,
        output_attentions: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns the output `[B, N, hidden_size]`, the averaged state `[B, H, N, Ds]` and the weights, or `None`s."""
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = encoding.rotate(query, key, state)
        averaged = state if encoding.averages_state else None
        if cache is not None:
            key, value, averaged = cache.append(key, value, averaged, self.layer_idx)
        bias = add_biases(bias, encoding.bias(query, key, tokens))
        if output_attentions:
            bias = materialized(bias)  # once for both calls
        segment_ids = tokens.segment_ids
        output, averaged = positional_attention(query, key, value, averaged, segment_ids=segment_ids, bias=bias)
        weights = attention_weights(query, key, segment_ids=segment_ids, bias=bias) if output_attentions else None
        return self.o_proj(output.transpose(1, 2).flatten(2)), averaged, weights


class GatedMLP(nn.Module):
    """act(x W_gate) * (x W_up), then W_down (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: TapeLMConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class DecoderLayer(GradientCheckpointingLayer):
    """One layer: attention, MLP, and the update of the position states."""

    def __init__(self, config: TapeLMConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = SelfAttention(config, layer_idx)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GatedMLP(config)
        self.encoding = get_encoding(config.encoding).layer(
            config.encoding_sizes(), config.parsed_encoding_options(), layer_idx
        )

    def forward(
        self,
        hidden_states: Tensor,
        state: Tensor | None,
        bias: Bias | None,
        tokens: Tokens,
        cache: TapeCache | None = None,
        output_attentions: bool = False,
    ) -> LayerResult:
        """Both streams, `[B, N, hidden_size]` and `[B | 1, Hkv | 1, N, Ds]`, in and out, with the bias shared by all
        layers. All three are positional arguments, without which reentrant checkpointing loses their gradients."""
        attended, averaged_state, weights = self.self_attn(
            self.input_layernorm(hidden_states), state, bias, self.encoding, tokens, cache, output_attentions
        )
        hidden_states = hidden_states + attended
        mlp_input = self.post_attention_layernorm(hidden_states)
        mlp_output = self.mlp(mlp_input)
        state = self.encoding(state, averaged_state, mlp_input, mlp_output)
        return LayerResult(hidden_states + mlp_output, state, weights)


class TapeLMModel(TapeLMPreTrainedModel):
    """Embeddings, layers and final norm."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012  (transformers' own form)

    def __init__(self, config: TapeLMConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.encoding = get_encoding(config.encoding)(config.encoding_sizes(), config.parsed_encoding_options())
        self.layers = nn.ModuleList(DecoderLayer(config, idx) for idx in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: TapeCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        output_position_states: bool | None = None,
        **kwargs: Any,
    ) -> TapeModelOutput:
        """See `TapeLMForCausalLM.forward`."""
        if kwargs.get("past_key_values") is not None:
            raise ValueError("past_key_values: the argument is called cache, and takes a TapeCache")
        check_tokens(input_ids, inputs_embeds, self.config.hidden_size)
        check_cache(cache)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        learning = self.training and torch.is_grad_enabled()
        if cache is not None and learning and self.gradient_checkpointing:
            raise ValueError("cache: activation checkpointing runs layers twice, which would add their tokens twice")
        if use_cache is None:
            use_cache = self.config.use_cache and not learning
        if use_cache and cache is None and not (learning and self.gradient_checkpointing):
            cache = TapeCache()
        tokens = resolve_tokens(
            inputs_embeds.shape[:2],
            inputs_embeds.device,
            input_ids,
            attention_mask,
            position_ids,
            document_ids,
            cache,
            kwargs,
        )
        return self._run(
            inputs_embeds,
            tokens,
            cache,
            self.config.output_hidden_states if output_hidden_states is None else output_hidden_states,
            self.config.output_attentions if output_attentions is None else output_attentions,
            bool(output_position_states),
        )

    def _run(
        self,
        hidden_states: Tensor,
        tokens: Tokens,
        cache: TapeCache | None,
        output_hidden_states: bool,
        output_attentions: bool,
        output_position_states: bool,
    ) -> TapeModelOutput:
        added = self.encoding.embed(tokens)
        if added is not None:
            hidden_states = hidden_states + added.to(hidden_states.dtype)
        dtype = hidden_states.dtype
        wide = torch.promote_types(dtype, torch.float32)
        state = self.encoding.start(tokens, wide)
        state = None if state is None else state.to(dtype)
        bias = prepare_bias(self.encoding.bias(tokens, wide), hidden_states.device)
        if cache is not None:
            cache.remember()  # only now: encodings may refuse tokens, and then the cache must be as before
        all_hidden, all_weights, all_states = [], [], []
        for layer in self.layers:
            all_hidden.append(hidden_states)
            all_states.append(state)
            hidden_states, state, weights = layer(
                hidden_states, state, bias, tokens=tokens, cache=cache, output_attentions=output_attentions
            )
            all_weights.append(weights)
        hidden_states = self.norm(hidden_states)
        batch, kv_heads = hidden_states.shape[0], self.config.encoding_sizes().num_key_value_heads
        return TapeModelOutput(
            last_hidden_state=hidden_states,
            cache=cache,
            hidden_states=(*all_hidden, hidden_states) if output_hidden_states else None,
            attentions=tuple(all_weights) if output_attentions else None,
            position_states=tuple(state.expand(batch, kv_heads, -1, -1) for state in all_states if state is not None)
            if output_position_states
            else None,
        )


class TapeLMForCausalLM(TapeLMPreTrainedModel, TapeGenerationMixin):
    """The decoder with a language-model head.

    A `transformers` model in every respect: `generate`, `save_pretrained`, `from_pretrained` and the Auto classes,
    `Trainer`, activation checkpointing and `torch.compile` work as with Llama.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  (transformers' own form)

    def __init__(self, config: TapeLMConfig) -> None:
        super().__init__(config)
        self.model = TapeLMModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: TapeCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        output_position_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> TapeCausalLMOutput:
        """Runs the decoder.

        Args:
            input_ids: `[B, N]` token ids.
            attention_mask: `[B, N]` or, with a cache, `[B, past + N]`; non-zero where a token is real. Padding may
                stand left or right. The cache remembers the padding of its own tokens.
            position_ids: `[B, N]` or `[1, N]`, consumed once, where the start state is built. By default real tokens
                count from 0 in each row and each document, cached ones included.
            document_ids: `[B, N]` integers >= 0, for packed rows: tokens see only their own document. Batches of
                transformers' `DataCollatorWithFlattening` need none, see `tape_pe.models.packing`.
            cache: what an earlier call returned as `outputs.cache`; `input_ids` are then the new tokens alone.
            inputs_embeds: `[B, N, hidden_size]` instead of `input_ids`.
            labels: `[B, N]` token ids, -100 where nothing is to be predicted; shifted here. Padding, the token after
                it and the first token of a document are never predicted.
            use_cache: whether to return a cache; default `config.use_cache`, and never in training.
            output_hidden_states: see `TapeModelOutput`.
            output_attentions: see `TapeModelOutput`; costs an N x N matrix per head and layer, changes no logits.
            output_position_states: see `TapeModelOutput`.
            logits_to_keep: compute logits of the last so many positions (0: all), or of the given ones.
            **kwargs: `num_items_in_batch` for the loss; `cu_seq_lens_q` or `seq_idx` of a flattening collator.

        Returns:
            The logits `[B, N, vocab_size]`, the loss if there are labels, and what else was asked for.

        Raises:
            ValueError: arguments that contradict each other or have the wrong shape.
        """
        if labels is not None:
            given = inputs_embeds if input_ids is None else input_ids
            check_labels(labels, None if given is None else given.shape[:2], logits_to_keep)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            document_ids=document_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            output_position_states=output_position_states,
            return_dict=True,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            past = 0 if outputs.cache is None else outputs.cache.get_seq_length() - labels.shape[1]
            labels = predictable_labels(labels, attention_mask, position_ids, document_ids, past, kwargs)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return TapeCausalLMOutput(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            position_states=outputs.position_states,
        )
