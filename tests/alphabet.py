"""A tiny checkpoint that spells the alphabet: "c" follows "ab", and EOS follows the last letter. One token is
"!" with the first half of "é", the next one the other half."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

from nanospec import LLM, SamplingParams, SpecConfig
from tests.drive import cycle_weights

EOS = "<e>"
TOKENS = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", ".", "!Ã", "©", EOS, "!", "Ã"]  # é is the bytes Ã ©
ALPHABET = "abcdefghijklmnopqrstuvwxyz .!é"  # the text of all tokens before EOS
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint of `cycle_model` with a byte-level tokenizer that has one merge."""
    folder = tmp_path_factory.mktemp("alphabet")
    config, weights = cycle_weights(len(TOKENS))
    described = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings, "rms_norm_eps": config.rms_norm_eps,
        "eos_token_id": TOKENS.index(EOS),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    save_file(weights, folder / "model.safetensors")
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(TOKENS)}, [("!", "Ã")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    backend.save(str(folder / "tokenizer.json"))
    return folder


def make(folder: Path, k: Any = 5, **options: Any) -> LLM:
    spec = SpecConfig(num_speculative_tokens=k)
    options = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 128, **options}
    return LLM(folder, spec=spec, **options)


def after(text: str) -> str:
    """Return a prompt that contains the alphabet and ends with `text`."""
    return ALPHABET + EOS + text


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 60, **options})
