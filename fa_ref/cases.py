"""Small reproducible problems: a batch, its pools filled at random, a layer, and its q, k, v.

Notebooks, tests and benchmarks build their problems here. Pages are a random permutation of a pool three times too
large, and slots that no request owns hold NaN, so reading a wrong page shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fa_ref.api import (
    AttentionLayer,
    BackendConfig,
    DraftInput,
    ForwardBatch,
    ForwardMode,
    LayerKind,
    MHAKVPool,
    MLAKVPool,
    ReqToTokenPool,
    SWAKVPool,
    VerifyInput,
)
from fa_ref.api.bounds import page_size_of
from fa_ref.api.checks import columns_of_drafts, draft_steps, is_tree, req_to_token
from fa_ref.api.pools import FP8
from fa_ref.attention import AttentionState
from fa_ref.numerics import Verdict, judge
from fa_ref.oracle import masked_attention


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layer of one batch, ready to run on any backend of either package."""

    config: BackendConfig
    batch: ForwardBatch
    layer: AttentionLayer
    q: Tensor  # [tokens, heads * head_dim]
    k: Tensor | None  # [keys, kv_heads * head_dim], a key a token; k and v None: attend to the cache as it is
    v: Tensor | None  # [keys, kv_heads * v_head_dim]; CROSS: a key a new encoder token
    sinks: Tensor | None  # [heads]
    step: int = 0  # of draft decoding
    recipe: dict[str, Any]  # the arguments of make_case

    def like(self, **changes: Any) -> Case:
        """The same problem with some of make_case's arguments changed: another device, dtype, page size, ..."""
        return make_case(**self.recipe | changes)

    def run(self, package: Any, provider: str | None = None) -> Tensor:
        """The layer's output [tokens, heads * v_head_dim] from a package's backend; writes k and v."""
        backend = package.FlashAttentionBackend(self.config, speculative_step_id=self.step, provider=provider)
        backend.init_forward_metadata(self.batch)
        return backend.forward(self.q, self.k, self.v, self.layer, self.batch, sinks=self.sinks)

    def oracle(self, compute_dtype: torch.dtype = torch.float32) -> AttentionState:
        """What `run` should give, by definition. The keys must be written: call it after `run`."""
        queries = self.q.reshape(-1, self.layer.tp_q_head_num, self.layer.head_dim)
        return masked_attention(
            queries, self.batch, self.layer, self.config, sinks=self.sinks, step=self.step, compute_dtype=compute_dtype
        )

    def judge(self, result: Tensor) -> Verdict:
        """A result's error against the oracle, and the budget derived from a plain run in q's dtype.

        The oracle is finer than the plain run: fp32, or fp64 for a layer that runs in fp32 or fp64 itself.
        """
        shape = (-1, self.layer.tp_q_head_num, self.layer.v_head_dim)
        finer = torch.float32 if self.q.dtype.itemsize < 4 else torch.float64
        oracle, plain = self.oracle(finer), self.oracle(self.q.dtype)
        lse = oracle.lse if self.merges else None
        return judge(result.reshape(shape), oracle.out, plain.out, self.q.dtype, lse)

    @property
    def merges(self) -> bool:
        """True if the result is merged from two passes: a tree or branches behind their prefix, or a cascade."""
        if self.layer.is_cross_attention:
            return False
        branches = draft_steps(self.batch) > 0 and columns_of_drafts(self.batch) == 0
        return branches or is_tree(self.batch) or self.config.cascade_prefix

    def replace_config(self, **changes: Any) -> Case:
        return replace(self, config=replace(self.config, **changes))


