"""Train an EAGLE-3 drafter (Li et al., 2025, arXiv 2503.01840) for a target model, which does not change.

    python examples/train_eagle3.py --model smollm2-135m-instruct --text FILE.jsonl --out FOLDER
    python run.py --model smollm2-135m-instruct --spec eagle3 --draft-model FOLDER --prompt "..."

A line of the text is {"text": ...} or {"messages": [...]}, a conversation with answers, best the target's.

From entry t (see `nanospec/drafters/eagle3.py`), the drafter learns the target's distribution of token t + 2
over the most frequent tokens of the text. In pass j > 0, its own output takes the place of the target's
hidden states, as when it drafts, and it learns that of token t + 2 + j. Hidden states are whitened, because
some of their directions are far larger than others; the checkpoint contains `fc` multiplied by the whitening
matrix. `fc` starts as the linear regression of the target's next hidden state. All states are kept in memory.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from nanospec.device.hardware import resolve_device
from nanospec.drafters.hidden_states import lm_head_rows
from nanospec.kernels.batch import Batch, Chunk
from nanospec.kernels.layer.residual import look_up
from nanospec.kernels.table import Table
from nanospec.models.config import ModelConfig, Rope, cos_sin_table
from nanospec.models.decoder import Model, new_states
from nanospec.models.folders import resolve_model
from nanospec.models.weights import load_model
from nanospec.text.tokenizer import Tokenizer

WINDOW = 1024  # tokens; longer texts are truncated
HELD_OUT = 16  # one of this many texts is held out, to measure the loss
DECAY = 0.8  # weight of pass j in the loss: DECAY ** j
SINGLE_PASS = 0.4  # share of the steps, at the start, with a single pass
NOISE = 0.2  # standard deviation of the noise on whitened hidden states, against overfitting
RIDGE = 3e-3  # least variance of a direction that is whitened, relative to the mean


class Text(NamedTuple):
    """A text of L tokens, on the CPU."""

    tokens: Tensor  # [L] int64
    states: Tensor  # [L, n * H], the target's hidden states after each of the layers that are read
    hidden: Tensor  # [L, H], its final hidden states


def layers_to_read(model: Model) -> list[int]:
    """Return the n hidden states that a drafter reads, as numbers of layers that have run."""
    n = model.config.num_layers
    return [min(3, n), n // 2, max(n - 3, 0)]


def read_texts(file: Path, tokenizer: Tokenizer, shortest: int) -> list[list[int]]:
    """Return the token ids of each line of a file, except of texts shorter than `shortest` tokens."""
    texts = []
    for line in file.read_text(encoding="utf-8").strip().split("\n"):
        value = json.loads(line)
        if "messages" in value:
            ids = tokenizer.apply_chat_template(value["messages"], add_generation_prompt=False, tokenize=True)
        else:
            ids = tokenizer.encode(value["text"])
        texts.append(ids[:WINDOW])
    return [ids for ids in texts if len(ids) >= shortest]


@torch.inference_mode()
def run_target(model: Model, texts: list[list[int]]) -> list[Text]:
    """Return the texts with the target's hidden states."""
    table = Table.empty(1, WINDOW, 16, 0, model.device)
    table.block_table[0] = torch.arange(table.max_blocks)
    cache, result = model.allocate_kv_cache(table.max_blocks, table.block_size), list[Text]()
    for ids in tqdm(texts, desc="hidden states", disable=None):
        table.tokens[0, : len(ids)] = tokens = torch.tensor(ids)
        states, columns = new_states(model, len(ids), layers_to_read(model))
        hidden = model.forward(Batch.from_chunks(table, [Chunk(0, 0, len(ids))]), cache, columns)
        result.append(Text(tokens, states.cpu(), hidden.cpu()))
    return result


