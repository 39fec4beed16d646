"""Speculative decoding on one page, on top of `nanospec.kernels` alone. Start reading here.

    python examples/nano.py --model weights/smollm2-135m-instruct "1 2 3 4 1 2 3 4 1 2 3"

A small decoding step takes the time of reading the weights once, so scoring five tokens takes about as long
as scoring one. A step therefore guesses up to K next tokens of each text, the drafts, and scores them all in
one forward pass:

    propose   find the last tokens of the text earlier in the text; the drafts are what followed there
    lay out   put the last token of each text and its drafts into one flat batch
    forward   compute the logits after each of these tokens, and write their keys and values to the cache
    sample    draw the model's own token after each of them; its noise depends on seed and position only
    commit    accept the drafts that equal the model's tokens, up to the first that does not

A step appends the accepted drafts and the model's token after them. So all tokens are the model's own, and
drafts change the speed but not the output (on a CPU, up to rounding).

This file has a fixed batch and no server. At full size, the same ideas are in `nanospec/`: `device/step.py`
(the step), `device/graphs.py` (CUDA graphs), `models/decoder.py` (the model), `engine/scheduler.py` and
`engine/blocks.py` (requests that come and go), `drafters/policy.py` (the choice of K).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from nanospec.kernels import MAX_DRAFTS, RUNNING
from nanospec.kernels.batch import Batch, Chunk
from nanospec.kernels.layer.attention import attention
from nanospec.kernels.layer.linear import Linear, make_linear
from nanospec.kernels.layer.residual import Norm, embed, rms_norm
from nanospec.kernels.layer.rope_cache import Norms, cos_sin, rope_cache
from nanospec.kernels.sampling.sample import sample
from nanospec.kernels.speculation import ngram
from nanospec.kernels.speculation.layout import lay_out
from nanospec.kernels.speculation.report import decode
from nanospec.kernels.speculation.trim import trim
from nanospec.kernels.speculation.verify import commit
from nanospec.kernels.table import Table
from nanospec.kernels.transfer import write

BLOCK_SIZE = 16  # tokens per block of the KV cache
MIN_MATCH, MAX_MATCH = 1, 8  # lengths of the n-grams to look up, in tokens
ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
UNSUPPORTED = ("attention_bias", "mlp_bias", "quantization_config", "rope_scaling", "use_sliding_window")


class Sampling(NamedTuple):
    """How to continue the prompts."""

    max_tokens: int = 128
    max_k: int = 8  # maximum number of drafts per text and step; 0: no speculation
    temperature: float = 0.0  # 0: greedy
    seed: int = 0


@dataclass
class Output:
    """The continuation of a prompt."""

    token_ids: list[int] = field(default_factory=list)
    num_steps: int = 0


@torch.inference_mode()
def generate(model: Model, prompts: Sequence[list[int]], sampling: Sampling) -> list[Output]:
    """Return the continuation of each prompt, a list of at least one token id."""
    table = new_table(model, prompts, sampling)
    cache = model.new_cache(table.block_table.numel())
    rows = torch.full((len(prompts),), -1, dtype=torch.int32, device=model.device)  # [B]
    # Capturing runs the steps, so at first all rows are -1, that is, unused.
    steps = [partial(step, model, cache, table, rows, k) for k in range(sampling.max_k + 1)]
    replays = [capture(each, model.device) for each in steps]
    rows.copy_(torch.arange(len(prompts)))
    prefill(model, cache, table, prompts)
    outputs, k = [Output() for _ in prompts], sampling.max_k
    while (table.finished == RUNNING).any():  # waits for the device; the engine is a step ahead
        reports = decode(replays[k]().tolist())  # one per row
        for output, report in zip(outputs, reports, strict=True):
            output.token_ids += report.tokens
            output.num_steps += bool(report.tokens)  # finished rows get no tokens
        # A simple policy: propose more after drafts were accepted, but always one, to notice repetition.
        most = max(report.num_accepted for report in reports)
        k = min(max(2 * most, 1), sampling.max_k)
    return outputs


def new_table(model: Model, prompts: Sequence[list[int]], sampling: Sampling) -> Table:
    """Return the state of all texts on the device, one row each: tokens, sampling parameters and blocks."""
    max_context = max(map(len, prompts)) + sampling.max_tokens
    table = Table.empty(len(prompts), max_context, BLOCK_SIZE, model.vocab_size, model.device)
    for row, prompt in enumerate(prompts):
        write(table.tokens, row, prompt)
        write(table.stop_ids, row, [*model.stop_ids, -1], end=table.num_stops)  # padded with -1
        table.num_tokens[row] = len(prompt)
        table.max_len[row] = len(prompt) + sampling.max_tokens
    for column, value in (
        (table.temperature, sampling.temperature),
        (table.top_p, 1),
        (table.seed, sampling.seed),
        (table.max_k, sampling.max_k),
        (table.min_n, MIN_MATCH),
        (table.max_n, MAX_MATCH),
    ):
        column.fill_(value)
    # The keys and values of position p of a row are in block `block_table[row, p // BLOCK_SIZE]`, which may
    # be anywhere in the cache. Here a row has all of its blocks from the start; the engine adds them later.
    blocks = table.block_table  # [B, max_blocks]
    blocks.copy_(torch.arange(blocks.numel()).view_as(blocks))
    return table


def prefill(model: Model, cache: Tensor, table: Table, prompts: Sequence[list[int]]) -> None:
    """Write the keys and values of the prompts to the cache, except those of the last tokens, which the first
    step scores. All prompts are in one flat batch."""
    chunks = [Chunk(row, 0, len(prompt) - 1) for row, prompt in enumerate(prompts) if len(prompt) > 1]
    if chunks:
        model.forward(Batch.from_chunks(table, chunks), cache)


def step(model: Model, cache: Tensor, table: Table, rows: Tensor, k: int) -> Tensor:
    """Append 1 to k + 1 tokens to each of the `rows` [B] that is not finished. Return a report for `decode`.

    The keys and values of rejected drafts are left in the cache behind the text; the next step overwrites
    them. On a GPU, the shapes are those of k drafts per row, and the number of drafts is known on the device
    only. So the step does not wait for the device and can be captured.
    """
    proposal = ngram.propose(table, rows, k, MAX_MATCH)  # drafts [B, k], the first num_drafts [B] of each row
    q_len = trim(table, rows, proposal, None)  # [B], tokens to score: 1 + drafts, or 0 if finished
    last = (table.num_tokens[rows.clamp(min=0)] - 1).clamp(min=0)  # [B], index of the last token of the text
    batch = lay_out(table, rows, last, q_len, k + 1, proposal.drafts)  # T tokens, row after row
    hidden = model.forward(batch, cache)  # [T, H]
    logits = model.lm_head(hidden, num_used=batch.num_used)  # [T, V]
    targets = sample(logits, table, batch)  # [T], the model's token after each token
    return commit(targets, batch, table, proposal).report  # [B, 6 + 2 * (k + 1)]


def capture(run: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Record the kernels of a step as a CUDA graph, and return a function that launches them all at once. Its
    inputs and outputs are tensors at fixed addresses. On a CPU, return `run`."""
    if device.type == "cpu":
        return run
    for _ in range(2):
        run()  # compiles the kernels, which is not possible in a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        report = run()

    def replay() -> Tensor:
        graph.replay()
        return report

    return replay


