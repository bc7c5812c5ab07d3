"""FlashAttentionBackend, readable: the methods a model's layers call, on either of two providers.

"masks" answers by definition (`fa_ref.oracle`) and plans nothing. "passes" does what a production backend
does: plan the batch once, then per layer write KV, run the passes, merge them in order.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from fa_ref.api import (
    AttentionLayer,
    AttentionPass,
    AttentionPlan,
    BackendConfig,
    BadBatch,
    BadConfig,
    ForwardBatch,
    ForwardMode,
    LayerKind,
    TreePass,
    UnsupportedByProvider,
    layer_kind,
    window_left,
)
from fa_ref.api.bounds import key_rows, slots_to_write
from fa_ref.api.checks import check_cut, check_layer_inputs, check_layer_pool, check_window
from fa_ref.api.encoder import check_encoder_writes, checked_text
from fa_ref.api.mla import is_mha_form, latent_inputs, latent_layer, mha_call, refuse_rope
from fa_ref.api.planned import check_planned, read_batch
from fa_ref.api.pools import FP8, head_scale
from fa_ref.attention import AttentionState, attention, merge, wide
from fa_ref.kernels import flash_attn_varlen_func, flash_attn_with_kvcache
from fa_ref.oracle import masked_attention
from fa_ref.planning import plan_batch

PROVIDERS = ("masks", "passes")


class FlashAttentionBackend:
    """Attention of one model over its paged cache. Call init_forward_metadata once a batch, forward once a layer.

    runner: a server's model runner, or a BackendConfig. provider: "masks" (default, the oracle) or "passes".
    q is [tokens, heads * head_dim] or [tokens, heads, head_dim]; the output is [tokens, heads * v_head_dim].

    Raises BadConfig, BadBatch, BadPageTable, UnsupportedByProvider; the backend stays usable after any of them.
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
        if provider not in (None, *PROVIDERS):
            raise BadConfig(f"provider {provider!r}; the reference has {', '.join(map(repr, PROVIDERS))}")
        self.config = BackendConfig.from_model_runner(runner)
        self.provider = provider or "masks"
        self.skip_prefill = skip_prefill
        self.speculative_step_id, self.topk = speculative_step_id, topk
        self.speculative_num_steps = speculative_num_steps
        self.oracle_dtype = torch.promote_types(self.config.dtype, torch.float32)  # torch.float64: a finer oracle
        self._plan: AttentionPlan | None = None

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

    def planned_batch(self, forward_batch: Any) -> ForwardBatch:
        """A layer's batch as a ForwardBatch. Raises BadBatch unless it is the planned one."""
        plan, batch = self.forward_metadata, self._batch(forward_batch)
        check_planned(plan, batch, self.config)
        return batch

    def drop_plan(self) -> None:
        """Forget the current plan: a refused batch leaves none behind."""
        self._plan = None

    def use_plan(self, plan: AttentionPlan) -> None:
        """Take a plan made elsewhere: the steps of a draft are planned together."""
        self._plan = plan

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
        plan, batch = self.forward_metadata, self.planned_batch(forward_batch)
        server_layer, layer = layer, AttentionLayer.of(layer)
        if is_mha_form(batch, plan):
            refuse_rope(q_rope, k_rope)
            return self._run_given(q, k, v, layer, batch, sinks, save_kv_cache)
        if self.config.use_mla:
            layer = latent_layer(layer)
        kind = layer_kind(layer, self.config.attention_chunk_size)
        check_layer_pool(layer, self.config, batch.token_to_kv_pool or self.config.token_to_kv_pool)
        check_window(layer, self.config)
        passes = plan.for_kind(kind)
        queries, new_k, new_v = self._inputs(q, k, v, q_rope, k_rope, layer, batch, kind, sinks)
        for step in passes:
            check_cut(step, layer)
        if new_k is not None and new_v is not None and save_kv_cache:
            self._write_kv(new_k, new_v, server_layer, batch, kind)
        if self.provider == "masks":
            oracle = masked_attention(
                queries,
                batch,
                layer,
                self.config,
                sinks=sinks,
                step=self.speculative_step_id,
                compute_dtype=self.oracle_dtype,
            )
            return rearrange(oracle.out.to(q.dtype), "t h d -> t (h d)")
        state = empty_state(wide(queries), layer.v_head_dim)
        for step in passes:
            if isinstance(step, TreePass) and self.config.tree_attention != "expand":
                part = self._run_tree(step, queries, layer, batch, sinks)
            else:
                call = step.expanded() if isinstance(step, TreePass) else step
                part = self._run(call, queries, layer, batch, sinks)
            state = merge(state, part)
        return rearrange(state.out.to(q.dtype), "t h d -> t (h d)")

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
        raise UnsupportedByProvider("the reference captures no graphs; use init_forward_metadata, or fa_fast")

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
        self.init_cuda_graph_state(bs)

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
        self.init_cuda_graph_state(bs)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """The host's part of a graphed step: check the batch that will be replayed. in_capture: there is none yet."""
        batch = self._to_plan(forward_batch)
        if not in_capture:
            checked_text(batch, self.config)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """What a graph records in fa_fast. Here it plans, as init_forward_metadata does."""
        self.init_forward_metadata(forward_batch)

    def _inputs(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        q_rope: Tensor | None,
        k_rope: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        kind: LayerKind,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """q [tokens, heads, head_dim], and what is new in the cache: k and v, or the latent and its rope part."""
        tokens, config = self.forward_metadata.num_tokens, self.config
        if config.use_mla:
            given = latent_inputs(q, k, v, q_rope, k_rope, layer, tokens, config, sinks)
            return torch.cat([given.q_nope, given.q_rope], dim=-1), given.latent, given.k_rope
        refuse_rope(q_rope, k_rope)
        check_layer_inputs(q, k, v, layer, tokens, config, sinks, key_rows(batch, kind, tokens))
        queries = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        if k is None or v is None:
            return queries, None, None
        keys = k.reshape(-1, layer.tp_k_head_num, layer.head_dim)
        return queries, keys, v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim)

    def _to_plan(self, forward_batch: Any) -> ForwardBatch:
        """A server's batch, of a mode that this backend plans."""
        batch = self._batch(forward_batch)
        if self.skip_prefill and not batch.forward_mode.is_decode_or_idle():
            raise BadBatch(f"{batch.forward_mode.name} on a backend made with skip_prefill=True")
        return batch

    def _batch(self, batch: Any) -> ForwardBatch:
        """A server's batch; a draft must be the one that this backend was built for."""
        return read_batch(batch, self.config, self.topk, self.speculative_num_steps)

    def _write_kv(self, k: Tensor, v: Tensor, layer: Any, batch: ForwardBatch, kind: LayerKind) -> None:
        if k.numel() == 0:
            return
        if kind is LayerKind.CROSS:
            check_encoder_writes(batch, self.config)
        loc = slots_to_write(batch, self.config, self.speculative_step_id, self.forward_metadata.num_tokens, kind)
        pool, sizes = batch.token_to_kv_pool or self.config.token_to_kv_pool, AttentionLayer.of(layer)
        if self.config.use_mla:
            pool.set_mla_kv_buffer(layer, loc.long(), k, v)
        else:
            pool.set_kv_buffer(layer, loc.long(), k, v, sizes.k_scale, sizes.v_scale)

    def _run_given(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        sinks: Tensor | None,
        save_kv_cache: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The MHA form: keys and values of every head, given by the caller. The mask is the batch's either way."""
        call = mha_call(q, k, v, layer, batch, self.forward_metadata, self.config, sinks, save_kv_cache)
        call |= {name: wide(call[name]) for name in ("q", "k", "v")}
        out, lse = flash_attn_varlen_func(**call, return_softmax_lse=True)
        out = out.to(q.dtype)
        return (out, lse) if batch.mha_return_lse else rearrange(out, "t h d -> t (h d)")

    def _run(
        self, step: AttentionPass, q: Tensor, layer: AttentionLayer, batch: ForwardBatch, sinks: Tensor | None
    ) -> AttentionState:
        """One pass, as one kernel call over the cache viewed in the pass's pages."""
        pool = batch.token_to_kv_pool or self.config.token_to_kv_pool
        keys, values = pool.get_kv_buffer(layer.layer_id)
        descale = [
            None if keys.dtype != FP8 else descales(scale, step.sequences, layer.tp_k_head_num, q.device)
            for scale in (layer.k_scale, layer.v_scale)
        ]
        rows = slice(None) if step.token_index is None else step.token_index.long()
        queries, qv = wide(q[rows]), None
        if self.config.use_mla:  # a cached row is [latent | rope]; the latent meets qv and is the value as well
            latent = layer.v_head_dim
            queries, qv, keys = queries[..., latent:], queries[..., :latent], keys[..., latent:]
        out, lse = flash_attn_with_kvcache(
            q=queries,
            qv=qv,
            k_cache=rearrange(keys, "(pages size) h d -> pages size h d", size=step.page_size),
            v_cache=rearrange(values, "(pages size) h d -> pages size h d", size=step.page_size),
            page_table=step.page_table,
            cache_batch_idx=step.row_index,
            cache_seqlens=step.cache_seqlens,
            cu_seqlens_q=step.cu_seqlens_q,
            max_seqlen_q=step.max_seqlen_q,
            k_descale=descale[0],
            v_descale=descale[1],
            softmax_scale=layer.scaling,
            causal=step.causal,
            window_size=(window_left(layer), 0) if step.uses_window else (-1, -1),
            softcap=layer.logit_cap,
            return_softmax_lse=True,
            sinks=sinks if step.takes_sinks else None,
        )
        state = empty_state(wide(q), layer.v_head_dim)
        state.out[rows], state.lse[rows] = out, lse
        return state

    def _run_tree(
        self, step: TreePass, q: Tensor, layer: Any, batch: ForwardBatch, sinks: Tensor | None
    ) -> AttentionState:
        """A tree pass, dense: gather each request's drafts and apply the mask as it is."""
        if step.mask.shape[0] == 0:
            return empty_state(wide(q), layer.v_head_dim)
        pool = batch.token_to_kv_pool or self.config.token_to_kv_pool
        keys, values = pool.get_kv_buffer(layer.layer_id)
        k_scale, v_scale = (head_scale(getattr(layer, name, None), q.device) for name in ("k_scale", "v_scale"))
        by_request = rearrange(wide(q), "(r q) h d -> r q h d", q=step.mask.shape[1])
        states = [
            attention(
                queries,
                wide(keys[slots]) * (k_scale if keys.dtype == FP8 else 1),
                wide(values[slots]) * (v_scale if values.dtype == FP8 else 1),
                mask,
                softmax_scale=layer.scaling,
                logit_cap=getattr(layer, "logit_cap", 0.0) or 0.0,
                sinks=sinks if step.takes_sinks else None,
            )
            for queries, slots, mask in zip(by_request, step.slots.long(), step.mask, strict=True)
        ]
        return AttentionState(*(torch.cat(parts) for parts in zip(*states, strict=True)))


def empty_state(q: Tensor, v_head_dim: int) -> AttentionState:
    """Attention over no keys: the identity of merge."""
    out = q.new_zeros(*q.shape[:2], v_head_dim)
    return AttentionState(out, torch.full(q.shape[:2], -torch.inf, device=q.device))


def descales(scale: Tensor | float | None, sequences: int, kv_heads: int, device: torch.device) -> Tensor:
    """A layer's scale as the [sequences, kv_heads] fp32 that one kernel call wants: its own sequence count."""
    return rearrange(head_scale(scale, device), "h 1 -> 1 h").expand(sequences, kv_heads)


__all__ = ["FlashAttentionBackend"]
