"""Train an EAGLE-3 drafter (Li et al., 2025, arXiv 2503.01840) without changing the target's weights.

    nanospec train --model NAME --text FILE.jsonl [--out FOLDER] [--epochs N] ...

A line of the text is {"text": ...} or {"messages": [...]}, a conversation including the answers. Answers
written by the model itself work best, because these are what the drafter has to predict.

From entry t (see `drafters/eagle3.py`), the drafter learns the model's distribution of token t + 2 over the
most frequent tokens of the text. In pass j > 0, its own output takes the place of the model's hidden states,
as when it drafts, and it learns that of token t + 2 + j. Training starts with a single pass.

With the lm_head's rows W [Vd, H] and the model's distribution p, the cross-entropy of the output h is
log(sum(exp(W h))) - h . (p W), so p W [H] is computed once for each token. The hidden states are whitened,
because some of their directions are far larger than others; the folder contains `fc` multiplied by the
whitening matrix. `fc` starts as the linear regression of the model's next hidden state. The folder is written
after every epoch; the metadata of its weights has the settings, and how many drafts match held-out texts.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm, trange

from ..device.resources import resolve_device
from ..drafters.checkpoint import lm_head_rows
from ..kernels.batch import Batch, Chunk
from ..kernels.layer.residual import look_up
from ..kernels.table import Table
from ..models.config import ModelConfig, Rope, cos_sin_table
from ..models.decoder import Model, new_states
from ..models.families import read_config
from ..models.folders import DRAFTERS, program, resolve_model, weights_folders
from ..models.weights import load_model
from ..text.chat import check_conversation
from ..text.tokenizer import Tokenizer
from ..text.validation import bounded_field, check_fields
from .batch.lines import LineError, line_name, read_lines
from .json_input import strict_json
from .options import Parser, add_settings, fields_set, in_flags

WINDOW = 1024  # tokens; longer texts are truncated
HELD_OUT = 16  # one of this many texts is held out for measuring
MEASURED_BATCH = 2048  # positions per batch when measuring
BLOCK_SIZE = 16
TEXTS_PER_PASS = 8  # texts per forward pass when computing hidden states
ROWS = 512  # rows of logits that are in memory at once
DEPTH = 7  # drafts per step when measuring
DECAY = 0.8  # weight of pass j in the loss: DECAY ** j
SINGLE_PASS = 0.4  # share of all steps with a single pass
JITTER = 40  # texts of similar length, up to this many tokens, are batched in random order
RIDGE = 3e-3  # least variance of a direction that is whitened, relative to the mean
BETAS, WARMUP, MAX_NORM = (0.9, 0.95), 0.05, 1.0  # WARMUP: share of all steps


@dataclass(frozen=True)
class Settings:
    """Training settings. With the text and the number of threads, they determine the drafter.

    Attributes:
        vocab: number of tokens that can be drafted, the most frequent ones.
        intermediate: size of the drafter's MLP.
        passes: forward passes of the drafter per position, which train as many consecutive drafts.
        noise: standard deviation of the noise on whitened hidden states, against overfitting.
        epochs: number of passes over the text.
        batch: approximate number of positions per optimizer step.
        lr: peak learning rate.
        seed: seed for initial weights, noise and the order of the batches.
    """

    vocab: int = bounded_field(8192, 1)
    intermediate: int = bounded_field(864, 1)
    passes: int = bounded_field(4, 1, 16)
    noise: float = bounded_field(0.2, 0)
    epochs: int = bounded_field(6, 1)
    batch: int = bounded_field(1024, 1)
    lr: float = bounded_field(1e-3, 0, 1)
    seed: int = bounded_field(0, 0, 2**31 - 1)

    def __post_init__(self) -> None:
        check_fields(self)


class Data(NamedTuple):
    """T positions of concatenated texts, on the CPU: hidden states after `layers_to_read(model)` [T, n * H],
    the final hidden states [T, H], the tokens [T] int64, and the length of each text."""

    states: Tensor
    hidden: Tensor
    tokens: Tensor
    lengths: list[int]


class TextBatch(NamedTuple):
    """B padded texts on the device: whitened states [B, L, n * H], labels [B, L, H], tokens [B, L], lengths
    [B]."""

    states: Tensor
    labels: Tensor
    tokens: Tensor
    lengths: Tensor


def layers_to_read(model: Model) -> list[int]:
    """Return the hidden states that a drafter reads, as numbers of layers that have run."""
    n = model.config.num_layers
    return [min(3, n), n // 2, max(n - 3, 0)]


def read_texts(file: Path, tokenizer: Tokenizer, window: int) -> list[list[int]]:
    """Return the token ids of each line of a file, truncated to `window`. Raises LineError."""
    texts = []
    for number, line in read_lines(str(file)):
        try:
            value: Any = strict_json(line)
            if isinstance(value, dict) and "messages" in value:
                check_conversation(value["messages"])
                text = tokenizer.apply_chat_template(value["messages"], add_generation_prompt=False)
                ids = tokenizer.encode(text, add_special_tokens=False)
            elif isinstance(value, dict) and isinstance(value.get("text"), str):
                ids = tokenizer.encode(value["text"])
            else:
                raise ValueError('a line must be {"text": "..."} or {"messages": [...]}.')
        except ValueError as error:
            problem = f"invalid JSON ({error})." if isinstance(error, json.JSONDecodeError) else error
            raise LineError(f"{line_name(str(file), number)}: {problem}") from None
        texts.append(ids[:window])
    return [ids for ids in texts if len(ids) > 2]  # the shortest that have a label


@torch.inference_mode()
def compute_data(model: Model, texts: Sequence[list[int]]) -> Data:
    """Return the hidden states of texts, computed `TEXTS_PER_PASS` texts per forward pass."""
    table = Table.empty(TEXTS_PER_PASS, max(map(len, texts)), BLOCK_SIZE, 0, model.device)
    table.block_table.copy_(torch.arange(table.block_table.numel()).view_as(table.block_table))
    cache = model.allocate_kv_cache(table.block_table.numel(), BLOCK_SIZE)
    layers, tokens = layers_to_read(model), torch.tensor(list(chain.from_iterable(texts)))
    T, H, start = len(tokens), model.config.hidden_size, 0
    data = Data(
        torch.empty(T, len(layers) * H, dtype=model.dtype), torch.empty(T, H, dtype=model.dtype), tokens,
        list(map(len, texts)),
    )  # fmt: skip
    for first in trange(0, len(texts), TEXTS_PER_PASS, unit="batch", desc="hidden states", disable=None):
        some = texts[first : first + TEXTS_PER_PASS]
        for row, ids in enumerate(some):
            table.tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        chunks = [Chunk(row, 0, len(ids)) for row, ids in enumerate(some)]
        end = start + sum(map(len, some))
        whole, states = new_states(model, end - start, layers)
        data.hidden[start:end] = model.forward(Batch.from_chunks(table, chunks), cache, states)
        data.states[start:end] = whole
        start = end
    return data


def cross_entropy(h: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the cross-entropies of h [N, H] over `rows` [Vd, H]; see the module docstring.
    `labels` [N, H] are p W. Unlike autograd, this keeps no logits."""
    total, gradients = h.new_zeros((), dtype=torch.float32), []
    with torch.no_grad():
        for part, label in zip(h.split(ROWS), labels.float().split(ROWS), strict=True):
            logits = part @ rows.T
            p = logits.softmax(-1)
            # logsumexp: the largest logit minus the logarithm of its probability
            total += (logits.amax(-1).float() - p.amax(-1).float().log()).sum() - (part.float() * label).sum()
            gradients.append((p @ rows).float() - label)
    # The second term is 0; its gradient is that of the cross-entropy.
    return total + ((h - h.detach()) * torch.cat(gradients).to(h.dtype)).sum()


