"""Continuous batching: every step computes some tokens of every request that can run, whatever its stage.

A step has a token budget. Running requests come first, oldest first: one token for a request that decodes,
a chunk for one whose prompt is not through. What is left of the budget admits waiting requests. When a
request needs a page and none is free, the youngest gives its pages back and waits: its tokens are kept, and
their keys and values computed again later.

With `speculation`, a request of which only the last token is left to compute takes a round of guessing and
verifying in place of that one token.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fa_ref.api import ForwardMode, ReqToTokenPool
from tiny_engine.cache import PageCache
from tiny_engine.model import Model
from tiny_engine.runner import Runner
from tiny_engine.speculate import Speculation, Speculator


@dataclass(eq=False)
class Request:
    id: int
    tokens: list[int]  # the prompt, then what was generated
    prompt_len: int
    max_new_tokens: int
    computed: int = 0  # leading tokens whose keys and values are in the pool
    drafted: int = 0  # the same of the draft model's pool
    pages: list[int] = field(default_factory=list)  # logical page -> page of the pool
    row: int = 0  # of req_to_token, while running

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed


class Engine:
    """`backend_factory(config)` makes the attention backend, for instance `fa_fast.FlashAttentionBackend`.

    `pages` of `page_size` tokens are all the memory there is. `count` tells what happened: steps, steps per
    forward mode, tokens computed, tokens served from shared pages, preemptions; with speculation also rounds
    ("verify_steps", one a request) and the guesses that became part of a text ("accepted"). `graph_buckets`: batch
    sizes for which a decode is captured and replayed; the largest must be able to hold `max_requests`.
    """

    def __init__(
        self,
        model: Model,
        backend_factory: Callable,
        *,
        pages: int = 64,
        page_size: int = 16,
        max_requests: int = 8,
        token_budget: int = 64,
        share_prefixes: bool = True,
        stop_ids: tuple[int, ...] = (),
        speculation: Speculation | None = None,
        graph_buckets: tuple[int, ...] = (),
    ):
        if min(pages, page_size, max_requests, token_budget) < 1:
            raise ValueError(f"{pages=}, {page_size=}, {max_requests=}, {token_budget=}: need at least 1 of each")
        self.room = speculation.room if speculation else 0  # slots of a request behind its tokens
        self.model, self.max_requests, self.token_budget = model, max_requests, token_budget
        self.stop_ids = stop_ids
        self.context_len = max(0, min(model.config.context_len, pages * page_size - self.room))
        self.cache = PageCache(pages=pages, page_size=page_size, share=share_prefixes)
        self.rows = ReqToTokenPool(size=max_requests, context_len=self.context_len, extra_tokens=self.room)
        sizes = {"pages": pages, "page_size": page_size}
        self.target = Runner(model, backend_factory, self.rows, **sizes)
        self.backend = self.target.backend
        if graph_buckets:
            self.target.capture(graph_buckets)
        self.speculator = speculation and Speculator(speculation, self.target, backend_factory, **sizes)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.count: Counter[str] = Counter()

    @property
    def pages_used(self) -> int:
        return self.cache.used

    def generate(
        self, prompts: list[list[int]], max_new_tokens: int, on_token: Callable = lambda prompt, token: None
    ) -> list[list[int]]:
        """Greedy continuations of the prompts, in order; calls `on_token(prompt number, token)` at once."""
        requests = self.submit(prompts, max_new_tokens)
        try:
            while self.running or self.waiting:
                for request, token in self.step():
                    on_token(request.id, token)
        finally:  # after an error or an interrupt too: no page stays behind
            self.waiting.clear()
            while self.running:
                self._release(self.running.pop())
        return [request.output for request in requests]

    def submit(self, prompts: list[list[int]], max_new_tokens: int) -> list[Request]:
        """Queue a request per prompt, or raise and queue none."""
        for i, prompt in enumerate(prompts):
            if not prompt or max_new_tokens < 1:
                raise ValueError(f"prompt {i}: {len(prompt)} tokens and {max_new_tokens} new; need 1 of each")
            if len(prompt) + max_new_tokens > self.context_len:
                raise ValueError(
                    f"prompt {i} can never run: {len(prompt)} tokens and {max_new_tokens} new, but all "
                    f"pages and the model's context hold {self.context_len}; shorten it or add pages"
                )
        requests = [Request(i, list(prompt), len(prompt), max_new_tokens) for i, prompt in enumerate(prompts)]
        self.waiting.extend(requests)
        return requests

    def step(self) -> list[tuple[Request, int]]:
        """Compute some tokens of whatever can run; returns the tokens that this produced."""
        work = self._schedule()
        ahead = [request for request, n in work if self._speculates(request, n)]
        work = [(request, n) for request, n in work if request not in ahead]
        # In this order: a request that speculates may read pages that another one fills in this very step.
        produced = (self._extend(work) if work else []) + (self._speculate(ahead) if ahead else [])
        self.count["steps"] += bool(work or ahead)
        return produced

    def _speculates(self, request: Request, n: int) -> bool:
        return self.speculator is not None and n == request.remaining == 1

    def _extend(self, work: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """One forward pass over some tokens of each request; a token of those that are all computed then."""
        decodes = sum(len(request.output) > 0 and request.remaining == 1 for request, _ in work)
        mode = ForwardMode.DECODE if decodes == len(work) else ForwardMode.MIXED if decodes else ForwardMode.EXTEND
        spans = [(r.row, r.tokens[: r.computed + n], r.computed) for r, n in work]
        hidden = self.target.extend(mode, spans)
        if self.speculator:
            self.speculator.draft.extend(mode, spans)
        self.count.update({"computed": len(hidden), mode.name: 1})
        ends = torch.tensor([n for _, n in work]).cumsum(0) - 1  # rows of `hidden`
        for request, n in work:
            request.computed = request.drafted = request.computed + n
        ready = [i for i, (request, _) in enumerate(work) if request.remaining == 0]
        tokens = self.model.logits(hidden[ends[ready]]).argmax(-1).tolist()
        return [pair for i, token in zip(ready, tokens, strict=True) for pair in self._append(work[i][0], [token])]

    def _speculate(self, requests: list[Request]) -> list[tuple[Request, int]]:
        """One round of guessing and verifying; then the pages of the guesses are given back."""
        produced = []
        for request, tokens in zip(requests, self.speculator.round(requests), strict=True):
            # Only now are the root and what the last round accepted in both pools.
            end = len(request.tokens)
            self.cache.publish(request.tokens, request.pages, start=request.drafted, end=end)
            request.drafted, request.computed = end, request.computed + len(tokens)
            kept = self._append(request, tokens)
            if request in self.running:
                pages = -(-len(request.tokens) // self.cache.page_size)
                self.cache.release(request.pages[pages:])
                del request.pages[pages:]
            self.count.update({"verify_steps": 1, "accepted": min(len(kept), len(tokens) - 1)})
            produced += kept
        drafts = len(requests) * self.speculator.how.draft_tokens
        self.count.update({"computed": drafts, ForwardMode.TARGET_VERIFY.name: 1})
        return produced

    def _append(self, request: Request, tokens: list[int]) -> list[tuple[Request, int]]:
        """The tokens that still belong to the text; a request that is finished leaves."""
        kept = []
        for token in tokens:
            request.tokens.append(token)
            kept.append((request, token))
            if len(request.output) == request.max_new_tokens or token in self.stop_ids:
                self.running.remove(request)
                self._release(request)
                break
        return kept

    def _schedule(self) -> list[tuple[Request, int]]:
        """What to compute in this step: (request, number of tokens), each with pages for all its tokens."""
        work: list[tuple[Request, int]] = []
        budget, preempted = self.token_budget, False
        for request in list(self.running):  # oldest first, so the victim below is never in `work` already
            while budget and request in self.running and not self._reserve(request):
                victim = self.running.pop()
                self._release(victim)
                self.waiting.appendleft(victim)
                self.count["preempted"] += 1
                preempted = True
            if budget and request in self.running:
                budget -= self._take(work, request, budget)
        while budget and self.waiting and len(self.running) < self.max_requests and not preempted:
            request = self.waiting[0]
            [request.row] = self.rows.alloc(1)
            request.pages = self.cache.match(request.tokens)
            request.computed = request.drafted = len(request.pages) * self.cache.page_size
            if not self._reserve(request):
                self._release(request)
                break
            self.running.append(self.waiting.popleft())
            self.count["shared"] += request.computed
            budget -= self._take(work, request, budget)
        return work

    def _take(self, work: list[tuple[Request, int]], request: Request, budget: int) -> int:
        n = min(budget, request.remaining)
        work.append((request, n))
        # Findable in the very step that computes them: a backend writes all keys of a step before it attends.
        if not self._speculates(request, n):
            self.cache.publish(request.tokens, request.pages, start=request.computed, end=request.computed + n)
        return n

    def _reserve(self, request: Request) -> bool:
        """Pages for all tokens and guesses of the request, their slots in its row of req_to_token, or False."""
        size, end = self.cache.page_size, len(request.tokens) + self.room
        pages = self.cache.alloc(-(-end // size) - len(request.pages))
        if pages is None:
            return False
        request.pages += pages
        slots = torch.tensor(request.pages, dtype=torch.int32)[:, None] * size + torch.arange(size)
        self.rows.req_to_token[request.row, :end] = slots.flatten()[:end]
        return True

    def _release(self, request: Request) -> None:
        self.cache.release(request.pages)
        self.rows.free([request.row])
        request.pages, request.computed, request.drafted = [], 0, 0
