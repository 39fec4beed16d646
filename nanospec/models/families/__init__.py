"""Families of models, one file each: how to read its `config.json`, and how its checkpoints name and store
weights. `base.py` is the interface. A file is imported when a model names one of its architectures."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from ...text.checks import read_json, shown
from ..config import ModelConfig
from .base import Family, Raw

FAMILIES: dict[str, str | type[Family]] = {
    "Gemma2ForCausalLM": "gemma.Gemma2",
    "Gemma3ForCausalLM": "gemma.Gemma3",
    "Gemma3ForConditionalGeneration": "gemma.Gemma3WithImages",
    "LlamaForCausalLM": "llama.Llama",
    "MistralForCausalLM": "llama.Mistral",
    "Phi3ForCausalLM": "phi3.Phi3",
    "Qwen2ForCausalLM": "qwen.Qwen2",
    "Qwen3ForCausalLM": "qwen.Qwen3",
}


def family_of(raw: Raw) -> Family:
    """Return the family that a `config.json` names. Raises ValueError if there is none."""
    names, supported = raw.get("architectures"), ", ".join(FAMILIES)
    if not isinstance(names, list) or not names:
        raise ValueError(f"'architectures' is missing or not a list; supported are {supported}.")
    if not isinstance(names[0], str) or names[0] not in FAMILIES:
        raise ValueError(f"Architecture {shown(names[0])} is not supported; supported are {supported}.")
    kind = FAMILIES[names[0]]
    if isinstance(kind, str):
        file, name = kind.split(".")
        kind = getattr(import_module(f".{file}", __name__), name)
    family: Family = kind()
    return family


def config_of(raw: Raw) -> ModelConfig:
    """Translate the content of a `config.json`. Raises ValueError for what is not supported."""
    return family_of(raw).config(raw)


def read_config(folder: str | Path) -> ModelConfig:
    """Read `config.json` in `folder`. Raises FileNotFoundError, or ValueError for what is not supported."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file; a model folder needs a config.json.")
    raw = read_json(path)
    try:
        return config_of(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
