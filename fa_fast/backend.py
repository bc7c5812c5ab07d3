"""FlashAttentionBackend on production kernels: plan a batch once, then per layer write KV, run passes, merge.

Planning is in fa_fast.planner; what layers and steps hold ready is in fa_fast.calls. The readable twin, with every step
explained, is fa_ref.backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa_fast.calls import Geometry, KnownLayer, Operands, capturing, looks
from fa_fast.kernels.joint import joint_view
from fa_fast.kernels.select import Provider, provider_for
from fa_fast.planner import BatchPlanner
from fa_ref.api import (
    AttentionLayer,
    AttentionPass,
    BackendConfig,
    ForwardBatch,
    LayerKind,
    TreePass,
    layer_kind,
    window_left,
)
from fa_ref.api.bounds import page_size_of
from fa_ref.api.checks import check_layer_inputs, check_layer_pool, check_window
from fa_ref.api.mla import check_latent_inputs, is_mha_form, latent_and_rope, latent_layer, mha_call, refuse_rope
from fa_ref.api.pools import FP8


class FlashAttentionBackend(BatchPlanner):
    """Attention of one model over its paged cache. Call init_forward_metadata once a batch, forward once a layer.

    runner: a server's model runner, or a BackendConfig. provider: the name of a kernel provider; None takes the
    device's own ("torch_cpu", "sgl_cuda", "sgl_xpu"). q is [tokens, heads * head_dim] or [tokens, heads, head_dim]; the
    output is [tokens, heads * v_head_dim]. Nothing here waits for the device, unless FA_CHECK=1.

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
        config = BackendConfig.from_model_runner(runner)
        self.kernels: Provider = provider_for(config.device, provider)
        self.provider = self.kernels.CAPABILITY.provider
        super().__init__(
            config,
            skip_prefill=skip_prefill,
            speculative_step_id=speculative_step_id,
            topk=topk,
            speculative_num_steps=speculative_num_steps,
            expands_trees=_expands_trees(config, self.kernels),
        )
        self._num_splits = 1 if config.deterministic else 0
        self._layers: dict[Any, KnownLayer] = {}  # by layer_id, as last seen
        self._geometries: dict[Geometry, Geometry] = {}  # one object of each, so that its identity is its key

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
        """Write k and v to the cache, then attend, in every mode: the plan differs, running it does not.

        save_kv_cache=False: they are in the cache already. k and v None: attend to the cache as it is. On a CROSS layer
        they are the encoder's, given once: one row a slot of encoder_out_cache_loc.
        MLA: q and k are packed [latent | rope], or q_rope and k_rope hold their rope part; v is not read. In a batch
        with attn_attend_prefix_cache set, the MHA form: k and v are expanded, nothing is written, and with
        mha_return_lse the result is a state for merge_state, (out [tokens, heads, v_head_dim], lse (tokens, heads)).
        """
        step = self._planned()
        batch, plan, config = step.of(forward_batch), step.plan, self.config
        if is_mha_form(batch, plan):
            refuse_rope(q_rope, k_rope)
            return self._given(q, k, v, AttentionLayer.of(layer), batch, sinks, save_kv_cache)
        known = self._layer(layer, step.pool, sinks)
        shared, geometry = step.shared(known), known.geometry
        if (found := looks(q, k, v, q_rope, k_rope, sinks)) != shared.accepted:
            if geometry.latents:
                check_latent_inputs(q, k, v, q_rope, k_rope, known.layer, plan.num_tokens, config, sinks)
            else:
                refuse_rope(q_rope, k_rope)
                check_layer_inputs(q, k, v, known.layer, plan.num_tokens, config, sinks, shared.key_rows)
            self.kernels.CAPABILITY.require_passes(
                merges=shared.merges,
                one_query=shared.one_query,
                group=geometry.heads // geometry.kv_heads,
                sinks=sinks is not None,
                qv=geometry.latents,
            )
            shared.accepted = found
        known.refresh()
        new_k, new_v = None, None
        if k is not None and (save_kv_cache or shared.attends_to_new):
            new_k, new_v = _new_keys(k, v, k_rope, geometry)
        if save_kv_cache and new_k is not None and new_v is not None and new_k.shape[0]:
            known.write(shared.slots(self.speculative_step_id), new_k, new_v)
        if geometry.latents:
            qv, query = latent_and_rope(q, q_rope, geometry.heads, geometry)
        else:
            qv, query = None, q.reshape(-1, geometry.heads, geometry.head_dim)
        if query.shape[0] == 0 or not shared.passes:
            return q.new_zeros(query.shape[0], geometry.heads * geometry.v_head_dim)
        if not shared.attends_to_new:
            new_k = new_v = None
        return self._run(shared.passes, Operands(query, qv, new_k, new_v, sinks, known)).reshape(query.shape[0], -1)

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
        """`forward`, by the name that a server calls for prefill."""
        return self.forward(q, k, v, layer, forward_batch, save_kv_cache, q_rope, k_rope, sinks)

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
        """`forward`, by the name that a server calls for decode."""
        return self.forward(q, k, v, layer, forward_batch, save_kv_cache, q_rope, k_rope, sinks)

    def _layer(self, given: Any, pool: Any, sinks: Tensor | None) -> KnownLayer:
        """The layer, checked against pool and provider the first time these values are seen."""
        layer_id = getattr(given, "layer_id", None)
        try:
            known = self._layers.get(layer_id)
        except TypeError:
            known = None  # no hash, so no number: AttentionLayer.of says what it must be
        if known is not None and known.is_for(given, pool, sinks is not None):
            return known
        layer, mla = AttentionLayer.of(given), self.config.use_mla
        if mla:
            layer = latent_layer(layer)
        check_layer_pool(layer, self.config, pool)
        check_window(layer, self.config)
        geometry = Geometry(
            kind=layer_kind(layer, self.config.attention_chunk_size),
            heads=layer.tp_q_head_num,
            kv_heads=layer.tp_k_head_num,
            head_dim=layer.head_dim,
            v_head_dim=layer.v_head_dim,
            window_left=window_left(layer),
            softcap=float(layer.logit_cap),
            latents=mla,
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
            head_scales=self.config.kv_cache_dtype == FP8 and _by_head(layer.k_scale, layer.v_scale),
        )
        geometry = self._geometries.setdefault(geometry, geometry)
        known = KnownLayer(given, layer, geometry, pool, sinks is not None)
        self._layers[layer.layer_id] = known
        return known

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
        self.kernels.CAPABILITY.require_mha_form(
            layer, self.config.dtype, lse=batch.mha_return_lse, sinks=sinks is not None
        )
        result = self.kernels.flash_attn_varlen_func(
            **call, num_splits=self._num_splits, return_softmax_lse=batch.mha_return_lse
        )
        return result if batch.mha_return_lse else result.flatten(1)

    def _run(self, passes: tuple[Any, ...], on: Operands) -> Tensor:
        """The passes of a plan either cover all query rows and merge, or split the rows among them."""
        if passes[0].token_index is not None:
            out = on.q.new_zeros(on.q.shape[0], on.known.geometry.heads, on.known.geometry.v_head_dim)
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

    def _is_short(self, step: AttentionPass, tree: TreePass | None, on: Operands) -> bool:
        """Whether a window's keys, with the drafts behind them, are few enough for the kernel of short keys."""
        geometry = on.known.geometry
        prefers, left = self.kernels.prefers_short_keys, geometry.window_left
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
            kv_heads=geometry.kv_heads,
            dim=max(geometry.head_dim, geometry.v_head_dim),
            tree=tree is not None,
        )

    def _short_keys(
        self,
        on: Operands,
        tree: TreePass | None,
        cached: AttentionPass | None = None,
        prefix_out: Tensor | None = None,
        prefix_lse: Tensor | None = None,
    ) -> Tensor:
        """Cached keys of a window and drafts under their tree mask, joined with a prefix's state, in one kernel."""
        known, geometry = on.known, on.known.geometry
        q = on.q if on.qv is None else torch.cat([on.qv, on.q], dim=-1)
        keys: dict[str, Any] = {}
        if cached is not None:
            keys |= dict(
                page_table=cached.page_table,
                row_index=cached.row_index if tree is None else None,
                cache_seqlens=cached.cache_seqlens,
                page_size=cached.page_size,
                causal=cached.causal,
                window_left=geometry.window_left if cached.uses_window else -1,
            )
        if tree is not None:
            keys |= dict(slots=tree.slots, mask=tree.mask)
        if tree is not None:
            queries, takes_sinks = tree.mask.shape[1], tree.takes_sinks
        else:
            assert cached is not None
            queries, takes_sinks = cached.max_seqlen_q, cached.takes_sinks
        return self.kernels.short_key_attention(
            q,
            known.keys,
            known.values,
            queries=queries,
            softmax_scale=known.scaling,
            softcap=geometry.softcap,
            sinks=on.sinks if takes_sinks else None,
            k_scale=known.scale("k_scale") if known.fp8 else None,
            v_scale=known.scale("v_scale") if known.fp8 else None,
            prefix_out=prefix_out,
            prefix_lse=prefix_lse,
            num_splits=self._num_splits,
            **keys,
        )

    def _call(self, step: AttentionPass, on: Operands, return_lse: bool) -> Any:
        """One pass, as one kernel call: what the layers of the step share is prepared at the first of them."""
        known, prepared = on.known, self._planned().calls
        new = step.keys_are_new and on.k is not None
        key = (id(step), id(known.geometry), new, return_lse, capturing(on.q))
        if key not in prepared:
            prepared[key] = self._prepared(step, on, new, return_lse)
        sinks = on.sinks if step.takes_sinks else None
        if new:
            return prepared[key](q=on.q, k=on.k, v=on.v, softmax_scale=known.scaling, sinks=sinks)
        k_cache, v_cache = known.paged(step.page_size)
        if not known.fp8:
            return prepared[key](
                q=on.q, qv=on.qv, k_cache=k_cache, v_cache=v_cache, softmax_scale=known.scaling, sinks=sinks
            )
        return prepared[key](
            q=on.q,
            qv=on.qv,
            k_cache=k_cache,
            v_cache=v_cache,
            k_descale=_descale(known, "k_scale", step),
            v_descale=_descale(known, "v_scale", step),
            softmax_scale=known.scaling,
            sinks=sinks,
        )

    def _prepared(self, step: AttentionPass, on: Operands, new: bool, return_lse: bool) -> Callable[..., Any]:
        """The kernel call of a pass, with all arguments but those of one layer."""
        geometry = on.known.geometry
        # A window that no key of the pass lies outside of is left out: the plain kernel is the faster one. It rounds
        # otherwise, and how long the longest neighbour is must not choose it for a deterministic row.
        needed = self.config.deterministic or step.max_seqlen_k > geometry.window_left + 1
        windowed = step.uses_window and needed
        shape: dict[str, Any] = dict(
            cu_seqlens_q=step.cu_seqlens_q,
            max_seqlen_q=step.max_seqlen_q,
            causal=step.causal,
            window_size=(geometry.window_left, 0) if windowed else (-1, -1),
            num_splits=self._num_splits,
        )
        common = shape | dict(softcap=geometry.softcap, return_softmax_lse=return_lse)
        if new:
            lens: dict[str, Any] = dict(cu_seqlens_k=step.cu_seqlens_q, max_seqlen_k=step.max_seqlen_q)
            return self.kernels.prepared("flash_attn_varlen_func", **lens, **common)
        return self.kernels.prepared(
            "flash_attn_with_kvcache",
            page_table=step.page_table,
            cache_batch_idx=step.row_index,
            cache_seqlens=step.cache_seqlens,
            max_seqlen_k=step.max_seqlen_k,
            scheduler_metadata=self._schedule(step, on, shape),
            **common,
        )

    def _schedule(self, step: AttentionPass, on: Operands, shape: dict[str, Any]) -> Any:
        """The kernel's tile schedule of a pass, for all layers like this one. shape: arguments of its call."""
        if self.kernels.get_scheduler_metadata is None:
            return None
        geometry, mla = on.known.geometry, on.qv is not None
        return self.kernels.get_scheduler_metadata(
            sequences=step.sequences,
            max_seqlen_k=step.page_table.shape[1] * step.page_size,
            heads=geometry.heads,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim - (geometry.v_head_dim if mla else 0),
            v_head_dim=geometry.v_head_dim,
            dtype=on.known.keys.dtype,
            queries=on.q.shape[0],
            longest_k=step.max_seqlen_k,
            indexed=step.row_index is not None,
            qv=mla,
            packed=on.qv is not None and joint_view(on.qv, on.q) is not None,
            cache_seqlens=step.cache_seqlens,
            page_size=step.page_size,
            has_softcap=geometry.softcap != 0,
            **shape,
        )


