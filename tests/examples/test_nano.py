"""`examples/nano.py` generates the tokens of the engine."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from examples import nano
from nanospec import LLM, SamplingParams, SpecConfig
from nanospec.kernels.launch import forced
from nanospec.models.weights import load_model
from tests.alphabet import after
from tests.drive import Job, make_engine, run
from tests.no_gpu import TapeCapture
from tests.random_weights import random_weights
from tests.tiny import tiny_config

STOPS = [38, 53]
PROMPTS = [[1, 2, 3, 4] * 5 + [1, 2], [7], [9, 8, 9, 8, 9]]
LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]}
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}


def write_model(folder: Path, described: dict[str, Any], **overrides: Any) -> Path:
    """Write a random model of `tiny_config`, in two files, and return its folder."""
    is_qwen = described is QWEN3
    c = tiny_config(qk_norm=is_qwen, tie_word_embeddings=is_qwen, **overrides)
    config = {
        **described, "vocab_size": c.vocab_size, "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size, "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads, "head_dim": c.head_dim,
        "max_position_embeddings": c.max_position_embeddings, "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope.theta, "eos_token_id": STOPS,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    get = random_weights(c, torch.float32, "cpu", seed=0)
    weights = [(name, get(name)) for name in c.parameter_shapes()]
    save_file(dict(weights[:5]), folder / "model-00001-of-00002.safetensors")
    save_file(dict(weights[5:]), folder / "model-00002-of-00002.safetensors")
    index = {
        name: f"model-0000{1 if i < 5 else 2}-of-00002.safetensors" for i, (name, _) in enumerate(weights)
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def nano_tokens(
    folder: Path, dtype: torch.dtype, prompts: Sequence[list[int]], **sampling: Any
) -> list[list[int]]:
    """Return the tokens of `nano`. Checks that drafts were accepted, if there were any."""
    model = nano.Model(folder, dtype, torch.device("cpu"))
    outputs = nano.generate(model, prompts, nano.Sampling(**sampling))
    num_tokens = sum(len(output.token_ids) for output in outputs)
    num_steps = sum(output.num_steps for output in outputs)
    assert (num_steps < num_tokens) == (sampling["max_k"] > 0)
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("described", [LLAMA, QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_tokens_equal_those_of_the_engine(
    described: dict[str, Any], dtype: torch.dtype, temperature: float, tmp_path: Path
) -> None:
    folder = write_model(tmp_path, described)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40, stop_token_ids=STOPS)
    for k in (None, 4):
        engine = make_engine(load_model(folder, dtype, "cpu"), k)
        wanted = [request.output_ids for request in run(engine, [Job(prompt, params) for prompt in PROMPTS])]
        options = {"max_tokens": 40, "max_k": k or 0, "temperature": temperature, "seed": 3}
        assert nano_tokens(folder, dtype, PROMPTS, **options) == wanted
    assert any(ids[-1] in STOPS for ids in wanted)
    assert any(ids[-1] not in STOPS for ids in wanted)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_captured_triton_steps(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret the kernels of steps captured as on a GPU: the steps do not wait for the device."""

    def capture(run: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
        tape = TapeCapture(run)  # type: ignore[arg-type]

        def replay() -> Tensor:
            tape.replay()
            return tape.result  # type: ignore[return-value]

        return replay

    monkeypatch.setattr(nano, "capture", capture)
    folder = write_model(tmp_path, QWEN3, num_layers=1)
    prompts, options = PROMPTS[::2], {"max_tokens": 8, "temperature": 0.0}
    with forced("triton"):
        plain, speculative = (nano_tokens(folder, dtype, prompts, max_k=k, **options) for k in (0, 2))
    assert plain == speculative
    if dtype == torch.float32:
        monkeypatch.undo()
        assert plain == nano_tokens(folder, dtype, prompts, max_k=0, **options)


def test_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(folder), "--dtype", "float32", "--max-k", "5"]
    nano.main([*options, after("ab"), "x"])
    long, short = capsys.readouterr().out.strip().split("\n\n")
    assert long.startswith(f"{after('ab')}cdefghijklmnopqrstuvwxyz .!é\n[29 tokens in ")
    assert float(long.split()[-3]) > 2
    assert short == "xyz .!é\n[7 tokens in 7 steps: 1.00 per step]"


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ([""], "0 tokens of a prompt and --max-tokens 128 must be at least 1 each and at most 512 together."),
        (["a", "--max-tokens", "0"], "--max-tokens 0 must"),
        (["a", "--max-tokens", "512"], "--max-tokens 512 must"),
    ],
)
def test_errors(folder: Path, args: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        nano.main(["--model", str(folder), *args])
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architectures": ["Gemma3ForCausalLM"]}, "Gemma3ForCausalLM"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_type"),
    ],
)
def test_unsupported_models(changes: dict[str, Any], problem: str, folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ValueError, match=rf"is not supported \(.*{problem}.*\); use"):
        nano.read_config(tmp_path)


@pytest.mark.slow
def test_smollm2(smollm2: Path) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. The quick"
    llm = LLM(smollm2, spec=SpecConfig("none"), dtype="float32", max_model_len=64, max_num_seqs=1)
    wanted = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24))[0]
    prompts = [llm.tokenizer.encode(prompt)]
    assert nano_tokens(smollm2, torch.float32, prompts, max_tokens=24, max_k=4) == [wanted.token_ids]
