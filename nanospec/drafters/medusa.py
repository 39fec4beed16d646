"""Medusa heads, which propose several tokens at once from the target's last hidden state (Cai et al., 2024).

Given the hidden state from which the target sampled token t, head i (from 0) predicts token t + 1 + i
without seeing token t. So the drafter keeps the hidden state from which each row's last token was
sampled. A row has none before its first step and after a preemption; it then gets no drafts.

With a tree width W above 1, the W most likely tokens of each head are combined into a tree of fixed shape.

Files have the layout of FasterDecoding/Medusa, with the target's hidden size H and vocabulary size V, and L
blocks per head. Names may have the prefix `medusa_head.`:

    {head}.{0 .. L-1}.linear.weight  [H, H]
    {head}.{0 .. L-1}.linear.bias    [H]
    {head}.{L}.weight                [V, H]     optional: without it, the head uses the target's lm_head
    token_map                        [Vd] ints  optional: the only tokens that are proposed, so projections
                                                have Vd rows (as in FR-Spec, Zhao et al., 2025, and vLLM)
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import SpecConfig
from ..kernels.batch import Batch
from ..kernels.layer.linear import Linear, make_linear
from ..kernels.sampling import noise
from ..kernels.speculation.proposal import Proposal
from ..kernels.speculation.verify import Verdict
from ..kernels.table import Table
from ..models import default_heads
from ..models.decoder import Model
from ..models.formats.safetensors import check_fit, listed, open_safetensors
from ..text import shown
from . import Drafter, Memory, Target, draft_limits, make_proposal

CONTENDERS = 16  # most likely tokens of a head from which it samples
TOKEN_MAP = "token_map"
PIECE = 64  # columns of a packed lm_head that are computed at a time


@dataclass(frozen=True)
class Heads:
    """The weights of Medusa heads, on the target's device."""

    # Weight [num_heads, H, H] and bias [num_heads, 1, H] of each block x + SiLU(W x + b), in order.
    blocks: tuple[tuple[Tensor, Tensor], ...]
    projections: tuple[Linear, ...]  # [Vd, H], one per head, or a single one shared by all heads
    token_map: Tensor | None  # [Vd] int64, token id of each row of the projections; None: the row's index

    @classmethod
    def load(cls, path: str | Path, model: Model) -> "Heads":
        """Load heads from a safetensors file in the model's dtype. Raises FileNotFoundError if it does not
        exist, ValueError if it is corrupt or does not fit the model."""
        file, hidden, rows = Path(path), model.config.hidden_size, model.config.vocab_size
        if not file.is_file():
            raise FileNotFoundError(f"Medusa heads {file} not found; heads must be a .safetensors file.")
        handle = open_safetensors(file)
        stored = {name.removeprefix("medusa_head."): name for name in handle.keys()}  # noqa: SIM118
        num_heads, num_layers = _layout(file, stored)
        token_map = None
        if TOKEN_MAP in stored:
            ids = handle.get_tensor(stored.pop(TOKEN_MAP))
            token_map = checked_token_map(ids, file, rows).to(model.device)
            rows = len(token_map)
        last = [f"{head}.{num_layers}.weight" for head in range(num_heads)]
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(last, (rows, hidden))
        for name in (f"{head}.{n}.linear" for n in range(num_layers) for head in range(num_heads)):
            shapes |= {f"{name}.weight": (hidden, hidden), f"{name}.bias": (hidden,)}
        prefix = f"The {num_heads} heads of {num_layers} block(s) in {file} do not fit the model "
        prefix += f"(hidden size {hidden}, {rows} tokens)"
        slices = {name: handle.get_slice(stored_name) for name, stored_name in stored.items()}
        check_fit(slices, shapes, prefix, last)

        def get(name: str) -> Tensor:
            tensor: Tensor = handle.get_tensor(stored[name])
            return tensor.to(model.device, model.dtype, copy=True)

        def stack(n: int, part: str) -> Tensor:
            return torch.stack([get(f"{head}.{n}.linear.{part}") for head in range(num_heads)])

        blocks = tuple((stack(n, "weight"), stack(n, "bias")[:, None]) for n in range(num_layers))
        stored_heads = {name: make_linear(get(name)) for name in last if name in stored}
        names = last if stored_heads else last[:1]  # a single one shared by all heads
        projections = (stored_heads[n] if n in stored_heads else lm_head_for(model, token_map) for n in names)
        return cls(blocks, tuple(projections), token_map)

    @property
    def num_heads(self) -> int:
        """The number of tokens proposed from one hidden state."""
        return len(self.blocks[0][0])

    @property
    def weight_bytes(self) -> int:
        """Bytes of the blocks and projections, including the target's lm_head if the heads use it."""
        blocks = sum(tensor.nbytes for block in self.blocks for tensor in block)
        return blocks + sum(linear.nbytes for linear in self.projections)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of each head: [N, H] -> [N, num_heads, Vd]. For the hidden states that
        `Model.forward` returned at position t, head i predicts token t + 2 + i."""
        x = hidden.expand(self.num_heads, -1, -1)  # [num_heads, N, H]
        for weight, bias in self.blocks:
            x = x + F.silu(torch.baddbmm(bias, x, weight.mT))
        if len(self.projections) == 1:  # one product for all heads
            return self.projections[0](x.transpose(0, 1).flatten(0, 1)).unflatten(0, (-1, self.num_heads))
        return torch.stack([project(part) for project, part in zip(self.projections, x, strict=True)], 1)

    def tokens(self, index: Tensor) -> Tensor:
        """Convert column indices of the logits to token ids, int32."""
        return (index if self.token_map is None else self.token_map[index]).int()


def _layout(file: Path, names: Collection[str]) -> tuple[int, int]:
    """Return the number of heads and of blocks per head, from tensor names. Raises ValueError for none."""
    matches = [re.fullmatch(r"([0-9]{1,2})\.([0-9]{1,2})\.linear\.(?:weight|bias)", name) for name in names]
    heads, layers = ([int(match[part]) for match in matches if match] for part in (1, 2))
    if not heads:
        raise ValueError(
            f"{file} is not a file of Medusa heads: names such as '0.0.linear.weight' are missing "
            f"(found {listed(names) or 'no tensors'})."
        )
    return max(heads) + 1, max(layers) + 1


def checked_token_map(ids: Tensor, file: Path, vocab_size: int) -> Tensor:
    """Return the token ids [Vd] as int64. Raises ValueError if they are not distinct ids of the model."""
    name, dtype = f"{TOKEN_MAP} in {file}", str(ids.dtype).removeprefix("torch.")
    if dtype not in ("int32", "int64") or ids.dim() != 1 or len(ids) == 0:
        raise ValueError(f"{name} must be a list of int32 or int64, not {dtype} {shown(list(ids.shape))}.")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) < len(ids):
        raise ValueError(f"{name} must be distinct ids from 0 to {vocab_size - 1}; use heads of this model.")
    return ids.long()


def lm_head_for(model: Model, token_map: Tensor | None) -> Linear:
    """Return the model's lm_head, or only its rows for the tokens of `token_map`."""
    return model.lm_head if token_map is None else make_linear(lm_head_rows(model, token_map))