class DrafterInTraining:
    """A drafter with trainable float32 `weights`, by their names in the folder. It proposes the tokens
    `token_map` [Vd] int64, in ascending order. `whitening` [n * H, n * H] whitens hidden states."""

    def __init__(self, model: Model, settings: Settings, data: Data) -> None:
        self.settings, self.config, c = settings, model.config, model.config
        self.dtype, self.device, self.layers = model.dtype, model.device, layers_to_read(model)
        self.embedding = model.embedding
        counts = torch.bincount(data.tokens, minlength=c.vocab_size)
        frequent = counts.argsort(descending=True, stable=True)[: settings.vocab]
        self.token_map = frequent.sort().values.to(self.device)
        self.head = lm_head_rows(model, self.token_map).contiguous()  # [Vd, H]
        self.cos_sin = cos_sin_table(Rope(theta=c.rope.theta), c.head_dim, WINDOW + DEPTH, self.device)
        self.whitening, fc = whiten(data, model.norm.weight.float())
        heads = c.num_heads, c.num_kv_heads, c.head_dim
        sizes = c.vocab_size, c.hidden_size, settings.intermediate, 1, *heads, WINDOW
        shapes = ModelConfig(*sizes, windows=(None,), has_inputs=True).parameter_shapes()
        weights = {"fc": fc, "norm": model.norm.weight}
        generator = torch.Generator().manual_seed(settings.seed)
        for name in (each for each in shapes if ".layers." in each):
            weight = torch.ones(shapes[name])
            if weight.dim() == 2:  # at first, the layer hardly changes the regression
                std = 0.002 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
                weight = torch.randn(weight.shape, generator=generator) * std
            weights[name.replace("model.layers.0", "midlayer").removesuffix(".weight")] = weight
        self.weights = {n: w.detach().float().to(self.device).requires_grad_() for n, w in weights.items()}

    def outputs(
        self, batch: TextBatch, passes: int, draft: Callable[[Tensor], Tensor] | None = None
    ) -> Iterator[Tensor]:
        """Yield the outputs [B, L - 1, H] of each pass. The next pass gets the tokens of the text, or those
        that `draft` returns for the outputs."""
        w = {
            name.removeprefix("midlayer."): weight.to(self.dtype) if weight.dim() == 2 else weight
            for name, weight in self.weights.items()
        }
        L, D = batch.tokens.shape[1] - 1, self.config.head_dim
        at = torch.arange(L, device=self.device)
        ids, padded = batch.tokens[:, 1:], F.pad(batch.tokens, (0, passes))
        x = batch.states[:, :L] @ w["fc"].T
        keys, values, masks = list[Tensor](), list[Tensor](), list[Tensor]()  # of each pass
        for j in range(passes):
            embedded = look_up(ids.flatten(), self.embedding).view_as(x)
            both = self._norm(embedded, w["input_layernorm"]), self._norm(x, w["hidden_norm"])
            wide = torch.cat(both, -1)
            q, k, v = (
                (wide @ w[f"self_attn.{n}_proj"].T).unflatten(-1, (-1, D)).transpose(1, 2) for n in "qkv"
            )
            keys.append(self._rotate(k, at + j))
            values.append(v)  # [B, heads, L, D]
            # Each entry attends to the entries of the text up to itself, and to its own drafts.
            masks.append(at == at[:, None] if j else at <= at[:, None])
            cached = torch.cat(keys, 2), torch.cat(values, 2), torch.cat(masks, 1)
            out = F.scaled_dot_product_attention(self._rotate(q, at + j), *cached, enable_gqa=True)
            x = x + out.transpose(1, 2).flatten(2) @ w["self_attn.o_proj"].T
            h = self._norm(x, w["post_attention_layernorm"])
            h = F.silu(h @ w["mlp.gate_proj"].T) * (h @ w["mlp.up_proj"].T)
            x = x + h @ w["mlp.down_proj"].T
            output = self._norm(x, w["norm"])
            yield output
            ids = draft(output) if draft else padded[:, 2 + j : 2 + j + L]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), weight.shape, weight, self.config.rms_norm_eps).to(self.dtype)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        (cos, sin), (a, b) = self.cos_sin[positions].chunk(2, -1), x.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(self.dtype)

    def loss(self, batch: TextBatch, passes: int) -> Tensor:
        """Return the loss over a batch of texts."""
        total, labels = torch.zeros((), device=self.device), F.pad(batch.labels, (0, 0, 0, passes))
        for j, output in enumerate(self.outputs(batch, passes)):
            label = 1 + j + torch.arange(output.shape[1], device=self.device)  # position, for each entry
            valid = label < batch.lengths[:, None]
            wanted = labels[:, 1 + j :][:, : output.shape[1]][valid]
            loss = cross_entropy(output[valid], self.head, wanted)
            total = total + DECAY**j * loss / max(len(wanted), 1)
        return total / sum(DECAY**j for j in range(passes))

    def save(self, folder: Path, metadata: dict[str, Any]) -> None:
        """Write the drafter in bf16, the weights atomically, without what it shares with the model. Raises
        OSError."""
        c, weights = self.config, {name: weight.detach().cpu() for name, weight in self.weights.items()}
        weights["fc"] = weights["fc"] @ self.whitening.cpu()
        tensors = {f"{name}.weight": weight.bfloat16() for name, weight in weights.items()}
        tensors["d2t"] = self.token_map.cpu() - torch.arange(len(self.token_map))
        config = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu",
            "hidden_size": c.hidden_size, "intermediate_size": self.settings.intermediate,
            "num_hidden_layers": 1, "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads,
            "head_dim": c.head_dim, "max_position_embeddings": c.max_position_embeddings,
            "rms_norm_eps": c.rms_norm_eps, "rope_theta": c.rope.theta, "vocab_size": c.vocab_size,
            "draft_vocab_size": len(self.token_map), "torch_dtype": "bfloat16",
            "eagle_aux_hidden_state_layer_ids": self.layers,
        }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / ".model.safetensors.part"
        try:
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            save_file(tensors, part, {"nanospec": json.dumps(metadata)})
            part.chmod(0o644)  # safetensors creates files that only the owner can read
            part.replace(folder / "model.safetensors")
        except SafetensorError as error:
            raise OSError(f"could not write {folder} ({error}); check the free disk space.") from None
        finally:
            part.unlink(missing_ok=True)


