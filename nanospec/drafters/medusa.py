"""Guess several tokens at once from the target's last hidden state (Medusa, Cai et al., 2024).

Head i guesses the token i + 1 places behind the one that the target drew from that hidden state, not
knowing what that token was. So the hidden state from which a row's last token was drawn is kept; a row
has none, and drafts nothing, before its first step and after a preemption.

With a tree width W above 1 the W likeliest tokens of every head are combined to a tree of fixed shape.

Files have the layout that FasterDecoding/Medusa publishes, with H the target's hidden size, V its
vocabulary, L blocks per head; each name may begin with `medusa_head.`:

    {head}.{0 .. L-1}.linear.weight  [H, H]
    {head}.{0 .. L-1}.linear.bias    [H]
    {head}.{L}.weight                [V, H]       may be missing: the head then shares the target's lm_head
    token_map                        [Vd] ints    optional: the only tokens that are guessed, so that
                                                  projections have Vd rows (as in FR-Spec, Zhao et al.,
                                                  2025, and vLLM); the target draws from all

`nanospec train` writes such files.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.batch import Batch
from ..kernels.layer.linear import Linear, make_linear
from ..kernels.sampling import noise
from ..kernels.speculation.proposal import Proposal
from ..kernels.speculation.verify import Verdict
from ..kernels.table import Table
from ..models import default_heads
from ..models.weights import check_fit, listed, open_safetensors
from ..text import shown
from . import Drafter, Memory, Target, make_proposal, room

if TYPE_CHECKING:
    from ..config import SpecConfig
    from ..models.decoder import Model

CONTENDERS = 16  # tokens of a head among which it draws
TOKEN_MAP = "token_map"
PIECE = 64  # columns of a packed lm_head that are read at once


@dataclass(frozen=True)
class Heads:
    """Heads on the target's device.

    Attributes:
        blocks: weight [num_heads, H, H] and bias [num_heads, 1, H] of x + SiLU(W x + b), first to last.
        projections: [Vd, H]: a single one that all heads share, or one per head.
        token_map: [Vd] int64, the token of each row of the projections; None if it is its index.
    """

    blocks: tuple[tuple[Tensor, Tensor], ...]
    projections: tuple[Linear, ...]
    token_map: Tensor | None

    @classmethod
    def load(cls, path: str | Path, model: Model) -> Heads:
        """Load the heads of a safetensors file in the model's dtype. Raises FileNotFoundError, or ValueError
        for a file that is corrupt or does not fit the model."""
        file, hidden, rows = Path(path), model.config.hidden_size, model.config.vocab_size
        if not file.is_file():
            raise FileNotFoundError(f"there are no heads at {file}; give a .safetensors file of heads.")
        with open_safetensors(file) as handle:
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
            what = f"The {num_heads} heads of {num_layers} block(s) in {file} do not fit the model "
            what += f"(hidden size {hidden}, {rows} tokens to guess)"
            check_fit({name: handle.get_slice(own) for name, own in stored.items()}, shapes, what, last)

            def get(name: str) -> Tensor:
                tensor: Tensor = handle.get_tensor(stored[name])
                return tensor.to(model.device, model.dtype, copy=True)

            def stack(n: int, part: str) -> Tensor:
                return torch.stack([get(f"{head}.{n}.linear.{part}") for head in range(num_heads)])

            blocks = tuple((stack(n, "weight"), stack(n, "bias")[:, None]) for n in range(num_layers))
            own = {name: make_linear(get(name)) for name in last if name in stored}
        names = last if own else last[:1]  # the same for all heads
        projections = (own[name] if name in own else lm_head_for(model, token_map) for name in names)
        return cls(blocks, tuple(projections), token_map)

    @property
    def num_heads(self) -> int:
        """The number of tokens guessed from one hidden state."""
        return len(self.blocks[0][0])

    @property
    def weight_bytes(self) -> int:
        """Bytes of the blocks and projections, of which one may be the target's lm_head."""
        blocks = sum(tensor.nbytes for block in self.blocks for tensor in block)
        return blocks + sum(linear.num_bytes for linear in self.projections)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores of the guesses of each head: [N, H] -> [N, num_heads, Vd]. `hidden` is what
        `Model.forward` returned at a position t; head i guesses token t + 2 + i."""
        x = hidden.expand(self.num_heads, -1, -1)  # [num_heads, N, H]
        for weight, bias in self.blocks:
            x = x + F.silu(torch.baddbmm(bias, x, weight.mT))
        if len(self.projections) == 1:  # one product for all heads
            return self.projections[0](x.transpose(0, 1).flatten(0, 1)).unflatten(0, (-1, self.num_heads))
        return torch.stack([project(part) for project, part in zip(self.projections, x, strict=True)], 1)

    def tokens(self, index: Tensor) -> Tensor:
        """Return the token ids, int32, of columns of the logits."""
        return (index if self.token_map is None else self.token_map[index]).int()


def _layout(file: Path, names: Collection[str]) -> tuple[int, int]:
    """Return the number of heads, and of blocks in each, that the names of the tensors show. Raises
    ValueError if there is none."""
    found = [re.fullmatch(r"([0-9]{1,2})\.([0-9]{1,2})\.linear\.(?:weight|bias)", name) for name in names]
    heads, layers = ([int(match[part]) for match in found if match] for part in (1, 2))
    if not heads:
        raise ValueError(
            f"{file} holds no heads: no tensor has a name such as '0.0.linear.weight' (it has "
            f"{listed(names) or 'no tensors'}); give a file of Medusa heads."
        )
    return max(heads) + 1, max(layers) + 1


def checked_token_map(ids: Tensor, file: Path, vocab_size: int) -> Tensor:
    """Return the token ids as int64. Raises ValueError if they are not ids of the model, or not distinct."""
    said, dtype = f"{TOKEN_MAP} in {file}", str(ids.dtype).removeprefix("torch.")
    if dtype not in ("int32", "int64") or ids.dim() != 1 or len(ids) == 0:
        raise ValueError(f"{said} must be a list of int32 or int64, not {dtype} {shown(list(ids.shape))}.")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) < len(ids):
        raise ValueError(f"{said} must hold different ids from 0 to {vocab_size - 1}; it fits another model.")
    return ids.long()


def lm_head_for(model: Model, token_map: Tensor | None) -> Linear:
    """Return the model's lm_head, or its rows of the tokens that are guessed."""
    return model.lm_head if token_map is None else make_linear(lm_head_rows(model, token_map))


