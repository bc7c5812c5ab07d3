"""FlashAttentionBackend on production kernels: plan a batch once, then per layer write KV, run passes, merge.

The readable twin, with every step explained, is fa_ref.backend.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fa_fast.graphs import PlanGraphs, prepared
from fa_fast.kernels.joint import joint_view
from fa_fast.kernels.select import Provider, provider_for
from fa_fast.planning import plan_batch, plan_unchecked
from fa_fast.write import write_kv
from fa_ref.api import (
    AttentionLayer,
    AttentionPass,
    AttentionPlan,
    BackendConfig,
    BadBatch,
    ForwardBatch,
    ForwardMode,
    LayerKind,
    TreePass,
    layer_kind,
    window_left,
)
from fa_ref.api.bounds import key_rows, page_size_of, slots_to_write
from fa_ref.api.checks import check_cut, check_layer_inputs, check_layer_pool, check_window
from fa_ref.api.encoder import check_encoder_writes, checked_text
from fa_ref.api.mla import is_mha_form, latent_inputs, latent_layer, mha_call, refuse_rope
from fa_ref.api.planned import check_planned, read_batch
from fa_ref.api.pools import FP8, head_scale

_LAYER_FIELDS = (*(f.name for f in fields(AttentionLayer)), "attn_type")


@dataclass(frozen=True, kw_only=True)
class _Operands:
    """What the passes of one layer share."""

    q: Tensor  # [tokens, heads, head_dim]; absorbed MLA: its rope part
    qv: Tensor | None  # absorbed MLA: [tokens, heads, latent], what meets the latent
    k: Tensor | None  # new keys [tokens, kv_heads, head_dim]; absorbed MLA: latents
    v: Tensor | None  # new values; absorbed MLA: the keys' rope part
    keys: Tensor  # the layer's buffer [slots, kv_heads, head_dim]; MLA: rows of [latent | rope]
    values: Tensor  # [slots, kv_heads, v_head_dim]; MLA: the latent part of keys
    layer: AttentionLayer
    geometry: _Geometry
    sinks: Tensor | None

    def rows(self, index: Tensor) -> _Operands:
        """The operands of some query rows; what is new in the cache is then read from there."""
        return replace(self, q=self.q[index], qv=None if self.qv is None else self.qv[index], k=None, v=None)


@dataclass(frozen=True, kw_only=True)
class _Geometry:
    """What the kernels need to know of a layer; layers that share it share a scheduler's metadata."""

    kind: LayerKind
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window_left: int
    softcap: float