def whiten(data: Data, norm: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrix that whitens hidden states, and the regression of the next position's final hidden
    state, divided by the weight of its norm, on whitened states: [n * H, n * H] and [H, n * H]."""
    size = data.states.shape[1]
    device, count = norm.device, 0
    moments, products = (torch.zeros(size, n, device=device) for n in (size, len(norm)))
    for states, hidden in zip(data.states.split(data.lengths), data.hidden.split(data.lengths), strict=True):
        # Skip position 0: its hidden states are outliers.
        x, y = states[1:-1].to(device).float(), hidden[2:].to(device).float() / norm
        moments, products, count = moments + x.T @ x, products + x.T @ y, count + len(x)
    scale = (moments.diagonal() / count).clamp(min=1e-12).rsqrt()  # first scale each value, then rotate
    values, vectors = torch.linalg.eigh(moments / count * scale * scale[:, None])
    least = values.clamp(min=RIDGE)
    whitening = (vectors * least.rsqrt()) @ vectors.T * scale
    return whitening, (whitening @ products / count).T @ (vectors * (least / (values + RIDGE))) @ vectors.T


class Texts:
    """Texts as padded batches for a drafter; computes the labels."""

    def __init__(self, data: Data, drafter: DrafterInTraining) -> None:
        self.device, self.whitening = drafter.device, drafter.whitening.T.to(drafter.dtype)
        parts = []
        for hidden in tqdm(data.hidden.split(ROWS), unit="part", desc="labels", disable=None):
            p = (hidden.to(self.device) @ drafter.head.T).float().softmax(-1)
            parts.append((p.to(drafter.dtype) @ drafter.head).cpu())
        columns = data.states, torch.cat(parts), data.tokens
        self.texts = list(zip(*(column.split(data.lengths) for column in columns), strict=True))
        self.lengths = data.lengths

    def batches(self, size: int, generator: torch.Generator) -> list[list[int]]:
        """Return random batches of indices of texts. The texts of a batch have similar lengths and at most
        `size` positions, padding included; a longer text is a batch of its own."""
        jitter, result = torch.rand(len(self.lengths), generator=generator) * JITTER, list[list[int]]()
        for i in (torch.tensor(self.lengths) + jitter).argsort().tolist():
            if not result or max(self.lengths[j] for j in (*result[-1], i)) * (len(result[-1]) + 1) > size:
                result.append([])
            result[-1].append(i)
        return [result[i] for i in torch.randperm(len(result), generator=generator).tolist()]

    def batch(self, indices: Sequence[int]) -> TextBatch:
        """Return these texts, padded, on the device."""
        columns = zip(*(self.texts[i] for i in indices), strict=True)
        states, labels, tokens = (pad_sequence(list(c), batch_first=True).to(self.device) for c in columns)
        lengths = torch.tensor([self.lengths[i] for i in indices], device=self.device)
        return TextBatch(states @ self.whitening, labels, tokens, lengths)


@torch.inference_mode()
def measure(drafter: DrafterInTraining, texts: Texts) -> dict[str, Any]:
    """Return the share of positions whose first 1, 2, ... drafts all match the text, and the mean tokens per
    step, including the target's own token."""
    matched, counted = torch.zeros(DEPTH), torch.zeros(DEPTH)

    def draft(output: Tensor) -> Tensor:
        drafts.append(drafter.token_map[(output @ drafter.head.T).max(-1).indices])
        return drafts[-1]

    for indices in texts.batches(MEASURED_BATCH, torch.Generator()):
        batch, drafts = texts.batch(indices), list[Tensor]()
        for _ in drafter.outputs(batch, DEPTH, draft):
            pass
        # Positions that lie beyond a text have the token -1, which no draft matches.
        at = torch.arange(batch.tokens.shape[1], device=drafter.device)
        tokens = torch.where(at < batch.lengths[:, None], batch.tokens, -1)
        target = F.pad(tokens, (0, DEPTH - 1), value=-1)[:, 2:].unfold(1, DEPTH, 1)  # [B, L - 2, DEPTH]
        exists = target >= 0
        right = (torch.stack(drafts, -1)[:, :-1] == target).cumprod(-1)
        matched, counted = matched + right.sum((0, 1)).cpu(), counted + exists.sum((0, 1)).cpu()
    shares = (matched / counted.clamp(min=1)).tolist()
    return {"accepted": [round(share, 4) for share in shares], "tokens_per_step": round(1 + sum(shares), 3)}


def train(model: Model, settings: Settings, data: tuple[Data, Data], out: Path) -> dict[str, Any]:
    """Train a drafter on the first of the `data`; after every epoch, measure it on the second and write it to
    `out`. Return the metadata of its weights."""
    drafter = DrafterInTraining(model, settings, data[0])
    training, held_out = (Texts(each, drafter) for each in data)
    matrices = [w for w in drafter.weights.values() if w.dim() == 2]
    norms = [w for w in drafter.weights.values() if w.dim() == 1]
    # Muon (Jordan et al., 2024) with updates of the size of AdamW's (Liu et al., 2025, arXiv 2502.16982).
    muon = torch.optim.Muon(matrices, settings.lr, 0.0, adjust_lr_fn="match_rms_adamw")
    optimizers: list[Any] = [muon, torch.optim.AdamW(norms, 2 * settings.lr, BETAS, weight_decay=0)]
    generator = torch.Generator().manual_seed(settings.seed)
    noise_generator = torch.Generator(drafter.device).manual_seed(settings.seed)
    steps = settings.epochs * len(training.batches(settings.batch, generator))
    rates = [LambdaLR(optimizer, partial(schedule, steps)) for optimizer in optimizers]
    figures: dict[str, Any] = {"settings": asdict(settings), "positions": len(data[0].tokens), "history": []}
    with tqdm(total=steps, unit="step", desc="training", disable=None) as bar:
        for epoch in range(1, settings.epochs + 1):
            losses = []
            for indices in training.batches(settings.batch, generator):
                batch = training.batch(indices)
                noise = torch.empty_like(batch.states).normal_(generator=noise_generator)
                batch = batch._replace(states=batch.states + settings.noise * noise)
                passes = 1 if rates[0].last_epoch < SINGLE_PASS * steps else settings.passes
                loss = drafter.loss(batch, passes)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(norms, MAX_NORM)
                for optimizer, rate in zip(optimizers, rates, strict=True):
                    optimizer.step()
                    optimizer.zero_grad()
                    rate.step()
                losses.append(loss.detach())
                bar.update()
            mean = float(sum(losses) / len(losses))
            if not math.isfinite(mean):
                raise ValueError(f"training diverged (loss {mean}); set a lower --lr than {settings.lr}.")
            figures["history"].append({"epoch": epoch, "loss": round(mean, 4), **measure(drafter, held_out)})
            drafter.save(out, figures)
            tqdm.write(json.dumps(figures["history"][-1]), file=sys.stderr)
    return figures


def schedule(steps: int, step: int) -> float:
    """Return the learning rate factor at a step: linear warmup, then cosine decay."""
    warmup = max(int(WARMUP * steps), 1)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(steps - warmup, 1))