def lm_head_rows(model: Model, tokens: Tensor) -> Tensor:
    """Return the rows of the target's lm_head for the tokens [n] int64, not packed: [n, H]. A packed lm_head
    cannot be read, but products with 0 and 1 are exact: the unit vectors give its columns."""
    if isinstance(model.embedding, Tensor) and model.config.tie_word_embeddings:
        return model.embedding[tokens]
    if model.lm_head.rows is not None:
        return model.lm_head.rows[tokens]
    units = torch.eye(model.config.hidden_size, dtype=model.dtype)
    return torch.cat([model.lm_head(piece)[:, tokens] for piece in units.split(PIECE)]).T.contiguous()


class MedusaDrafter(Drafter):
    """Medusa heads and the hidden states they start from.

    Attributes:
        hidden: [S + 1, H] the hidden state that each row's last token was drawn from; the last row is written
            for padding.
        ready: [S + 1] bool, whether `hidden` has it.
    """

    name = "medusa"
    runs_model = True
    makes_trees = True

    def __init__(self, spec: SpecConfig, heads: Heads, target: Model) -> None:
        known = target.config.vocab_size if heads.token_map is None else len(heads.token_map)
        if spec.tree_width > known:
            raise ValueError(f"tree_width={spec.tree_width} is more than the {known} tokens of the heads.")
        self.heads, self.width, self._target = heads, spec.tree_width, target
        if self.width == 1:
            self.max_drafts = heads.num_heads
        self.memory = Memory(heads.weight_bytes)
        self._trees: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    @classmethod
    def load(cls, spec: SpecConfig, target: Target) -> MedusaDrafter:
        file = spec.heads
        if file is None and target.folder is None:
            raise ValueError(f"method={spec.method!r} needs heads: --heads FILE, or SpecConfig(heads=...).")
        heads = Heads.load(file or default_heads(target.folder), target.model)  # type: ignore[arg-type]
        return cls(spec, heads, target.model)

    def attach(self, table: Table, num_blocks: int, max_tokens: int, may_wait: bool) -> None:
        rows, size = table.num_rows + 1, self._target.config.hidden_size
        self.hidden = torch.zeros(rows, size, dtype=self._target.dtype, device=table.device)
        self.ready = torch.zeros(rows, dtype=torch.bool, device=table.device)

    def release(self, row: int) -> None:
        self.ready[row].fill_(False)

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        index = rows.clamp(min=0)
        wanted = torch.where(self.ready[index], room(table, rows, k), 0)
        candidate, parents, sizes = self._tree(k)
        width = (table.width[index] - 1).clamp(0, self.width - 1).long()
        drafts = self._likely(table, index).flatten(1).gather(1, candidate[width])
        wanted = torch.minimum(wanted, sizes[width])
        return make_proposal(drafts, wanted, parents[width] if self.width > 1 else None)

    def _likely(self, table: Table, index: Tensor) -> Tensor:
        """Return what each head finds likeliest, [B, num_heads, W] int32. Where a request samples it is what
        the head draws of its CONTENDERS likeliest tokens with the noise that the target will have there, so
        that they agree where their probabilities do."""
        scores = self.heads.logits(self.hidden[index]).float()
        likely, place = scores.topk(min(max(CONTENDERS, self.width), scores.shape[2]))
        ids = self.heads.tokens(place)
        position = table.num_tokens[index, None] + torch.arange(self.heads.num_heads, device=index.device)
        luck = noise.naive(table.seed[index, None], position, ids)
        best = (likely - table.temperature[index, None, None] * luck).topk(self.width).indices
        return ids.gather(2, best)

    def _tree(self, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """For every width: which candidate (head * W + rank) each node is, its parent's place, and the
        number of nodes. [W, k] int64, [W, k] int32, [W] int32."""
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
        self.ready[row] = torch.ones_like(row, dtype=torch.bool)  # True would be copied from the host


def tree_paths(num_heads: int, width: int, k: int) -> list[tuple[int, ...]]:
    """Return the ranks (r1, r2, ...) along the path to each of at most k nodes of a tree, likeliest first,
    which puts parents first. A head's candidate of rank r is taken to be right with probability
    (1 + r) ** -1.5 / 2, a rough fit."""
    paths: list[tuple[float, tuple[int, ...]]] = []
    level: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]  # of nodes of one depth, the k likeliest
    for _ in range(num_heads):
        further = [(p * 0.5 * (1 + r) ** -1.5, (*path, r)) for p, path in level for r in range(width)]
        level = sorted(further)[:k]
        paths += level
    return [path for _, path in sorted(paths)[:k]]