class FlashAttentionBackend:
    """Attention of one model over its paged cache. Call init_forward_metadata once a batch, forward once a layer.

    runner: a server's model runner, or a BackendConfig. provider: the name of a kernel provider; None takes the
    device's own ("torch_cpu", "sgl_cuda"). q is [tokens, heads * head_dim] or [tokens, heads, head_dim]; the output
    is [tokens, heads * v_head_dim]. Nothing here waits for the device, unless FA_CHECK=1.

    Raises BadConfig, BadBatch, BadPageTable, UnsupportedByProvider, ProviderNotInstalled; the backend stays usable.
    """

    def __init__(
        self,
        runner: Any,
        skip_prefill: bool = False,
        speculative_step_id: int = 0,
        topk: int = 0,
        speculative_num_steps: int = 0,
        provider: str | None = None,
    ) -> None:
        self.config = BackendConfig.from_model_runner(runner)
        self.kernels: Provider = provider_for(self.config.device, provider)
        self.provider = self.kernels.CAPABILITY.provider
        self.skip_prefill = skip_prefill
        self.speculative_step_id, self.topk = speculative_step_id, topk
        self.speculative_num_steps = speculative_num_steps
        self._num_splits = 1 if self.config.deterministic else 0
        self._expands = self._expands_trees()
        self._layers: dict[tuple[Any, ...], tuple[Any, AttentionLayer, _Geometry]] = {}  # checked, each with its pool
        self._schedules: dict[tuple[_Geometry, int, bool], Any] = {}  # of the current batch
        self._plan: AttentionPlan | None = None
        self._plan_graphs: PlanGraphs | None = None

    @property
    def forward_metadata(self) -> AttentionPlan:
        """The plan of the current batch."""
        if self._plan is None:
            raise BadBatch("no batch is planned; call init_forward_metadata(forward_batch) before forward")
        return self._plan

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a batch; every layer of the forward pass reuses it."""
        self._plan = None  # a refused batch leaves no plan behind
        batch = self._to_plan(forward_batch)
        self.use_plan(plan_batch(batch, self.config, self.speculative_step_id))

    def drop_plan(self) -> None:
        """Forget the current plan: a refused batch leaves none behind."""
        self._plan = None

    def use_plan(self, plan: AttentionPlan) -> None:
        """Take a plan made elsewhere: the steps of a draft are planned together."""
        self._take(self._as_run(plan))

    def _as_run(self, plan: AttentionPlan) -> AttentionPlan:
        """The plan with its trees as this backend runs them."""
        if not self._expands:
            return plan
        expanded = {kind: tuple(map(_expanded, passes)) for kind, passes in plan.passes.items()}
        return replace(plan, passes=expanded)

    def _take(self, plan: AttentionPlan) -> None:
        self._plan = plan
        self._schedules.clear()

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """One layer of the batch, dispatched by mode."""
        if ForwardMode.of(getattr(forward_batch, "forward_mode", ForwardMode.EXTEND)).is_decode_or_idle():
            return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, q_rope, k_rope, sinks)
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, q_rope, k_rope, sinks)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Write k and v to the cache, then attend. save_kv_cache=False: they are in the cache already.

        k and v None: attend to the cache as it is. On a CROSS layer they are the encoder's, given once: one row a slot
        of encoder_out_cache_loc.
        MLA: q and k are packed [latent | rope], or q_rope and k_rope hold their rope part; v is not read. In a batch
        with attn_attend_prefix_cache set, the MHA form: k and v are expanded, nothing is written, and with
        mha_return_lse the result is a state for merge_state, (out [tokens, heads, v_head_dim], lse (tokens, heads)).
        """
        plan, batch = self.forward_metadata, self._batch(forward_batch)
        check_planned(plan, batch, self.config)
        if is_mha_form(batch, plan):
            refuse_rope(q_rope, k_rope)
            return self._given(q, k, v, AttentionLayer.of(layer), batch, sinks, save_kv_cache)
        pool = batch.token_to_kv_pool or self.config.token_to_kv_pool
        server_layer = layer
        layer, geometry = self._layer(server_layer, pool, sinks)
        passes = plan.for_kind(geometry.kind)
        for step in passes:
            check_cut(step, layer)
        keys, values = pool.get_kv_buffer(layer.layer_id)
        common: dict[str, Any] = dict(keys=keys, values=values, layer=layer, geometry=geometry, sinks=sinks)
        if self.config.use_mla:
            given = latent_inputs(q, k, v, q_rope, k_rope, layer, plan.num_tokens, self.config, sinks)
            on = _Operands(q=given.q_rope, qv=given.q_nope, k=given.latent, v=given.k_rope, **common)
        else:
            refuse_rope(q_rope, k_rope)
            rows = key_rows(batch, geometry.kind, plan.num_tokens)
            check_layer_inputs(q, k, v, layer, plan.num_tokens, self.config, sinks, rows)
            if k is not None and v is not None:
                k = k.reshape(-1, geometry.kv_heads, geometry.head_dim)
                v = v.reshape(-1, geometry.kv_heads, geometry.v_head_dim)
            on = _Operands(q=q.reshape(-1, geometry.heads, geometry.head_dim), qv=None, k=k, v=v, **common)
        if on.k is not None and on.v is not None and save_kv_cache and on.k.shape[0]:
            if geometry.kind is LayerKind.CROSS:
                check_encoder_writes(batch, self.config)
            loc = slots_to_write(batch, self.config, self.speculative_step_id, plan.num_tokens, geometry.kind)
            write_kv(pool, server_layer, loc, on.k, on.v)
        if on.q.shape[0] == 0 or not passes:
            return q.new_zeros(on.q.shape[0], geometry.heads * geometry.v_head_dim)
        out = self._run(passes, on)
        return out.flatten(1)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The same for decode: the plan differs, running it does not."""
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, q_rope, k_rope, sinks)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of a padded row of a captured graph: 1, on the padding slot."""
        return 1

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int | None = None, kv_indices_buf: Any = None) -> None:
        """For a server that captures its layers itself: allocate what its graphs read, for up to max_bs requests."""
        self._plan_graphs = PlanGraphs(self.config, self._plan_in_graph, self._take, max_bs)

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None,
        forward_mode: Any,
        spec_info: Any,
    ) -> None:
        """Record the plan of batches of this size, before the server records the layers. spec_info: of the step."""
        prepared(self._plan_graphs).capture(
            self._static(bs, num_tokens // bs, req_pool_indices, seq_lens, encoder_lens, forward_mode, spec_info, None),
            num_tokens // bs,
        )

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        seq_lens_sum: int | None,
        encoder_lens: Tensor | None,
        forward_mode: Any,
        spec_info: Any,
        seq_lens_cpu: Tensor | None = None,
        out_cache_loc: Tensor | None = None,
    ) -> None:
        """Plan a batch into the recorded tensors, before the server replays its layers. Rows past bs are not read.

        out_cache_loc: [request, branch, step], which draft decoding with topk > 1 needs. seq_lens_sum and seq_lens_cpu
        are not read: nothing here needs the host.
        """
        prepared(self._plan_graphs).replay(
            self._static(bs, 0, req_pool_indices, seq_lens, encoder_lens, forward_mode, spec_info, out_cache_loc)
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """The host's part of a graphed step: check the batch that will be replayed. in_capture: there is none yet."""
        batch = self._to_plan(forward_batch)
        if not in_capture:
            checked_text(batch, self.config)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Plan on the device alone: what a graph records, ahead of the layers. The batch is one of static tensors."""
        self._take(self._plan_in_graph(self._batch(forward_batch)))

    def _plan_in_graph(self, batch: ForwardBatch) -> AttentionPlan:
        return self._as_run(plan_unchecked(batch, self.config, self.speculative_step_id))

    def _static(
        self,
        bs: int,
        tokens: int,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None,
        forward_mode: Any,
        spec_info: Any,
        out_cache_loc: Tensor | None,
    ) -> ForwardBatch:
        """The arguments of a server's capture or replay as a batch of bs requests."""
        extends = ForwardMode.of(forward_mode).is_draft_extend()
        batch = SimpleNamespace(
            forward_mode=forward_mode,
            batch_size=bs,
            req_pool_indices=req_pool_indices[:bs],
            seq_lens=seq_lens[:bs],
            encoder_lens=None if encoder_lens is None else encoder_lens[:bs],
            spec_info=spec_info,
            out_cache_loc=out_cache_loc,
            extend_seq_lens_cpu=[tokens or prepared(self._plan_graphs).draft_tokens] * bs if extends else None,
        )
        return self._batch(batch)

    def _to_plan(self, forward_batch: Any) -> ForwardBatch:
        """A server's batch, of a mode that this backend plans."""
        batch = self._batch(forward_batch)
        if self.skip_prefill and not batch.forward_mode.is_decode_or_idle():
            raise BadBatch(f"{batch.forward_mode.name} on a backend made with skip_prefill=True")
        return batch

    def _batch(self, batch: Any) -> ForwardBatch:
        """A server's batch; a draft must be the one that this backend was built for."""
        return read_batch(batch, self.config, self.topk, self.speculative_num_steps)

    def _expands_trees(self) -> bool:
        """Whether a tree runs as one sequence a draft, through a page table. Raises if neither way is there."""
        fused = self.kernels.CAPABILITY.qv_trees or not self.config.use_mla
        if self.config.tree_attention == "fused" and not fused:
            raise self.kernels.CAPABILITY.refuse("tree_attention='fused' over latents", "'expand' and 'auto' for MLA")
        return self.config.tree_attention == "expand" or not fused

    def _layer(self, layer: Any, pool: Any, sinks: Tensor | None) -> tuple[AttentionLayer, _Geometry]:
        """The layer with its geometry, checked against pool and provider the first time these values are seen."""
        key = (id(pool), sinks is not None, *[getattr(layer, name, None) for name in _LAYER_FIELDS])
        try:
            known = self._layers.get(key)
        except TypeError:
            known = None  # a field that has no hash is none of a layer's: AttentionLayer.of says which
        if known is not None and known[0] is pool:
            return known[1:]
        layer = AttentionLayer.of(layer)
        mla = self.config.use_mla
        if mla:
            layer = latent_layer(layer)
        check_layer_pool(layer, self.config, pool)
        check_window(layer, self.config)
        geometry = _Geometry(
            kind=layer_kind(layer, self.config.attention_chunk_size),
            heads=layer.tp_q_head_num,
            kv_heads=layer.tp_k_head_num,
            head_dim=layer.head_dim,
            v_head_dim=layer.v_head_dim,
            window_left=window_left(layer),
            softcap=float(layer.logit_cap),
        )
        self.kernels.CAPABILITY.require(
            dtype=self.config.dtype,
            kv_dtype=self.config.kv_cache_dtype,
            head_dim=geometry.head_dim - (geometry.v_head_dim if mla else 0),
            v_head_dim=geometry.v_head_dim,
            page_size=page_size_of(geometry.kind, self.config),
            softcap=geometry.softcap != 0,
            sinks=sinks is not None,
            qv=mla,
            window=geometry.kind is LayerKind.SLIDING,
        )
        self._layers[key] = (pool, layer, geometry)
        return layer, geometry

    def _given(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        sinks: Tensor | None,
        save_kv_cache: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """MLA in the MHA form: the caller's own keys and values, contiguous."""
        call = mha_call(q, k, v, layer, batch, self.forward_metadata, self.config, sinks, save_kv_cache)
        self.kernels.CAPABILITY.require(
            dtype=self.config.dtype,
            kv_dtype=self.config.dtype,
            head_dim=layer.head_dim,
            v_head_dim=layer.v_head_dim,
            softcap=layer.logit_cap != 0,
            sinks=sinks is not None,
            lse=batch.mha_return_lse,
        )
        result = self.kernels.flash_attn_varlen_func(
            **call, num_splits=self._num_splits, return_softmax_lse=batch.mha_return_lse
        )
        return result if batch.mha_return_lse else result.flatten(1)

    def _run(self, passes: tuple[Any, ...], on: _Operands) -> Tensor:
        """The passes of a plan either cover all query rows and merge, or split the rows among them."""
        if passes[0].token_index is not None:
            out = on.q.new_zeros(on.q.shape[0], on.geometry.heads, on.geometry.v_head_dim)
            for step in passes:
                out.index_copy_(0, step.token_index.long(), self._call(step, on.rows(step.token_index), False))
            return out
        tree = passes[-1] if isinstance(passes[-1], TreePass) else None
        parts = passes[:-1] if tree is not None else passes
        if len(parts) == 1 and self._is_short(parts[0], tree, on):
            return self._short_keys(on, tree, cached=parts[0])
        if len(passes) == 1:
            return self._call(passes[0], on, False)
        out, lse = self._call(parts[0], on, True)
        for step in parts[1:]:
            out, lse = self.kernels.merge_state(out, lse, *self._call(step, on, True))
        return out if tree is None else self._short_keys(on, tree, prefix_out=out, prefix_lse=lse)

    def _is_short(self, step: AttentionPass, tree: TreePass | None, on: _Operands) -> bool:
        """Whether a window's keys, with the drafts behind them, are few enough for the kernel of short keys."""
        prefers, left = self.kernels.prefers_short_keys, on.geometry.window_left
        if prefers is None or self.config.deterministic or on.qv is not None:
            return False
        if tree is None:
            requests, queries, keys = step.sequences, step.max_seqlen_q, left + step.max_seqlen_q
            windowed = step.uses_window and requests * queries == on.q.shape[0]  # as many in every request
        else:
            requests, queries, drafts = tree.mask.shape
            windowed, keys = step.cut_to_window >= 0, step.cut_to_window + drafts
        return windowed and prefers(
            requests=requests,
            queries=queries,
            keys=min(keys, step.max_seqlen_k + queries),
            kv_heads=on.geometry.kv_heads,
            dim=max(on.geometry.head_dim, on.geometry.v_head_dim),
            tree=tree is not None,
        )

    def _short_keys(
        self,
        on: _Operands,
        tree: TreePass | None,
        cached: AttentionPass | None = None,
        prefix_out: Tensor | None = None,
        prefix_lse: Tensor | None = None,
    ) -> Tensor:
        """Cached keys of a window and drafts under their tree mask, joined with a prefix's state, in one kernel."""
        fp8 = on.keys.dtype == FP8
        q = on.q if on.qv is None else torch.cat([on.qv, on.q], dim=-1)
        keys: dict[str, Any] = {}
        if cached is not None:
            keys |= dict(
                page_table=cached.page_table,
                row_index=cached.row_index if tree is None else None,
                cache_seqlens=cached.cache_seqlens,
                page_size=cached.page_size,
                causal=cached.causal,
                window_left=on.geometry.window_left if cached.uses_window else -1,
            )
        if tree is not None:
            keys |= dict(slots=tree.slots, mask=tree.mask)
        last = tree or cached
        assert last is not None
        return self.kernels.short_key_attention(
            q,
            on.keys,
            on.values,
            queries=cached.max_seqlen_q if tree is None and cached is not None else tree.mask.shape[1],
            softmax_scale=on.layer.scaling,
            softcap=on.geometry.softcap,
            sinks=on.sinks if last.takes_sinks else None,
            k_scale=head_scale(on.layer.k_scale, on.q.device) if fp8 else None,
            v_scale=head_scale(on.layer.v_scale, on.q.device) if fp8 else None,
            prefix_out=prefix_out,
            prefix_lse=prefix_lse,
            **keys,
        )

    def _call(self, step: AttentionPass, on: _Operands, return_lse: bool) -> Any:
        """One pass, as one kernel call."""
        layer, geometry = on.layer, on.geometry
        # A window that no key of the pass lies outside of is left out: the plain kernel is the faster one.
        windowed = step.uses_window and step.max_seqlen_k > geometry.window_left + 1
        common = dict(
            softmax_scale=layer.scaling,
            causal=step.causal,
            window_size=(geometry.window_left, 0) if windowed else (-1, -1),
            softcap=geometry.softcap,
            num_splits=self._num_splits,
            return_softmax_lse=return_lse,
            sinks=on.sinks if step.takes_sinks else None,
        )
        if step.keys_are_new and on.qv is None and on.k is not None and on.k.dtype == on.keys.dtype:
            return self.kernels.flash_attn_varlen_func(
                q=on.q,
                k=on.k,
                v=on.v,
                cu_seqlens_q=step.cu_seqlens_q,
                cu_seqlens_k=step.cu_seqlens_q,
                max_seqlen_q=step.max_seqlen_q,
                max_seqlen_k=step.max_seqlen_q,
                **common,
            )
        fp8 = on.keys.dtype == FP8
        k_cache = on.keys.view(-1, step.page_size, geometry.kv_heads, geometry.head_dim)
        if on.qv is not None:
            k_cache, v_cache = k_cache[..., geometry.v_head_dim :], k_cache[..., : geometry.v_head_dim]
        else:
            v_cache = on.values.view(-1, step.page_size, geometry.kv_heads, geometry.v_head_dim)
        return self.kernels.flash_attn_with_kvcache(
            q=on.q,
            qv=on.qv,
            k_cache=k_cache,
            v_cache=v_cache,
            page_table=step.page_table,
            cache_batch_idx=step.row_index,
            cache_seqlens=step.cache_seqlens,
            cu_seqlens_q=step.cu_seqlens_q,
            max_seqlen_q=step.max_seqlen_q,
            k_descale=_descale(layer, "k_scale", step, geometry, on.q.device) if fp8 else None,
            v_descale=_descale(layer, "v_scale", step, geometry, on.q.device) if fp8 else None,
            scheduler_metadata=self._schedule(step, on, windowed),
            **common,
        )

    def _schedule(self, step: AttentionPass, on: _Operands, windowed: bool) -> Any:
        """The kernel's tile schedule for this pass: made at its first layer, shared by all layers like it."""
        if self.kernels.get_scheduler_metadata is None:
            return None
        geometry, mla = on.geometry, on.qv is not None
        # A graph computes its own: one made by a run before the capture would keep the lengths of that run.
        key = (geometry, id(step), on.q.is_cuda and torch.cuda.is_current_stream_capturing())
        if key not in self._schedules:
            self._schedules[key] = self.kernels.get_scheduler_metadata(
                sequences=step.sequences,
                max_seqlen_q=step.max_seqlen_q,
                max_seqlen_k=step.page_table.shape[1] * step.page_size,
                heads=geometry.heads,
                kv_heads=geometry.kv_heads,
                head_dim=geometry.head_dim - (geometry.v_head_dim if mla else 0),
                v_head_dim=geometry.v_head_dim,
                dtype=on.keys.dtype,
                queries=on.q.shape[0],
                longest_k=step.max_seqlen_k,
                indexed=step.row_index is not None,
                qv=mla,
                packed=on.qv is not None and joint_view(on.qv, on.q) is not None,
                cache_seqlens=step.cache_seqlens,
                cu_seqlens_q=step.cu_seqlens_q,
                page_size=step.page_size,
                causal=step.causal,
                window_size=(geometry.window_left, 0) if windowed else (-1, -1),
                has_softcap=geometry.softcap != 0,
                num_splits=self._num_splits,
            )
        return self._schedules[key]


def _expanded(step: AttentionPass | TreePass) -> AttentionPass:
    return step.expanded() if isinstance(step, TreePass) else step


def _descale(layer: Any, name: str, step: AttentionPass, geometry: _Geometry, device: torch.device) -> Tensor:
    """The layer's scale as fp32 [sequences of this call, kv_heads]."""
    return head_scale(getattr(layer, name, None), device).T.expand(step.sequences, geometry.kv_heads)


__all__ = ["FlashAttentionBackend"]