def make_case(
    mode: ForwardMode = ForwardMode.EXTEND,
    *,
    prefix_lens: Sequence[int] = (3, 0, 6),
    new_lens: Sequence[int] = (5, 4, 1),
    page_size: int = 4,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 16,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    kind: LayerKind = LayerKind.FULL,
    window: int = 3,
    chunk: int = 8,
    softcap: float = 0.0,
    sinks: bool = False,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    hybrid: bool = False,
    deterministic: bool = False,
    context_len: int | None = None,
    topk: int = 0,
    num_steps: int = 3,
    step: int = 0,
    trees: Sequence[Sequence[int]] | None = None,
    draft_token_num: int = 0,
    tree_attention: str = "auto",
    shared_prefix: int = 0,
    encoder_lens: Sequence[int] | None = None,
    encode: bool | Sequence[bool] = True,
    latent: int = 0,
    rope: int = 8,
    host_lengths: bool = True,
    poison: bool = True,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """A problem with requests of prefix_lens cached and new_lens new tokens (DECODE: new_lens are all 1).

    Speculation: DECODE with topk >= 1 is `step` of a draft of num_steps, TARGET_VERIFY takes a chain of
    draft_token_num tokens a request, or `trees`: the parent of every draft token, -1 for the root, one list a request.

    window: the layer's sliding_window_size (W - 1), used where kind is SLIDING. chunk: attention_chunk_size,
    where kind is LOCAL. hybrid: window and chunk layers live in a second pool with pages of its own.
    latent: > 0 makes it absorbed MLA, over a cache of [latent | rope] rows; q and k are packed, v is the latent.
    shared_prefix: leading tokens that all requests keep in the slots of the first one, planned as a cascade.
    encoder_lens: encoder tokens a request, in an encoder-decoder model; its text starts in the slot after them. encode:
    whether the encoder's k and v are new in this step, for all requests or one by one; otherwise they are in the cache.
    host_lengths=False leaves every host copy of the lengths out. poison=False leaves unowned slots finite.

    >>> case = make_case(prefix_lens=[2], new_lens=[3])
    >>> case.batch.seq_lens.tolist(), case.q.shape
    ([5], torch.Size([3, 32]))
    """
    recipe = dict(locals())
    if latent:
        kv_heads, head_dim, v_head_dim = 1, latent + rope, latent
    gen = torch.Generator().manual_seed(seed)
    on_device = torch.Generator(device).manual_seed(seed)  # large tensors are drawn where they live
    drafting, verifying = mode.is_decode() and topk > 0, mode.is_target_verify()
    drafts = len(trees[0]) if trees else draft_token_num
    new = [drafts] * len(prefix_lens) if verifying else [1] * len(prefix_lens) if mode.is_decode() else list(new_lens)
    if drafting:
        new = [num_steps if topk == 1 else 0] * len(prefix_lens)  # in req_to_token; other branches live beside it
    total = [p + n for p, n in zip(prefix_lens, new, strict=True)]
    encoder = [0] * len(total) if encoder_lens is None else list(encoder_lens)
    in_row = [e + t for e, t in zip(encoder, total, strict=True)]
    context = context_len or max([*in_row, 1])
    kv_dtype = kv_dtype or dtype

    branch_slots = topk * num_steps if drafting and topk > 1 else 0
    owned = [-(-t // page_size) for t in in_row]  # pages of each request
    size = (3 * (sum(owned) + len(total) * -(-branch_slots // page_size)) + 3) * page_size
    geometry: dict[str, Any] = dict(
        page_size=page_size, dtype=kv_dtype, head_num=kv_heads, head_dim=head_dim, v_head_dim=v_head_dim,
        layer_num=1, device=device,
    )  # fmt: skip
    rows = ReqToTokenPool(size=len(total) + 2, context_len=context, device=device)
    kv: Any = MHAKVPool(size=size, **geometry)
    if latent:
        kv = MLAKVPool(
            size=size, page_size=page_size, dtype=kv_dtype, kv_lora_rank=latent, qk_rope_head_dim=rope, layer_num=1,
            device=device,
        )  # fmt: skip
    if hybrid:
        window_pool, other = MHAKVPool(size=size, **geometry), kv
        windowed = kind in (LayerKind.SLIDING, LayerKind.LOCAL)
        kv = SWAKVPool(
            full_pool=other,
            swa_pool=window_pool,
            full_layer_ids=[1] if windowed else [0],
            swa_layer_ids=[0] if windowed else [1],
        )
    indices = rows.alloc(len(total) + 2)[::-1][: len(total)]
    in_row_slots, spare = _place(rows, kv, indices, in_row, owned, page_size, gen)
    of_encoder = [s[:e] for s, e in zip(in_row_slots, encoder, strict=True)]
    slots = [s[e:] for s, e in zip(in_row_slots, encoder, strict=True)]  # of the text
    if shared_prefix:
        whole = shared_prefix // page_size * page_size  # only whole pages can be shared
        slots = [torch.cat([slots[0][:whole], own[whole:]]) for own in slots]
        for index, e in zip(indices, encoder, strict=True):
            rows.req_to_token[index, e : e + whole] = slots[0][:whole].to(rows.req_to_token)

    config = BackendConfig(
        device=device,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        page_size=page_size,
        context_len=context,
        sliding_window_size=window if kind is LayerKind.SLIDING else None,
        attention_chunk_size=chunk if kind is LayerKind.LOCAL else None,
        is_encoder_decoder=encoder_lens is not None,
        is_hybrid_swa=hybrid,
        deterministic=deterministic,
        topk=topk,
        num_draft_tokens=drafts,
        tree_attention=tree_attention,
        cascade_prefix=shared_prefix > 0,
        use_mla=latent > 0,
        req_to_token_pool=rows,
        token_to_kv_pool=kv,
    )
    layer = AttentionLayer(
        layer_id=0,
        tp_q_head_num=heads,
        tp_k_head_num=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim or head_dim,
        scaling=head_dim**-0.5,
        logit_cap=softcap,
        sliding_window_size=window if kind is LayerKind.SLIDING else -1,
        use_irope=kind is LayerKind.LOCAL,
        is_cross_attention=kind is LayerKind.CROSS,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    written, branches = list(prefix_lens), torch.zeros(0, dtype=torch.int64)
    if drafting and topk == 1:
        written = [p + step for p in prefix_lens]
    elif branch_slots:  # branches own scattered slots, those of earlier steps already written
        branches = spare[torch.randperm(len(spare), generator=gen)[: len(total) * branch_slots]].to(device)
        earlier = branches.view(-1, num_steps)[:, :step].flatten()
        slots, written = [*slots, torch.cat([earlier, branches])], [*written, len(earlier)]
    encoding = list(encode) if isinstance(encode, Sequence) else [encode] * len(total)
    keys, filled = slots, written
    if kind is LayerKind.CROSS:
        keys, filled = of_encoder, [0 if new else e for new, e in zip(encoding, encoder, strict=True)]
    _fill(kv, layer, keys, filled, poison, on_device, page_size_of(kind, config))

    past = prefix_lens if drafting or verifying else total
    lens, news, prefixes = (torch.tensor(x, dtype=torch.int64, device=device) for x in (past, new, prefix_lens))
    loc = torch.cat([s[p:] for s, p in zip(slots, prefix_lens, strict=False)] or [lens])
    spec_info: DraftInput | VerifyInput | None = None
    if drafting:
        spec_info = DraftInput(topk=topk, num_steps=num_steps)
        loc = branches if branch_slots else loc
    elif verifying:
        spec_info = VerifyInput(draft_token_num=drafts, topk=2 if trees else 1, custom_mask=None)
        if trees:
            spec_info = replace(spec_info, custom_mask=_custom_mask(trees, prefix_lens).to(device))
    newly = [s for s, new in zip(of_encoder, encoding, strict=True) if new]
    encoder_loc = torch.cat(newly) if encoder_lens is not None and newly else None
    batch = ForwardBatch(
        forward_mode=mode,
        batch_size=len(total),
        req_pool_indices=torch.tensor(indices, dtype=torch.int64, device=device),
        seq_lens=lens,
        seq_lens_cpu=lens.cpu() if host_lengths else None,
        out_cache_loc=loc,
        extend_seq_lens=news,
        extend_seq_lens_cpu=new if host_lengths else None,
        extend_prefix_lens=prefixes,
        extend_prefix_lens_cpu=list(prefix_lens) if host_lengths else None,
        spec_info=spec_info,
        encoder_lens=torch.tensor(encoder, dtype=torch.int64, device=device) if encoder_lens is not None else None,
        encoder_lens_cpu=encoder if encoder_lens is not None and host_lengths else None,
        encoder_out_cache_loc=encoder_loc,
        shared_prefix_len=shared_prefix // page_size * page_size,
    )
    tokens = len(total) * topk if drafting else sum(new)
    widths = heads * head_dim, kv_heads * head_dim, kv_heads * (v_head_dim or head_dim)
    new_keys = tokens if kind is not LayerKind.CROSS else 0 if encoder_loc is None else len(encoder_loc)
    q, k, v = (
        torch.randn(count, n, generator=on_device, device=device).to(dtype)
        for count, n in zip((tokens, new_keys, new_keys), widths, strict=True)
    )
    if kind is LayerKind.CROSS and encoder_loc is None:
        k = v = None
    elif latent:
        v = k[:, :latent]
    sink_logits = torch.randn(heads, generator=gen).to(device) if sinks else None
    return Case(config=config, batch=batch, layer=layer, q=q, k=k, v=v, sinks=sink_logits, step=step, recipe=recipe)


def _custom_mask(trees: Sequence[Sequence[int]], prefix_lens: Sequence[int]) -> Tensor:
    """Flat: for each request, a row a draft of prefix columns (all visible) and draft columns (ancestors, itself)."""
    parts = []
    for parents, prefix in zip(trees, prefix_lens, strict=True):
        mask = torch.zeros(len(parents), prefix + len(parents), dtype=torch.bool)
        mask[:, :prefix] = True
        for draft, parent in enumerate(parents):
            if parent >= 0:
                mask[draft] |= mask[parent]
            mask[draft, prefix + draft] = True
        parts.append(mask.flatten())
    return torch.cat(parts)


def _place(
    rows: ReqToTokenPool,
    kv: Any,
    indices: list[int],
    total: list[int],
    owned: list[int],
    page_size: int,
    gen: torch.Generator,
) -> tuple[list[Tensor], Tensor]:
    """Give each request random pages, fill its row of req_to_token, and (two pools) map them across.

    Returns the slots of each request, and the slots that are left.
    """
    pages = 1 + torch.randperm(kv.size // page_size, generator=gen)
    offsets = torch.arange(page_size)
    slots, start = [], 0
    for row, length, count in zip(indices, total, owned, strict=True):
        mine = (pages[start : start + count, None] * page_size + offsets).flatten()
        rows.req_to_token[row, :length] = mine[:length].to(rows.req_to_token)
        slots.append(mine[:length].to(rows.req_to_token.device))
        start += count
    if isinstance(kv, SWAKVPool):
        other = 1 + torch.randperm(kv.size // page_size, generator=gen)
        full = (pages[:, None] * page_size + offsets).flatten()
        swa = (other[:, None] * page_size + offsets).flatten()
        kv.full_to_swa_index_mapping[full.to(kv.full_to_swa_index_mapping.device)] = swa.to(
            kv.full_to_swa_index_mapping
        )
    return slots, (pages[start:, None] * page_size + offsets).flatten()


def _fill(
    kv: Any,
    layer: AttentionLayer,
    slots: list[Tensor],
    prefix_lens: Sequence[int],
    poison: bool,
    gen: torch.Generator,
    page_size: int,
) -> None:
    """Random keys and values in every owned slot; NaN in every page that no request owns.

    The rest of an owned page stays zero, as a pool allocates it: kernels multiply it by zero. page_size: of the view
    that the layer reads.
    """
    k_buffer, v_buffer = kv.get_kv_buffer(layer.layer_id)
    mine = torch.cat(slots or [torch.zeros(0, dtype=torch.int64)])
    if poison:
        owned = torch.zeros(k_buffer.shape[0] // page_size, dtype=torch.bool, device=k_buffer.device)
        owned[kv.write_slots(layer, mine.to(k_buffer.device)) // page_size] = True
        owned[: kv.page_size // page_size] = True  # the padding page
        free = ~owned.repeat_interleave(page_size)
        for buffer in (k_buffer, v_buffer):
            buffer.view(torch.uint8 if buffer.dtype == FP8 else buffer.dtype)[free] = (
                0x7F if buffer.dtype == FP8 else float("nan")
            )
    for own, prefix in zip(slots, prefix_lens, strict=True):
        k, v = (
            torch.randn(prefix, *buffer.shape[1:], generator=gen, device=buffer.device)
            for buffer in (k_buffer, v_buffer)
        )
        if isinstance(kv, MLAKVPool):
            kv.set_mla_kv_buffer(layer, own[:prefix], *k.split([kv.kv_lora_rank, kv.qk_rope_head_dim], dim=-1))
        else:
            kv.set_kv_buffer(layer, own[:prefix], k, v, layer.k_scale, layer.v_scale)


def visible_slots(case: Case, request: int) -> Tensor:
    """The slots of a request's logical positions, in the numbering of the full pool."""
    batch, row = case.batch, int(case.batch.req_pool_indices[request])
    first = 0 if batch.encoder_lens is None else int(batch.encoder_lens[request])
    return req_to_token(batch, case.config)[row, first : first + int(batch.seq_lens[request])]


def encoder_slots(case: Case, request: int) -> Tensor:
    """The slots of a request's encoder tokens, in the numbering of the full pool."""
    assert case.batch.encoder_lens is not None
    row = int(case.batch.req_pool_indices[request])
    return req_to_token(case.batch, case.config)[row, : int(case.batch.encoder_lens[request])]