class Layer(NamedTuple):
    """The weights of a decoder layer. q, k and v are fused into one matrix, and so are gate and up."""

    input_norm: Norm
    qkv: Linear
    qk_norms: Norms  # of each head of q and k (Qwen3), or None
    o: Linear
    post_norm: Norm
    gate_up: Linear
    down: Linear


class Model:
    """A Llama-like decoder. The batch defines which tokens belong together and where their keys and values
    are stored, so one `forward` serves prompts and steps."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Load the safetensors files of a Hugging Face model. Raises ValueError if it is not supported."""
        self.dtype, self.device, config = dtype, device, read_config(folder)
        stored: dict[str, Tensor] = {}
        for file in folder.glob("*.safetensors"):
            stored |= load_file(file, str(device))

        def weight(*names: str) -> Tensor:
            """Return the concatenated rows of these weights."""
            return torch.cat([stored[f"{name}.weight"] for name in names]).to(dtype)

        def norm(name: str) -> Norm:
            return Norm(weight(name), config["rms_norm_eps"])

        def layer(index: int) -> Layer:
            name = f"model.layers.{index}"
            attn, mlp = f"{name}.self_attn", f"{name}.mlp"
            has_norms = f"{attn}.q_norm.weight" in stored
            return Layer(
                input_norm=norm(f"{name}.input_layernorm"),
                qkv=make_linear(weight(f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj")),
                qk_norms=(norm(f"{attn}.q_norm"), norm(f"{attn}.k_norm")) if has_norms else None,
                o=make_linear(weight(f"{attn}.o_proj")),
                post_norm=norm(f"{name}.post_attention_layernorm"),
                gate_up=make_linear(weight(f"{mlp}.gate_proj", f"{mlp}.up_proj")),
                down=make_linear(weight(f"{mlp}.down_proj")),
            )

        self.embedding = weight("model.embed_tokens")  # [V, H]
        is_tied = "lm_head.weight" not in stored
        self.lm_head = make_linear(self.embedding if is_tied else weight("lm_head"))
        self.layers = [layer(i) for i in range(config["num_hidden_layers"])]
        self.norm = norm("model.norm")
        self.vocab_size, self.max_len = len(self.embedding), config["max_position_embeddings"]
        self.num_kv_heads, self.head_dim = config["num_key_value_heads"], config["head_dim"]
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim  # [D / 2]
        self.cos_sin = cos_sin(config["rope_theta"] ** -exponents, self.max_len).to(device)  # [max_len, D]
        self.stop_ids: list[int] = config["eos_token_id"]

    def new_cache(self, num_blocks: int) -> Tensor:
        """Return a KV cache of zeros; the dimension of size 2 is for keys and values."""
        shape = len(self.layers), 2, self.num_kv_heads, num_blocks, BLOCK_SIZE, self.head_dim
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def forward(self, batch: Batch, cache: Tensor) -> Tensor:
        """Return the hidden states [T, H] of a batch, and write its keys and values to the cache. The kernels
        of linear layers include the norm before and the addition after them, and prepare the next norm."""
        angles = self.cos_sin[batch.positions]  # [T, D]
        norms = [*(layer.input_norm for layer in self.layers), self.norm]
        residual = embed(batch.input_ids, self.embedding, norms[0], num_used=batch.num_used)  # x [T, H]
        for layer, kv, next_norm in zip(self.layers, cache, norms[1:], strict=True):
            qkv = layer.qkv.after_norm(residual)  # [T, (Hq + 2 Hkv) * D], all heads of q, k and v
            q = rope_cache(qkv, kv, batch, angles, layer.qk_norms)  # [T, Hq, D]; k and v go to the cache
            out = attention(q, kv, batch, window=None, scale=self.head_dim**-0.5).flatten(1)  # [T, Hq * D]
            residual = layer.o.add_to(residual, out, layer.post_norm)  # x + out @ o.T
            h = layer.gate_up.gated(residual)  # [T, I], silu(gate) * up
            residual = layer.down.add_to(residual, h, next_norm)  # x + h @ down.T
        return rms_norm(residual.x, self.norm)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a model with defaults. Raises ValueError if the model is not supported."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if (generation := folder / "generation_config.json").exists():
        config |= json.loads(generation.read_text())  # may have more end-of-sequence tokens
    config |= config.get("rope_parameters") or {}  # of transformers 5
    problems = [name for name in config["architectures"] if name not in ARCHITECTURES]
    problems += [name for name in UNSUPPORTED if config.get(name)]
    if problems or config.get("rope_type", "default") != "default":
        raise ValueError(f"{folder} is not supported ({problems or 'rope_type'}); use `python run.py`.")
    defaults = {"rope_theta": 1e4, "head_dim": config["hidden_size"] // config["num_attention_heads"]}
    stop = config["eos_token_id"]
    return {**defaults, **config, "eos_token_id": stop if isinstance(stop, list) else [stop]}


def main(args: Sequence[str] | None = None) -> None:
    """Continue prompts as plain text, without a chat template."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--model", type=Path, required=True, help="folder of a Hugging Face model")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-k", type=int, default=8, choices=range(MAX_DRAFTS + 1), metavar="K")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Model(given.model, getattr(torch, given.dtype), device)
    tokenizer = Tokenizer.from_file(str(given.model / "tokenizer.json"))
    prompts = [encoding.ids for encoding in tokenizer.encode_batch(given.prompts)]
    for n in map(len, prompts):
        if not 0 < n < n + given.max_tokens <= model.max_len:
            limits = f"must be at least 1 each and at most {model.max_len} together"
            parser.error(f"{n} tokens of a prompt and --max-tokens {given.max_tokens} {limits}.")
    sampling = Sampling(given.max_tokens, given.max_k, given.temperature, given.seed)
    for prompt, output in zip(given.prompts, generate(model, prompts, sampling), strict=True):
        num_tokens, num_steps = len(output.token_ids), output.num_steps
        print(f"{prompt}{tokenizer.decode(output.token_ids)}")
        print(f"[{num_tokens} tokens in {num_steps} steps: {num_tokens / num_steps:.2f} per step]\n")


if __name__ == "__main__":
    main()
