"""Base class of drafters that read the target's hidden states, DFlash and EAGLE-3.

The target's forward pass keeps the residual stream after the layers that the drafter names. `fc` projects
these hidden states to the features of a token, one vector, from which the drafter computes keys and values
for each position of the text (EAGLE-3 also uses the next token's embedding). They are stored in the drafter's
own KV cache, which has the blocks of the target's cache, whenever the target stores its own: for prompt
chunks, and in every step for the tokens that it commits. So when the drafter runs, the cache holds the K/V of
all positions before the last committed token, also after steps without drafts, preemption and prefix cache
hits. In C++, EAGLE-3 stores them only when a block is complete or the row drafts, so steps without drafts
cost less. Positions that follow may hold the K/V of drafts, which are overwritten.

Drafts of one position are ranked by the logits. For a request that samples, the `CONTENDERS` most likely
tokens are ranked with the noise that the target will use at that position, so drafter and target draw the
same token if their distributions agree.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import SpecConfig
from ..kernels.batch import Batch
from ..kernels.layer.residual import Norm
from ..kernels.sampling import noise
from ..kernels.speculation.proposal import Proposal
from ..kernels.table import Table
from ..models import default_drafter, resolve_model
from ..models.warm_up import warm_up
from . import Drafter, Memory, Target, draft_limits, make_proposal, no_drafts
from .checkpoint import DraftCheckpoint, load_checkpoint

CONTENDERS = 16  # most likely tokens of a position from which drafts are sampled


class HiddenStateDrafter(Drafter):
    """Base class of drafters whose KV cache is computed from the target's hidden states. Subclasses define
    `max_drafts`, `read_hidden_states` and `_draft`."""

    runs_model = True

    def __init__(self, spec: SpecConfig, loaded: DraftCheckpoint) -> None:
        self.model, self.fc, self.lm_head = loaded.model, loaded.fc, loaded.lm_head
        self.hidden_norm = Norm(loaded.hidden_norm, self.model.config.rms_norm_eps)
        self.hidden_state_layers, self.token_map = loaded.layers, loaded.token_map
        per_token = self.model.config.kv_bytes_per_token(self.model.dtype)
        self.memory = Memory(loaded.weight_bytes, per_token)

    @classmethod
    def load(cls, spec: SpecConfig, target: Target) -> "HiddenStateDrafter":
        if spec.draft_model is not None:
            folder = resolve_model(spec.draft_model)
        elif target.folder is not None:
            folder = default_drafter(target.folder)
        else:
            raise ValueError(f"method={spec.method!r} needs a drafter; set draft_model.")
        return cls(spec, load_checkpoint(folder, target.model, cls.name))

    def attach(self, table: Table, num_blocks: int, max_tokens: int, may_wait: bool) -> None:
        self.may_wait = may_wait
        self.kv = self.model.allocate_kv_cache(num_blocks, table.block_size)
        if not may_wait:
            width = len(self.hidden_state_layers) * self.model.config.hidden_size
            states = torch.zeros(max_tokens, width, dtype=self.model.dtype, device=table.device)

            def read(batch: Batch) -> None:
                self.read_hidden_states(table, batch, states[: batch.num_tokens])

            warm_up(self.model, table, max_tokens, read)

    def admit(self, row: int, num_tokens: int, blocks: Sequence[int], num_kept: int) -> None:
        self.model.zero_blocks(self.kv, blocks[num_kept:])

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        num_drafts = self._ready(table, rows, draft_limits(table, rows, min(k, self.max_drafts)))
        if not self.may_wait:
            return make_proposal(*self._draft(table, rows, num_drafts, k))
        active = num_drafts.nonzero().squeeze(1)
        if not len(active):
            return no_drafts(rows, k)

        def to_all_rows(part: Tensor) -> Tensor:
            return part.new_zeros(len(rows), *part.shape[1:]).index_copy_(0, active, part)

        return make_proposal(*map(to_all_rows, self._draft(table, rows[active], num_drafts[active], k)))

    # A subclass defines these; `_ready` is optional.

    def _ready(self, table: Table, rows: Tensor, num_drafts: Tensor) -> Tensor:
        """Return the number of drafts [B], 0 for the rows that cannot draft yet."""
        return num_drafts

    def _draft(self, table: Table, rows: Tensor, num_drafts: Tensor, k: int) -> tuple[Tensor, ...]:
        """Return drafts [B, k] int32 and their number [B] int32, for trees also `parents`: of `num_drafts`
        [B] or fewer drafts for each of the rows [B]."""
        raise NotImplementedError

    def _best(self, hidden: Tensor, table: Table, rows: Tensor, positions: Tensor, width: int = 1) -> Tensor:
        """Return the W best tokens [B, n, W] int32 at positions [B, n] from hidden states [B * n, H]."""
        index = rows.clamp(min=0)[:, None]
        scores = self.lm_head(hidden).float().unflatten(0, positions.shape)  # [B, n, Vd]
        temperature = table.temperature[index]
        is_greedy = self.may_wait and not temperature.any()
        number = width if is_greedy else max(CONTENDERS, width)
        likely, place = scores.topk(min(number, scores.shape[2]))
        ids = (place if self.token_map is None else self.token_map[place]).int()
        if is_greedy:
            return ids
        seeds = table.seed[index].repeat(1, positions.shape[1]).flatten()
        log_e = noise.draw(seeds, positions.flatten(), ids.flatten(0, 1)).view_as(likely)
        best = (likely - temperature[..., None] * log_e).topk(width).indices
        return ids.gather(2, best)
