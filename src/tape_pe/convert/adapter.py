"""What was trained of a converted model, in a folder of two small files, and back onto its base.

`tape_adapter.safetensors` holds the weights, `tape_adapter.json` everything else: options, frequency rule, what
identifies the base (see `tape_pe.convert.fingerprint`), versions, and the SHA-256 of the weights that belong to it.

The JSON file is the one that counts. A save writes the new weights beside the old ones, then replaces the JSON file,
then renames the weights; wherever it is interrupted, the hash leads to a whole adapter, the old one or the new one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tape_pe.convert.classes import is_converted
from tape_pe.convert.config import TapeConfig
from tape_pe.convert.engine import convert, own_config, tape_config
from tape_pe.convert.fingerprint import check_sizes, check_values, fingerprint, tape_names
from tape_pe.convert.rules import rebuild_rotary
from tape_pe.files import read_json, staging_folder, write_json
from tape_pe.results import library_versions

Model = TypeVar("Model", bound=PreTrainedModel)

WEIGHTS_FILE = "tape_adapter.safetensors"
CONFIG_FILE = "tape_adapter.json"
FORMAT = 1

_NEXT_FILE = "tape_adapter.next.safetensors"  # new weights on their way to WEIGHTS_FILE
_KEYS = {
    "format": int,
    "versions": dict,
    "base": dict,
    "tape": dict,
    "rope_parameters": dict,
    "max_position_embeddings": int,
    "trained": list,
    "sha256": str,
}


def save_adapter(model: PreTrainedModel, folder: str | os.PathLike[str]) -> Path:
    """Saves TAPE's weights and every other parameter that trains (`requires_grad`), tied ones once.

    Args:
        model: a converted model. Freeze what was not trained (`tape_pe.freeze_base`): the adapter of a model in which
            everything trains is as large as the model.
        folder: is made if there is none; an adapter in it is replaced, and survives whole if the save is interrupted.

    Returns:
        The folder.

    Raises:
        TypeError: `model` is not a model of transformers itself, but a wrapper.
        ValueError: it is not converted, holds layers of PEFT, or a weight to be saved is NaN, infinite or not loaded;
            nothing was written then.
    """
    _check_model(model, "model")
    config = tape_config(model)
    own = tape_names(model)
    tensors = {name: p.detach() for name, p in model.named_parameters() if name in own or p.requires_grad}
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(f"model: {name} is on the meta device; load or gather the weights before saving")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"model: {name} holds NaN or infinity; a broken adapter is not saved")
    trained = [name for name in tensors if name not in own]
    values = {
        "format": FORMAT,
        "versions": library_versions(),
        "base": fingerprint(model, trained),
        "tape": config.to_dict(),
        "rope_parameters": _plain(model.config.rope_parameters),
        "max_position_embeddings": model.config.max_position_embeddings,
        "trained": trained,
    }
    target = Path(folder)
    with staging_folder(target) as staging:
        weights = staging / WEIGHTS_FILE
        save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, weights, metadata={"format": "pt"})
        _finish_interrupted_save(target)
        os.replace(weights, target / _NEXT_FILE)
        write_json(target / CONFIG_FILE, {**values, "sha256": _sha256(target / _NEXT_FILE)})
        os.replace(target / _NEXT_FILE, target / WEIGHTS_FILE)
    return target


def load_adapter(base_model: Model, folder: str | os.PathLike[str], *, check: bool = True) -> Model:
    """Puts a saved adapter onto its base, in place. Logits are then those of the model that was saved, bit for bit.

    TAPE's weights keep the dtype that they were saved in, fp32 as a rule, also where the base is in bf16; trained
    parameters of the base take the base's dtype. Afterwards exactly the parameters of the adapter require gradients.

    Args:
        base_model: the base, as loaded by transformers (it is converted here, with the options and the frequency rule
            of the adapter), or converted with the same options.
        folder: what `save_adapter` wrote.
        check: compare the base's frozen weights with those that the adapter was trained on, and the logits before and
            after conversion. `False` is for a base that differs on purpose, such as a quantised one whose tensors have
            the same names and shapes.

    Returns:
        The same model.

    Raises:
        FileNotFoundError: there is no such folder, or it lacks a file.
        TypeError: `base_model` is not a model of transformers itself, but a wrapper.
        ValueError: the files are damaged or do not belong together, weights are missing, unexpected, misshapen or not
            finite, or the base has another architecture, other sizes, other weights or other options; the base is as
            it was.
        UnsupportedModelError: see `tape_pe.convert`.
    """
    source = Path(folder)
    values = _read_config(source)
    tensors = _read_weights(source, values["sha256"])
    config = TapeConfig.from_dict(values["tape"])
    _check_model(base_model, "base_model")
    check_sizes(base_model, values["base"])
    if check:
        check_values(base_model, values["base"])
    with own_config(base_model):
        if is_converted(base_model):
            _check_options(base_model, config, values)
        else:
            _set_rope(base_model, values)
            convert(base_model, config, check=check)
        _check_tensors(base_model, tensors, values["trained"], source)
        _put(base_model, tensors)
    return base_model


def _check_model(model: Any, argument: str) -> None:
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"{argument}={kind}: a transformers.PreTrainedModel is needed, without wrappers (a PEFT model saves and "
            "loads TAPE by itself, see tape_pe.convert.peft)"
        )
    if any(type(module).__module__.partition(".")[0] == "peft" for module in model.modules()):
        raise ValueError(
            f"{argument}={kind}: it holds layers of PEFT; merge_and_unload() them first, or save with PEFT"
        )


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    return json.loads(json.dumps(value))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _finish_interrupted_save(folder: Path) -> None:
    """Renames weights whose JSON file is in place already: they are the adapter, and must not be overwritten."""
    try:
        expected = _read_config(folder)["sha256"]
    except (FileNotFoundError, ValueError):
        return
    if (folder / _NEXT_FILE).is_file() and _sha256(folder / _NEXT_FILE) == expected:
        os.replace(folder / _NEXT_FILE, folder / WEIGHTS_FILE)


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise FileNotFoundError(f"folder={str(folder)!r}: there is no such folder")
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: {folder} holds no adapter")
    values = read_json(path)
    if values.get("format") != FORMAT:
        raise ValueError(f"{path}: format={values.get('format')!r}; this version of tape-pe reads format {FORMAT}")
    if missing := [key for key in _KEYS if key not in values]:
        raise ValueError(f"{path}: no {', '.join(missing)}")
    for key, kind in _KEYS.items():
        if not isinstance(values[key], kind):
            raise ValueError(f"{path}: {key}={values[key]!r}: not what an adapter has there, the file is damaged")
    return values


def _read_weights(folder: Path, expected: str) -> dict[str, Tensor]:
    """The weights with this hash, all finite."""
    paths = [folder / name for name in (WEIGHTS_FILE, _NEXT_FILE) if (folder / name).is_file()]
    if not paths:
        raise FileNotFoundError(f"{folder / WEIGHTS_FILE} does not exist")
    path = next((path for path in paths if _sha256(path) == expected), None)
    if path is None:
        raise ValueError(f"{paths[0]} does not belong to {CONFIG_FILE} (its SHA-256 differs), or is damaged")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{path}: {name} holds NaN or infinity")
    return tensors


def _rope(values: Mapping[str, Any]) -> tuple[Any, Any]:
    return _plain(values["rope_parameters"]), values["max_position_embeddings"]


def _check_options(model: PreTrainedModel, config: TapeConfig, values: Mapping[str, Any]) -> None:
    found, wanted = tape_config(model).to_dict(), config.to_dict()
    for name, value in wanted.items():
        if found[name] != value:
            raise ValueError(f"base_model is converted with {name}={found[name]!r}: the adapter has {value!r}")
    for name, ours, theirs in zip(
        ("rope_parameters", "max_position_embeddings"), _rope(vars(model.config)), _rope(values), strict=True
    ):
        if ours != theirs:
            raise ValueError(f"base_model has {name}={ours!r}: the adapter has {theirs!r}")


def _set_rope(model: PreTrainedModel, values: Mapping[str, Any]) -> None:
    model_config: Any = model.config
    if _rope(vars(model_config)) != _rope(values):
        model_config.rope_parameters, model_config.max_position_embeddings = _rope(values)
        rebuild_rotary(model.base_model)


def _check_tensors(model: nn.Module, tensors: Mapping[str, Tensor], trained: list[str], source: Path) -> None:
    expected = [*sorted(tape_names(model)), *trained]
    if missing := [name for name in expected if name not in tensors]:
        raise ValueError(f"{source}: missing weights {missing}")
    if unexpected := sorted(set(tensors) - set(expected)):
        raise ValueError(f"{source}: unexpected weights {unexpected}")
    parameters = dict(model.named_parameters())
    for name, tensor in tensors.items():
        if tensor.shape != parameters[name].shape:
            raise ValueError(
                f"{source}: {name} has the shape {tuple(tensor.shape)}, the model's {tuple(parameters[name].shape)}"
            )


@torch.no_grad()
def _put(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Sets the parameters of these names; all of them, or in case of an error none."""
    own = tape_names(model)
    parameters = dict(model.named_parameters())
    new = {
        name: tensor.to(parameters[name].device, tensor.dtype if name in own else parameters[name].dtype)
        for name, tensor in tensors.items()
    }
    # From here on nothing is computed or allocated. Tied parameters are one object, so they stay tied.
    for name, parameter in parameters.items():
        if name in new:
            parameter.data = new[name]
        parameter.requires_grad_(name in new)