def lm_head_rows(model: Model, tokens: Tensor) -> Tensor:
    """Return the target's lm_head rows for the tokens [n] int64, as a plain tensor [n, H]. A packed lm_head
    has no readable rows, but its product with unit vectors gives its columns exactly."""
    table = model.embedding if model.config.tie_word_embeddings else model.lm_head.unpacked_weight
    if isinstance(table, Tensor):
        return table[tokens]
    units = torch.eye(model.config.hidden_size, dtype=model.dtype, device=model.device)
    return torch.cat([model.lm_head(piece)[:, tokens] for piece in units.split(PIECE)]).T.contiguous()


class MedusaDrafter(Drafter):
    """Drafts with Medusa heads; see the module docstring."""

    name = "medusa"
    runs_model = True
    makes_trees = True

    def __init__(self, spec: SpecConfig, heads: Heads, target: Model) -> None:
        known = target.config.vocab_size if heads.token_map is None else len(heads.token_map)
        if spec.tree_width > known:
            raise ValueError(f"tree_width={spec.tree_width} exceeds the {known} tokens that heads propose.")
        self.heads, self.width, self._target = heads, spec.tree_width, target
        if self.width == 1:
            self.max_drafts = heads.num_heads
        self.memory = Memory(heads.weight_bytes)
        self._trees: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    @classmethod
    def load(cls, spec: SpecConfig, target: Target) -> "MedusaDrafter":
        file = spec.heads
        if file is None and target.folder is None:
            raise ValueError(f"method={spec.method!r} needs Medusa heads; set SpecConfig(heads=FILE).")
        heads = Heads.load(file or default_heads(target.folder), target.model)  # type: ignore[arg-type]
        return cls(spec, heads, target.model)

    def attach(self, table: Table, num_blocks: int, max_tokens: int, may_wait: bool) -> None:
        rows, size = table.num_rows + 1, self._target.config.hidden_size
        # [S + 1, H] for S rows: state from which a row's last token was sampled; the last entry is padding.
        self.hidden = torch.zeros(rows, size, dtype=self._target.dtype, device=table.device)
        # [S + 1]: whether the entry of `hidden` is valid.
        self.ready = torch.zeros(rows, dtype=torch.bool, device=table.device)

    def release(self, row: int) -> None:
        self.ready[row].fill_(False)

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        index = rows.clamp(min=0)
        num_drafts = torch.where(self.ready[index], draft_limits(table, rows, k), 0)
        candidate, parents, sizes = self._tree(k)
        width = (table.tree_width[index] - 1).clamp(0, self.width - 1).long()
        drafts = self._candidates(table, index).flatten(1).gather(1, candidate[width])
        num_drafts = torch.minimum(num_drafts, sizes[width])
        return make_proposal(drafts, num_drafts, parents[width] if self.width > 1 else None)

    def _candidates(self, table: Table, index: Tensor) -> Tensor:
        """Return the W best tokens of each head, [B, num_heads, W] int32. For requests that sample, the
        CONTENDERS most likely tokens are ranked with the noise that the target will use at that position, so
        head and target draw the same token if their distributions agree."""
        scores = self.heads.logits(self.hidden[index]).float()
        likely, place = scores.topk(min(max(CONTENDERS, self.width), scores.shape[2]))
        ids = self.heads.tokens(place)
        position = table.num_tokens[index, None] + torch.arange(self.heads.num_heads, device=index.device)
        log_e = noise.naive(table.seed[index, None], position, ids)
        best = (likely - table.temperature[index, None, None] * log_e).topk(self.width).indices
        return ids.gather(2, best)

    def _tree(self, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the trees of all widths 1 .. W: the candidate (head * W + rank) of each node [W, k] int64,
        the 1-based node of its parent, 0 for the root [W, k] int32, and the number of nodes [W] int32."""
        if k not in self._trees:
            candidate, parents, sizes = [], [], []
            for width in range(1, self.width + 1):
                paths = tree_paths(self.heads.num_heads, width, k)
                place = {(): 0} | {path: i for i, path in enumerate(paths, 1)}
                fill = [0] * (k - len(paths))
                candidate.append([(len(p) - 1) * self.width + p[-1] for p in paths] + fill)
                parents.append([place[p[:-1]] for p in paths] + fill)
                sizes.append(len(paths))
            tensor = partial(torch.tensor, dtype=torch.int32, device=self.hidden.device)
            self._trees[k] = tensor(candidate).long(), tensor(parents), tensor(sizes)
        return self._trees[k]

    def learn(self, table: Table, proposal: Proposal, batch: Batch, verdict: Verdict, hidden: Tensor) -> None:
        last = (verdict.num_emitted - 1).clamp(min=0).long()
        query = batch.q_start + verdict.path.gather(1, last[:, None]).squeeze(1)
        row = torch.where((batch.rows >= 0) & (verdict.num_emitted > 0), batch.rows, -1)
        self.hidden[row] = hidden[query.clamp(max=len(hidden) - 1)]
        self.ready[row] = torch.ones_like(row, dtype=torch.bool)  # assigning True would copy from the host


def tree_paths(num_heads: int, width: int, k: int) -> list[tuple[int, ...]]:
    """Return the candidate ranks (r1, r2, ...) on the path to each of the k most likely nodes of a tree, most
    likely first, so that parents come first. The probability that a head's candidate of rank r is accepted is
    taken as (1 + r) ** -1.5 / 2, a rough fit."""
    paths: list[tuple[float, tuple[int, ...]]] = []
    level: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]  # the k most likely nodes of one depth
    for _ in range(num_heads):
        further = [(p * 0.5 * (1 + r) ** -1.5, (*path, r)) for p, path in level for r in range(width)]
        level = sorted(further)[:k]
        paths += level
    return [path for _, path in sorted(paths)[:k]]