def _expands_trees(config: BackendConfig, kernels: Provider) -> bool:
    """Whether a tree runs as one sequence a draft, through a page table. Raises if neither way is there."""
    fused = kernels.CAPABILITY.qv_trees or not config.use_mla
    if config.tree_attention == "fused" and not fused:
        raise kernels.CAPABILITY.refuse("tree_attention='fused' over latents", "'expand' and 'auto' for MLA")
    return config.tree_attention == "expand" or not fused


def _new_keys(k: Tensor, v: Tensor | None, k_rope: Tensor | None, of: Geometry) -> tuple[Tensor, Tensor | None]:
    """A layer's new keys and values [tokens, kv_heads, dim]; of latents the latent and the rope part."""
    if of.latents:
        return latent_and_rope(k, k_rope, 1, of)
    return k.reshape(-1, of.kv_heads, of.head_dim), None if v is None else v.reshape(-1, of.kv_heads, of.v_head_dim)


def _by_head(*scales: Tensor | float | None) -> bool:
    """Whether a scale has a factor for each head."""
    return any(isinstance(scale, Tensor) and scale.numel() > 1 for scale in scales)


def _descale(known: KnownLayer, name: str, step: AttentionPass) -> Tensor:
    """The layer's scale as fp32 [sequences of this call, kv_heads]."""
    return known.scale(name).T.expand(step.sequences, known.geometry.kv_heads)


__all__ = ["FlashAttentionBackend"]