def run(args: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """Read the text, compute hidden states and train a drafter; return its metadata."""
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(f"training needs PyTorch 2.9 or newer, not {torch.__version__}.")
    folder = resolve_model(args.model)
    folders = weights_folders()  # drafters are searched in all of these; write to the first that exists
    weights = next((folder for folder in folders if folder.is_dir()), folders[-1])
    out = args.out or weights / DRAFTERS / folder.name
    if (out / "config.json").exists():
        raise ValueError(f"{out} already has a model or a drafter; set another --out.")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} must be a folder.")
    (_, config), device = read_config(folder), resolve_device(args.device)
    texts = read_texts(args.text, Tokenizer(folder), min(WINDOW, config.max_position_embeddings))
    training = [ids for i, ids in enumerate(texts) if i % HELD_OUT]
    if not training:
        counted = f"{args.text} has {len(texts)} texts of at least 3 tokens"
        raise ValueError(f"{counted}, but 2 are needed, one of them to measure.")
    model = load_model(folder, "auto", device)
    data = compute_data(model, training), compute_data(model, texts[::HELD_OUT])
    return {"model": folder.name, **train(model, settings, data, out), "folder": str(out)}


def main(argv: Sequence[str]) -> int:
    """Run `nanospec train`. Raises ValueError or OSError with a one-sentence message."""
    text = "Train an EAGLE-3 drafter, which predicts a model's next tokens from its hidden states."
    parser = Parser(prog=f"{program()} train", description=text)
    parser.add_argument("--model", required=True, help="local folder, GGUF file, name or hub id")
    parser.add_argument("--text", required=True, type=Path, metavar="FILE", help="training data, JSON Lines")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: weights/drafters/NAME")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add_settings(parser, Settings, "training", full=True, defaults={})
    args = parser.parse_args(argv)
    try:
        settings = Settings(**fields_set(args, "Settings"))
    except ValueError as error:
        raise ValueError(in_flags(str(error), (Settings,))) from None
    print(json.dumps(run(args, settings)))
    return 0