def whiten(texts: list[Text], norm: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrix [n * H, n * H] that whitens hidden states, and the regression [H, n * H] of the next
    position's final hidden state, divided by the weight of its `norm`, on whitened states."""
    moments = products = torch.zeros((), device=norm.device)
    for text in texts:  # without position 0, an outlier
        x, y = text.states[1:-1].to(norm.device).float(), text.hidden[2:].to(norm.device).float() / norm
        moments, products = moments + x.T @ x, products + x.T @ y
    count = sum(len(text.tokens) - 2 for text in texts)
    moments, products = moments / count, products / count
    scale = moments.diagonal().clamp(min=1e-12).rsqrt()  # first scale each value, then rotate
    values, vectors = torch.linalg.eigh(moments * scale * scale[:, None])
    whitening = (vectors * values.clamp(min=RIDGE).rsqrt()) @ vectors.T * scale
    covariance = whitening @ moments @ whitening.T + RIDGE * torch.eye(len(scale), device=norm.device)
    return whitening, torch.linalg.solve(covariance, whitening @ products).T


class Layer(nn.Module):
    """The decoder layer. Its parameters have the names of the checkpoint."""

    def __init__(self, c: ModelConfig, device: torch.device) -> None:
        super().__init__()
        H, D, M = c.hidden_size, c.head_dim, 3 * c.hidden_size // 2
        q, kv, linear = c.num_heads * D, c.num_kv_heads * D, partial(nn.Linear, bias=False)
        o_proj, down_proj = linear(q, H), linear(M, H)
        for matrix in (o_proj, down_proj):
            nn.init.normal_(matrix.weight, std=0.002)  # at first, the layer hardly changes its input
        projections = {"q_proj": linear(2 * H, q), "k_proj": linear(2 * H, kv), "v_proj": linear(2 * H, kv)}
        self.self_attn = nn.ModuleDict({**projections, "o_proj": o_proj})
        self.mlp = nn.ModuleDict({"gate_proj": linear(H, M), "up_proj": linear(H, M), "down_proj": down_proj})
        norms = (nn.RMSNorm(H, c.rms_norm_eps) for _ in range(3))
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = norms
        self.cos_sin, self.head_dim = cos_sin_table(Rope(theta=c.rope.theta), D, 2 * WINDOW, device), D

    def forward(self, embedded: Tensor, x: Tensor, past: list[tuple[Tensor, ...]]) -> Tensor:
        """Return the output [B, L, H] for the embeddings of the entries' tokens and their inputs [B, L, H].
        `past` has the keys, values and masks of earlier passes; those of this pass are appended."""
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(x)), -1)
        projected = (self.self_attn[f"{name}_proj"](both) for name in "qkv")
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in projected)
        at = torch.arange(x.shape[1], device=x.device)
        # Each entry attends to the entries of the text up to itself, and to its own drafts.
        mask = at == at[:, None] if past else at <= at[:, None]
        past.append((self._rotate(k, at + len(past)), v, mask))
        keys, values, masks = zip(*past, strict=True)
        cached = torch.cat(keys, 2), torch.cat(values, 2), torch.cat(masks, 1)
        q = self._rotate(q, at + len(past) - 1)  # [B, heads, L, D]
        out = F.scaled_dot_product_attention(q, *cached, enable_gqa=True)
        x = x + self.self_attn["o_proj"](out.transpose(1, 2).flatten(2))
        h = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](h)) * self.mlp["up_proj"](h))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        (cos, sin), (a, b) = self.cos_sin[positions].chunk(2, -1), x.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Drafter(nn.Module):
    """The drafter. It proposes the tokens `token_map` [Vd] int64, in ascending order, and shares the target's
    embedding and these rows `head` [Vd, H] of its lm_head."""

    def __init__(self, target: Model, vocab: int, texts: list[Text]) -> None:
        super().__init__()
        self.target, c = target, target.config
        counts = torch.bincount(torch.cat([text.tokens for text in texts]), minlength=c.vocab_size)
        self.token_map = counts.topk(min(vocab, len(counts))).indices.sort().values.to(target.device)
        self.head = lm_head_rows(target, self.token_map)
        self.midlayer = Layer(c, target.device)
        self.norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.norm.weight.data = target.norm.weight.float().clone()
        self.whitening, regression = whiten(texts, self.norm.weight.data)
        self.fc = nn.Linear(regression.shape[1], c.hidden_size, bias=False)
        self.fc.weight.data = regression
        self.to(target.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., Vd]."""
        return (hidden.to(self.head.dtype) @ self.head.T).float()

    def loss(self, texts: list[Text], passes: int, noise: float = 0.0) -> Tensor:
        """Return the cross-entropy, averaged over the passes with the weights DECAY ** j."""
        columns = (pad_sequence(list(each), batch_first=True) for each in zip(*texts, strict=True))
        tokens, states, hidden = (column.to(self.head.device) for column in columns)
        at = torch.arange(tokens.shape[1], device=tokens.device)
        lengths = torch.tensor([[len(text.tokens)] for text in texts], device=tokens.device)
        labels = self.logits(hidden).softmax(-1)  # [B, L, Vd], of the next token
        white = states.float() @ self.whitening.T
        x, past = self.fc(white + noise * torch.randn_like(white)).float(), list[tuple[Tensor, ...]]()
        total = torch.zeros((), device=tokens.device)
        for j in range(passes):
            tokens, labels = tokens.roll(-1, 1), labels.roll(-1, 1)
            embedded = look_up(tokens.flatten(), self.target.embedding).view_as(x).float()
            x = self.midlayer(embedded, x, past)
            exists = at + 1 + j < lengths  # where `roll` has not wrapped around
            total += DECAY**j * F.cross_entropy(self.logits(self.norm(x)[exists]), labels[exists])
        return total / sum(DECAY**j for j in range(passes))

    def save(self, folder: Path) -> None:
        """Write the drafter in bf16, without what it shares with the target."""
        c, weights = self.target.config, {name: each.detach() for name, each in self.named_parameters()}
        weights["fc.weight"] = weights["fc.weight"] @ self.whitening
        tensors = {name: weight.bfloat16().cpu().contiguous() for name, weight in weights.items()}
        tensors["d2t"] = self.token_map.cpu() - torch.arange(len(self.token_map))
        config = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu",
            "hidden_size": c.hidden_size, "intermediate_size": len(weights["midlayer.mlp.gate_proj.weight"]),
            "num_hidden_layers": 1, "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads,
            "head_dim": c.head_dim, "max_position_embeddings": c.max_position_embeddings,
            "rms_norm_eps": c.rms_norm_eps, "rope_theta": c.rope.theta, "vocab_size": c.vocab_size,
            "draft_vocab_size": len(self.token_map), "torch_dtype": "bfloat16",
            "eagle_aux_hidden_state_layer_ids": layers_to_read(self.target),
        }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, folder / "model.safetensors")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", required=True, help="local folder, GGUF file, name or hub id")
    parser.add_argument("--text", required=True, type=Path, metavar="FILE", help="training data, JSON Lines")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="written after each epoch")
    parser.add_argument("--vocab", type=int, default=8192, help="number of tokens that can be drafted")
    parser.add_argument("--passes", type=int, default=4, help="number of consecutive drafts that are trained")
    parser.add_argument("--epochs", type=int, default=6, help="number of passes over the text")
    parser.add_argument("--batch", type=int, default=8, help="number of texts per step")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    folder, shortest = resolve_model(args.model), args.passes + 2
    lines = read_texts(args.text, Tokenizer(folder), shortest)
    if len(lines) < 2:
        parser.error(f"{args.text} has {len(lines)} texts of at least {shortest} tokens; 2 are needed")
    target = load_model(folder, "auto", resolve_device("auto"))
    texts = run_target(target, lines)
    training, held_out = [text for i, text in enumerate(texts) if i % HELD_OUT], texts[::HELD_OUT]
    drafter = Drafter(target, args.vocab, training)
    training.sort(key=lambda text: len(text.tokens))  # so that batches have little padding
    batches = [training[i : i + args.batch] for i in range(0, len(training), args.batch)]
    optimizer, steps = torch.optim.AdamW(drafter.parameters(), weight_decay=0), args.epochs * len(batches)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, steps, pct_start=0.05)
    autocast = torch.autocast(target.device.type, torch.bfloat16, enabled=target.dtype != torch.float32)
    for epoch in range(1, args.epochs + 1):
        for i in tqdm(torch.randperm(len(batches)).tolist(), desc=f"epoch {epoch}", disable=None):
            passes = 1 if rate.last_epoch < SINGLE_PASS * steps else args.passes
            with autocast:
                loss = drafter.loss(batches[i], passes, NOISE)
            loss.backward()
            nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            rate.step()
        with torch.no_grad(), autocast:
            losses = [float(drafter.loss([text], args.passes)) for text in held_out]
        print(json.dumps({"epoch": epoch, "held_out_loss": round(sum(losses) / len(losses), 4)}))
        drafter.save(args.out)


if __name__ == "__main__":
    main()
