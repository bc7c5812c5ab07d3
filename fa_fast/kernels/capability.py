"""What a kernel provider can do, as data; the one place where a request is checked against it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fa_ref.api.errors import UnsupportedByProvider
from fa_ref.api.layer import AttentionLayer
from fa_ref.api.pools import FP8


@dataclass(frozen=True, kw_only=True)
class Capability:
    """The combinations a provider runs. A request outside it raises before any kernel starts.

    `None` for head_dims, qv_dims, page_sizes means any positive size. `remedy` ends every refusal.
    """

    provider: str
    device: str
    head_dims: frozenset[tuple[int, int]] | None  # (qk head dim, v head dim)
    page_sizes: frozenset[int] | None
    dtypes: frozenset[torch.dtype]  # of q and the output
    kv_dtypes: frozenset[torch.dtype]  # of the cache
    softcap: bool
    sinks: bool
    lse: bool
    qv_dims: frozenset[tuple[int, int]] | None  # (qk head dim, v head dim) of a call with qv: MLA's rope and latent
    qv_dtypes: frozenset[torch.dtype]  # of the cache in such a call
    qv_trees: bool  # short_key_attention takes a row [latent | rope] as key and its front as value
    window: bool
    out: bool  # writes into a caller's `out=`
    attention_chunk: bool
    scheduler_metadata: bool
    remedy: str
    sink_dims: frozenset[int] | None = None  # head dims with sinks; None: all of head_dims
    sinks_in_lse: bool = True  # the LSE of a call with sinks counts them, as a merge needs
    fp8_dtypes: frozenset[torch.dtype] | None = None  # of q over an fp8 cache; None: all of dtypes
    head_scales: bool = True  # an fp8 cache may have a scale for every head; False: one for the whole cache
    decode_group: int | None = None  # most query heads a KV head where each sequence has one query
    qv_plain: bool = False  # a call with qv takes no softcap, sinks or window and returns no LSE

    def refuse(self, asked: str, supported: str) -> UnsupportedByProvider:
        return UnsupportedByProvider(
            f"{self.provider} on {self.device} cannot run {asked}. It supports {supported}. {self.remedy}"
        )

    def require(
        self,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        head_dim: int,
        v_head_dim: int,
        page_size: int | None = None,
        softcap: bool = False,
        sinks: bool = False,
        lse: bool = False,
        qv: bool = False,
        window: bool = False,
        attention_chunk: bool = False,
        head_scales: bool = False,
    ) -> None:
        """Raise UnsupportedByProvider unless this provider runs the described call."""
        if dtype not in self.dtypes:
            raise self.refuse(f"q of {dtype}", _names(self.dtypes))
        if kv_dtype not in self.kv_dtypes:
            raise self.refuse(f"a {kv_dtype} cache", _names(self.kv_dtypes))
        if kv_dtype not in (dtype, FP8):
            raise self.refuse(f"q of {dtype} over a {kv_dtype} cache", f"a cache of q's own dtype, or of {FP8}")
        if kv_dtype == FP8 and self.fp8_dtypes is not None and dtype not in self.fp8_dtypes:
            raise self.refuse(f"q of {dtype} over a {kv_dtype} cache", f"q of {_names(self.fp8_dtypes)} there")
        if head_scales and not self.head_scales:
            raise self.refuse("k_scale or v_scale with a factor for each head", "one factor for a whole cache")
        if qv:
            self._require_qv(kv_dtype, head_dim, v_head_dim)
        elif self.head_dims is not None and (head_dim, v_head_dim) not in self.head_dims:
            raise self.refuse(f"head dims (qk {head_dim}, v {v_head_dim})", f"{sorted(self.head_dims)} as (qk, v)")
        if page_size is not None and self.page_sizes is not None and page_size not in self.page_sizes:
            raise self.refuse(f"page size {page_size}", f"page sizes {sorted(self.page_sizes)}")
        asked = dict(softcap=softcap, sinks=sinks, lse=lse, window=window, attention_chunk=attention_chunk)
        for feature, wanted in asked.items():
            if wanted and not getattr(self, feature):
                raise self.refuse(feature, "calls without it")
            if wanted and qv and self.qv_plain:
                raise self.refuse(f"{feature} with qv (absorbed MLA)", "calls without it")
        if sinks and self.sink_dims is not None and head_dim not in self.sink_dims:
            raise self.refuse(f"sinks at head dim {head_dim}", f"sinks at head dims {sorted(self.sink_dims)}")
        if sinks and lse and not self.sinks_in_lse:
            raise self.refuse("a merge of states that sinks are part of", "sinks where one pass covers all keys")

    def require_passes(self, *, merges: bool, one_query: bool, group: int, sinks: bool, qv: bool) -> None:
        """Raise UnsupportedByProvider unless the passes of a plan run, for a layer that `require` let through.

        merges: their states are merged, by LSE. one_query: a pass has one query a sequence. group: query heads that
        share a KV head.
        """
        if merges and (not self.lse or (qv and self.qv_plain)):
            of = " of absorbed MLA" if qv else ""
            raise self.refuse(
                f"passes that are merged{of}, since its kernels return no LSE there",
                "plans of one pass: no cascade_prefix, and drafts in a chain (topk 1)",
            )
        if merges and sinks and not self.sinks_in_lse:
            raise self.refuse(
                "a merge of states that sinks are part of",
                "sinks in plans of one pass: no cascade_prefix, and drafts in a chain (topk 1)",
            )
        if one_query and not qv and self.decode_group is not None and group > self.decode_group:
            raise self.refuse(
                f"decode with {group} query heads a KV head",
                f"up to {self.decode_group}: divide the heads among devices",
            )

    def require_mha_form(self, layer: AttentionLayer, dtype: torch.dtype, *, lse: bool, sinks: bool = False) -> None:
        """Raise UnsupportedByProvider unless MLA runs as heads of the caller's own keys. layer: the one in that form.

        lse: the result is a part that is merged with others, as a prefix in chunks has it.
        """
        self.require(
            dtype=dtype,
            kv_dtype=dtype,
            head_dim=layer.head_dim,
            v_head_dim=layer.v_head_dim,
            softcap=layer.logit_cap != 0,
            sinks=sinks,
            lse=lse,
        )

    def _require_qv(self, kv_dtype: torch.dtype, head_dim: int, v_head_dim: int) -> None:
        if self.qv_dims is not None and (head_dim, v_head_dim) not in self.qv_dims:
            raise self.refuse(
                f"qv (absorbed MLA) with rope {head_dim} and latent {v_head_dim}",
                f"{sorted(self.qv_dims)} as (rope, latent)" if self.qv_dims else "calls without it",
            )
        if kv_dtype not in self.qv_dtypes:
            raise self.refuse(f"qv (absorbed MLA) over a {kv_dtype} cache", _names(self.qv_dtypes) or "none")


def _names(dtypes: frozenset[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype) for dtype in dtypes))
