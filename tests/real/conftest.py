"""The real model, which `make test-real` fetches before these tests run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tape_pe.language.pretrained import load_causal_lm

SCRIPT = Path(__file__).parents[2] / "scripts" / "fetch_smollm2.py"


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The folder of SmolLM2-135M-Instruct in fp32."""
    spec = importlib.util.spec_from_file_location("fetch_smollm2", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    folder = script.model_folder()
    if not folder.is_dir():
        pytest.fail(f"there is no {folder}: run `make smollm2` first")
    return folder


@pytest.fixture(scope="module")
def smollm2(smollm2_folder: Path) -> tuple[Any, Any]:
    """A model that the tests of a file may change, and its tokenizer."""
    return load_causal_lm(str(smollm2_folder))
