"""Shared by all tests: small decoders with random weights everywhere, and the options of a short run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tape_pe.encodings import ENCODINGS
from tape_pe.models import TapeLMConfig, TapeLMForCausalLM
from tape_pe.options import ModelOptions, RunOptions
from tape_pe.tasks import Addition
from tape_pe.tasks.passkey import PasskeyTexts

VOCAB_SIZE = 61
# Options that an encoding cannot do without. Two tokens of three are digits, so that there are long numbers.
NEEDED_OPTIONS: dict[str, dict[str, Any]] = {"abacus": {"digit_token_ids": list(range(5, 45))}}
MakeModel = Callable[..., TapeLMForCausalLM]


@pytest.fixture(params=list(ENCODINGS))
def encoding(request: pytest.FixtureRequest) -> str:
    """The name of every registered encoding, in turn."""
    return request.param


@pytest.fixture
def encoding_options(encoding: str) -> dict[str, Any]:
    """Options that an encoding cannot do without."""
    return NEEDED_OPTIONS.get(encoding, {})


@pytest.fixture(params=[4, 2], ids=["mha", "gqa"])
def kv_heads(request: pytest.FixtureRequest) -> int:
    """Key/value heads for 4 query heads."""
    return request.param


@pytest.fixture
def make_config() -> Callable[..., TapeLMConfig]:
    """Builds the configuration of a small decoder; keywords override its keys."""

    def make(encoding: str = "tape", kv_heads: int = 2, **changes: Any) -> TapeLMConfig:
        sizes = {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": kv_heads,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "encoding": encoding,
        }
        if encoding in NEEDED_OPTIONS:
            changes["encoding_options"] = {**NEEDED_OPTIONS[encoding], **(changes.get("encoding_options") or {})}
        return TapeLMConfig(**{**sizes, **changes})

    return make


@pytest.fixture
def randomize() -> Callable[[torch.nn.Module], None]:
    """Gives every parameter random values, also those that start at zero, so that every path shows in the outputs."""

    def fill(model: torch.nn.Module, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                if "norm" in name:
                    parameter.copy_(1 + 0.2 * noise)
                elif ".encoding." in name:
                    parameter.copy_(0.3 * noise)
                else:
                    parameter.copy_(noise * (1.0 if "embed" in name else parameter.shape[-1] ** -0.5))

    return fill


@pytest.fixture
def make_model(
    make_config: Callable[..., TapeLMConfig], randomize: Callable[[torch.nn.Module], None]
) -> Callable[..., TapeLMForCausalLM]:
    """Builds a small decoder in eval mode with random weights everywhere."""

    def make(encoding: str = "tape", kv_heads: int = 2, **changes: Any) -> TapeLMForCausalLM:
        model = TapeLMForCausalLM(make_config(encoding, kv_heads, **changes))
        randomize(model)
        return model.eval()

    return make


@pytest.fixture
def make_tokens() -> Callable[..., Tensor]:
    """Random token ids of a shape, none of them 0, which the tests pad with."""

    def make(*shape: int, seed: int = 0) -> Tensor:
        return torch.randint(1, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(seed))

    return make


@pytest.fixture
def gradients() -> Callable[[torch.nn.Module, Tensor], dict[str, Tensor]]:
    """Gradients of a loss by parameter name; a parameter without one is an error."""

    def compute(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        loss.backward()
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        unused = [name for name, grad in grads.items() if grad is None]
        assert not unused, f"parameters without a gradient: {unused}"
        return {name: grad.clone() for name, grad in grads.items() if grad is not None}

    return compute


@pytest.fixture
def token_embeddings() -> Callable[[TapeLMForCausalLM], list[Tensor]]:
    """A list that collects the token embeddings of later calls, each a leaf that takes a gradient."""

    def collect(model: TapeLMForCausalLM) -> list[Tensor]:
        seen: list[Tensor] = []

        def cut(module: torch.nn.Module, args: Any, output: Tensor) -> Tensor:
            seen.append(output.detach().requires_grad_())
            return seen[-1]

        model.get_input_embeddings().register_forward_hook(cut)
        return seen

    return collect


@pytest.fixture
def layer_outputs() -> Callable[[torch.nn.Module], Any]:
    """A context that collects what every decoder layer returns: `(hidden_states, state)` of each, the last included."""

    @contextmanager
    def collect(model: TapeLMForCausalLM) -> Iterator[list[tuple[Tensor, Tensor | None]]]:
        results: list[tuple[Tensor, Tensor | None]] = []
        handles = [
            layer.register_forward_hook(lambda module, args, result: results.append((result[0], result[1])))
            for layer in model.model.layers
        ]
        try:
            yield results
        finally:
            for handle in handles:
                handle.remove()

    return collect


@pytest.fixture(scope="session")
def passkey_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of words and single digits that puts a BOS token before every text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<bos>", "<eos>"], show_progress=False
    )
    texts = PasskeyTexts()
    backend.train_from_iterator([texts.introduction, texts.filler, texts.key_sentence, texts.question] * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory, passkey_tokenizer: PreTrainedTokenizerFast) -> Path:
    """A folder with a tiny random Llama of transformers and that tokenizer, as any pretrained model comes."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(passkey_tokenizer), max_position_embeddings=256, eos_token_id=1, bos_token_id=0, **sizes
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    passkey_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def make_options(tmp_path: Path):
    """Options of a run that takes a second; keyword arguments go to its `training` section."""

    def make(name: str = "run", task: Addition | None = None, **training: Any) -> RunOptions:
        model = ModelOptions(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, encoding="tape"
        )
        defaults = {
            "max_steps": 20,
            "per_device_train_batch_size": 8,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
            "logging_steps": 4,
            "save_steps": 10,
            "seed": 3,
            "disable_tqdm": True,
        }
        task = task or Addition(max_digits=2, eval_max_digits=3, pairs_per_cell=4)
        return RunOptions(str(tmp_path / name), model, "addition", task, {**defaults, **training})

    return make
