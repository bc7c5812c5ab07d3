"""Continuous batching: every step computes some tokens of every request that can run, whatever its stage.

A step has a token budget. Running requests come first, oldest first: one token for a request that decodes,
a chunk for one whose prompt is not through. What is left of the budget admits waiting requests. When a
request needs a page and none is free, the youngest gives its pages back and waits: its tokens are kept, and
their keys and values computed again later.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fa_ref.api import AttentionLayer, BackendConfig, ForwardBatch, ForwardMode, MHAKVPool, ReqToTokenPool
from tiny_engine.cache import PageCache
from tiny_engine.model import Model


@dataclass(eq=False)
class Request:
    id: int
    tokens: list[int]  # the prompt, then what was generated
    prompt_len: int
    max_new_tokens: int
    computed: int = 0  # leading tokens whose keys and values are in the pool
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
    forward mode, tokens computed, tokens served from shared pages, preemptions.
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
    ):
        if min(pages, page_size, max_requests, token_budget) < 1:
            raise ValueError(f"{pages=}, {page_size=}, {max_requests=}, {token_budget=}: need at least 1 of each")
        c, dtype = model.config, torch.float32
        self.model, self.max_requests, self.token_budget = model, max_requests, token_budget
        self.stop_ids, self.context_len = stop_ids, min(c.context_len, pages * page_size)
        self.cache = PageCache(pages=pages, page_size=page_size, share=share_prefixes)
        self.rows = ReqToTokenPool(size=max_requests, context_len=self.context_len)
        sizes = {
            "size": pages * page_size,
            "head_num": c.kv_heads,
            "head_dim": c.head_dim,
            "layer_num": c.layers,
        }
        self.kv = MHAKVPool(page_size=page_size, dtype=dtype, **sizes)
        self.pools = {"req_to_token_pool": self.rows, "token_to_kv_pool": self.kv}
        heads = {"tp_q_head_num": c.heads, "tp_k_head_num": c.kv_heads, "head_dim": c.head_dim}
        self.layers = [AttentionLayer(layer_id=i, scaling=c.head_dim**-0.5, **heads) for i in range(c.layers)]
        sizes = {"page_size": page_size, "context_len": self.context_len}
        config = BackendConfig(device="cpu", dtype=dtype, kv_cache_dtype=dtype, **sizes, **self.pools)
        self.backend = backend_factory(config)
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
        """One forward pass of the model over whatever can run; returns the tokens it produced."""
        work = self._schedule()
        if not work:
            return []
        batch = self._forward_batch(work)
        self.backend.init_forward_metadata(batch)
        spans = [(request, request.computed, request.computed + n) for request, n in work]
        ids = torch.tensor([token for request, a, b in spans for token in request.tokens[a:b]])
        positions = torch.cat([torch.arange(a, b) for _, a, b in spans])

        def attend(layer_id, q, k, v):
            return self.backend.forward(q, k, v, self.layers[layer_id], batch)

        hidden = self.model.forward(ids, positions, attend)
        self.count.update({"steps": 1, "computed": len(ids), batch.forward_mode.name: 1})
        return self._sample(work, hidden)

    def _sample(self, work: list[tuple[Request, int]], hidden: torch.Tensor) -> list[tuple[Request, int]]:
        """The next token of each request whose tokens are all computed; finished requests leave."""
        ready, rows, row = [], [], -1
        for request, n in work:
            row += n  # of the request's last token in `hidden`
            request.computed += n
            if request.remaining == 0:
                ready.append(request)
                rows.append(row)
        produced = list(zip(ready, self.model.logits(hidden[rows]).argmax(-1).tolist(), strict=True))
        for request, token in produced:
            request.tokens.append(token)
            if len(request.output) == request.max_new_tokens or token in self.stop_ids:
                self.running.remove(request)
                self._release(request)
        return produced

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
            request.computed = len(request.pages) * self.cache.page_size
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
        self.cache.publish(request.tokens, request.pages, start=request.computed, end=request.computed + n)
        return n

    def _reserve(self, request: Request) -> bool:
        """Pages for all tokens of the request and their slots in its row of req_to_token, or False."""
        size = self.cache.page_size
        pages = self.cache.alloc(-(-len(request.tokens) // size) - len(request.pages))
        if pages is None:
            return False
        request.pages += pages
        slots = torch.tensor(request.pages, dtype=torch.int32)[:, None] * size + torch.arange(size)
        self.rows.req_to_token[request.row, : len(request.tokens)] = slots.flatten()[: len(request.tokens)]
        return True

    def _release(self, request: Request) -> None:
        self.cache.release(request.pages)
        self.rows.free([request.row])
        request.pages, request.computed = [], 0

    def _forward_batch(self, work: list[tuple[Request, int]]) -> ForwardBatch:
        """The step as a backend sees it: cached prefix and new tokens per request, all laid end to end."""
        old_lens, new_lens = [request.computed for request, _ in work], [n for _, n in work]
        seq_lens = torch.tensor(old_lens) + torch.tensor(new_lens)
        extend = dict(extend_seq_lens=torch.tensor(new_lens), extend_seq_lens_cpu=new_lens)
        extend |= dict(extend_prefix_lens=torch.tensor(old_lens), extend_prefix_lens_cpu=old_lens)
        decodes = sum(len(request.output) > 0 and request.remaining == 1 for request, _ in work)
        mode = ForwardMode.MIXED if decodes else ForwardMode.EXTEND
        if decodes == len(work):
            mode, extend = ForwardMode.DECODE, {}
        rows = [self.rows.req_to_token[request.row] for request, _ in work]
        slots = [row[old : old + new] for row, old, new in zip(rows, old_lens, new_lens, strict=True)]
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(work),
            req_pool_indices=torch.tensor([request.row for request, _ in work]),
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            out_cache_loc=torch.cat(slots).long(),
            **self.pools,
            **extend,
        )
