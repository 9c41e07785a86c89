"""What all models share: start weights, and loading and saving that neither loses nor leaves half-written anything."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from tape_pe.encodings import Encoding, LayerEncoding
from tape_pe.files import staging_folder
from tape_pe.models.configuration import TapeLMConfig

# Files that hold the weights, in one piece or in shards with an index.
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


class TapeLMPreTrainedModel(PreTrainedModel):
    """Base class of the models."""

    config: TapeLMConfig
    config_class = TapeLMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012  (transformers' own form)
    _can_compile_fullgraph = True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, (Encoding, LayerEncoding)):
            module.init_own_weights()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, but refuses weights that are missing, unexpected, misshapen, or not finite.

        Raises:
            ValueError: the checkpoint does not hold exactly the weights of the model, one holds NaN or infinity, or a
                file is damaged.
        """
        with_info = kwargs.pop("output_loading_info", False)
        kwargs.update(output_loading_info=True, ignore_mismatched_sizes=True)  # raised below, with their names
        try:
            model, info = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except SafetensorError as error:
            raise ValueError(f"{pretrained_model_name_or_path}: a file of weights is damaged ({error})") from error
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if keys := sorted(str(key) for key in info.get(kind, ())):
                raise ValueError(f"{pretrained_model_name_or_path}: {kind.replace('_', ' ')} in the checkpoint: {keys}")
        for name, parameter in model.named_parameters():
            if parameter.device.type != "meta" and not bool(torch.isfinite(parameter).all()):
                raise ValueError(f"{pretrained_model_name_or_path}: {name} holds NaN or infinity")
        return (model, info) if with_info else model

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As in transformers, but every file is written under a temporary name and renamed when it is whole."""
        target = Path(save_directory)
        if kwargs.get("push_to_hub"):
            kwargs.setdefault("repo_id", target.name)  # else it would be that of the scratch folder
        with staging_folder(target) as scratch:
            super().save_pretrained(scratch, *args, **kwargs)
            new = {path.name for path in scratch.iterdir()}
            stale = {path for path in target.iterdir() if _WEIGHTS.fullmatch(path.name) and path.name not in new}
            # The index follows its shards, and the config goes last: it is what makes the folder a model.
            for name in sorted(new, key=lambda name: (name == "config.json", name.endswith(".index.json"), name)):
                if name == "config.json" and any(_WEIGHTS.fullmatch(other) for other in new):
                    for path in stale:  # transformers reads a single file before shards, even an older one
                        path.unlink()
                os.replace(scratch / name, target / name)
