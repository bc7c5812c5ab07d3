"""Speculative decoding: a cheap draft model guesses several tokens, the model checks all guesses in one pass.

The draft is the model's own first layers under its own last norm and embedding, with keys and values of its own in
the slots that the model uses too. A round, for requests of which only the last token, the root, is not computed:

    draft extend   the draft reads what the last round accepted, and the root: the topk likeliest next tokens
    draft decode   num_steps - 1 times: each of topk branches one token deeper
    verify         the model reads the root and the T - 1 best guesses at once, a chain or a tree
    accept         from the root on, guesses that are the model's own choice, then the model's next token

The text is the one greedy decoding gives, whatever the draft guesses; only the number of rounds differs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from einops import rearrange
from torch import Tensor

from fa_ref.api import DraftInput, DraftTree, ForwardMode, VerifyInput
from tiny_engine.runner import Runner


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How to guess. `package` is fa_ref or fa_fast: its tree building, its acceptance, its multi-step backend."""

    package: ModuleType
    provider: str | None = None  # of the multi-step backend
    draft_layers: int
    topk: int = 1  # branches; 1: the guesses are a chain
    num_steps: int = 3  # how deep they go
    draft_tokens: int = 4  # T, how many the model reads at once: the root and T - 1 guesses

    def __post_init__(self):
        guesses = self.topk + (self.num_steps - 1) * self.topk**2
        if min(self.draft_layers, self.topk, self.num_steps) < 1 or not 1 < self.draft_tokens <= guesses + 1:
            raise ValueError(
                f"{self}: needs at least 1 layer, branch and step, and 2 to {guesses + 1} draft tokens: "
                f"a root and up to {guesses} guesses"
            )

    @property
    def room(self) -> int:
        """Slots a request needs beyond its tokens: for the guesses in verify, or for all branches in the draft."""
        return max(self.draft_tokens - 1, self.topk * self.num_steps)


class Speculator:
    def __init__(self, how: Speculation, target: Runner, backend_factory: Callable, **sizes: int):
        self.how, self.target, self.rows = how, target, target.rows
        self.draft = Runner(target.model.first(how.draft_layers), backend_factory, target.rows, **sizes)
        multi_step = how.package.FlashAttentionMultiStepBackend
        self.steps = multi_step(self.draft.config, how.topk, how.num_steps, provider=how.provider)

    def round(self, requests: list) -> list[list[int]]:
        """The next tokens of each request, at least one; their keys and values but the last's are in the pool."""
        tokens, tree = self._guess(requests)
        return self._verify(requests, tokens, tree)

    def _guess(self, requests: list) -> tuple[Tensor, DraftTree]:
        """Draft tokens [requests, T], the roots first, and how they hang together."""
        how, rows = self.how, [request.row for request in requests]
        spans = [(request.row, request.tokens, request.drafted) for request in requests]
        hidden = self.draft.extend(ForwardMode.DRAFT_EXTEND, spans)
        last = torch.tensor([len(tokens) - drafted for _, tokens, drafted in spans]).cumsum(0) - 1
        beams = how.package.start(self._logprobs(hidden[last]), how.topk)
        seq_lens = torch.tensor([len(request.tokens) for request in requests])
        slots = self._columns(rows, seq_lens, how.topk * how.num_steps)
        slots = rearrange(slots, "r (branch step) -> r branch step", branch=how.topk)
        spec_info = DraftInput(topk=how.topk, num_steps=how.num_steps)
        batch = self.draft.batch(ForwardMode.DECODE, rows, seq_lens, slots, spec_info=spec_info)
        self.steps.init_forward_metadata(batch)
        for step, backend in enumerate(self.steps.attn_backends[: how.num_steps - 1]):
            positions = (seq_lens + step).repeat_interleave(how.topk)
            hidden = self.draft.forward(batch, beams.tokens.flatten(), positions, backend)
            logprobs = rearrange(self._logprobs(hidden), "(r branch) vocab -> r branch vocab", branch=how.topk)
            beams = how.package.grow(beams, logprobs)
            self._follow(beams.origin, slots[..., : step + 1])
        roots = torch.tensor([request.tokens[-1] for request in requests])
        return how.package.select(beams, roots, how.draft_tokens)

    def _follow(self, origin: Tensor, slots: Tensor) -> None:
        """A branch that continues another one takes over its keys and values. slots [requests, branches, steps]."""
        source = slots.gather(1, origin[..., None].expand_as(slots))
        for buffer in (*self.draft.kv.k_buffer, *self.draft.kv.v_buffer):
            buffer[slots] = buffer[source]

    def _verify(self, requests: list, tokens: Tensor, tree: DraftTree) -> list[list[int]]:
        how, rows = self.how, [request.row for request in requests]
        seq_lens = torch.tensor([request.computed for request in requests])
        slots = self._columns(rows, seq_lens, how.draft_tokens)
        mask = tree.custom_mask(seq_lens) if how.topk > 1 else None
        spec_info = VerifyInput(draft_token_num=how.draft_tokens, topk=how.topk, custom_mask=mask)
        batch = self.target.batch(ForwardMode.TARGET_VERIFY, rows, seq_lens, slots, spec_info=spec_info)
        self.target.backend.init_forward_metadata(batch)
        hidden = self.target.forward(batch, tokens.flatten(), tree.positions(seq_lens))
        choices = self.target.model.logits(hidden).argmax(-1).view_as(tokens)
        accepted = how.package.verify_greedy(tree, tokens, choices)
        how.package.compact_kv(self.target.kv, self.rows.req_to_token, batch.req_pool_indices, seq_lens, accepted)
        new = accepted.new_tokens(tokens).tolist()
        return [row[:length] for row, length in zip(new, accepted.lengths.tolist(), strict=True)]

    def _logprobs(self, hidden: Tensor) -> Tensor:
        return self.draft.model.logits(hidden).log_softmax(-1)

    def _columns(self, rows: list[int], start: Tensor, count: int) -> Tensor:
        """The slots [requests, count] of each request's positions from `start` on."""
        return self.rows.req_to_token[torch.tensor(rows)[:, None], start[:, None] + torch.arange(count)].long()
