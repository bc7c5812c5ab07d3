"""A model together with its paged keys and values and its attention backend: what runs one forward pass."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fa_ref.api import AttentionLayer, BackendConfig, ForwardBatch, ForwardMode, MHAKVPool, ReqToTokenPool
from tiny_engine.model import Model

Span = tuple[int, list[int], int]  # a row of req_to_token, the tokens of its request, how many are cached


class Runner:
    """Two runners over the same `rows` agree on the slot of every token; each has keys and values of its own."""

    def __init__(self, model: Model, backend_factory: Callable, rows: ReqToTokenPool, *, pages: int, page_size: int):
        c, dtype = model.config, torch.float32
        self.model, self.rows = model, rows
        self.kv = MHAKVPool(
            size=pages * page_size,
            page_size=page_size,
            dtype=dtype,
            head_num=c.kv_heads,
            head_dim=c.head_dim,
            layer_num=c.layers,
        )
        heads = {"tp_q_head_num": c.heads, "tp_k_head_num": c.kv_heads, "head_dim": c.head_dim}
        self.layers = [AttentionLayer(layer_id=i, scaling=c.head_dim**-0.5, **heads) for i in range(c.layers)]
        self.pools = {"req_to_token_pool": rows, "token_to_kv_pool": self.kv}
        sizes = {"page_size": page_size, "context_len": rows.context_len}
        self.config = BackendConfig(device="cpu", dtype=dtype, kv_cache_dtype=dtype, **sizes, **self.pools)
        self.backend = backend_factory(self.config)
        self.graph = None

    def capture(self, buckets: Sequence[int]) -> None:
        """Capture decodes of up to so many requests, on a backend of fa_fast: replayed from then on."""
        from fa_fast.graphs import GraphRunner

        whole = torch.zeros(buckets[-1], dtype=torch.int64)
        with torch.inference_mode():
            self.graph = GraphRunner(
                self.backend, self.forward, ForwardMode.DECODE, buckets, dict(ids=whole, positions=whole)
            )

    def extend(self, mode: ForwardMode, spans: Sequence[Span]) -> Tensor:
        """Compute the tokens of each span that are not cached, all laid end to end: hidden states [tokens, width]."""
        rows, old_lens = [row for row, _, _ in spans], torch.tensor([cached for _, _, cached in spans])
        seq_lens = torch.tensor([len(tokens) for _, tokens, _ in spans])
        new_lens = seq_lens - old_lens
        positions = torch.cat([torch.arange(a, b) for a, b in zip(old_lens, seq_lens, strict=True)])
        extend = dict(extend_seq_lens=new_lens, extend_seq_lens_cpu=new_lens.tolist())
        extend |= dict(extend_prefix_lens=old_lens, extend_prefix_lens_cpu=old_lens.tolist())
        slots = self.rows.req_to_token[torch.tensor(rows).repeat_interleave(new_lens), positions]
        batch = self.batch(mode, rows, seq_lens, slots, **({} if mode.is_decode() else extend))
        ids = torch.tensor([token for _, tokens, cached in spans for token in tokens[cached:]])
        if self.graph and mode.is_decode():
            with torch.inference_mode():
                return self.graph.run(batch, ids=ids, positions=positions).clone()  # the next replay overwrites it
        self.backend.init_forward_metadata(batch)
        return self.forward(batch, ids, positions)

    def batch(self, mode: ForwardMode, rows: Sequence[int], seq_lens: Tensor, slots: Tensor, **more) -> ForwardBatch:
        """The pass as a backend sees it. slots: of all new tokens."""
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            req_pool_indices=torch.tensor(rows),
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            out_cache_loc=slots.flatten().long(),
            **self.pools,
            **more,
        )

    def forward(self, batch: ForwardBatch, ids: Tensor, positions: Tensor, backend=None) -> Tensor:
        """ids, positions [tokens] -> hidden states. The batch is planned on `backend`, the runner's own by default."""
        backend = backend or self.backend

        def attend(layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return backend.forward(q, k, v, self.layers[layer_id], batch)

        return self.model.forward(ids, positions, attend)
