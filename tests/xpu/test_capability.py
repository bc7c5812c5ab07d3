"""What runs on Intel GPUs, combination by combination, against a table written from the record of the kernels.

The table is `REFUSED`: reasons, each with the builds it holds for. It knows nothing of fa_fast's capability records,
and the whole product goes through both. Samples of every form and layer are then computed on the emulated builds: what
the table allows is right within its budget, what it refuses raises before a kernel starts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch

from fa_fast.calls import Shared
from fa_fast.kernels import vllm_xpu
from fa_fast.kernels.capability import Capability
from fa_fast.kernels.xpu_generations import GENERATIONS
from fa_ref import UnsupportedByProvider
from fa_ref.cases import Case
from tests.support import FP8
from tests.xpu.conftest import BUILDS
from tests.xpu.forms import FORMS, KINDS, LATENTS, WITH_CROSS, problem
from tests.xpu.test_numerics import outcome

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DIMS = {  # (qk, v); of latents (rope, latent)
    "heads": ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)),
    "latents": ((64, 512), (32, 512), (64, 256)),
}
PAGES = (1, 3, 16, 32, 48, 64, 96, 128, 192, 256)
DTYPES = (  # of q, of the cache, factors of an fp8 cache
    (BF16, BF16, 1), (FP16, FP16, 1), (FP32, FP32, 1), (FP16, BF16, 1),
    (BF16, FP8, 1), (FP16, FP8, 1), (BF16, FP8, 2), (FP8, FP8, 1),
)  # fmt: skip
GROUPS = (1, 16, 17)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One combination."""

    form: str
    kind: str
    cascade: bool  # a prefix that all requests share is read once, so that two states are merged
    page_size: int
    dims: tuple[int, int]
    dtype: torch.dtype
    kv_dtype: torch.dtype
    factors: int  # 1, or as many as key heads
    softcap: bool
    sinks: bool
    group: int  # query heads a key head

    @property
    def latents(self) -> bool:
        return self.kind in LATENTS

    @property
    def merges(self) -> bool:
        """Two states are joined by their LSE: a tree's drafts behind a prefix, or a cascade."""
        return self.form in ("draft-branches", "verify-tree") or self.cascade

    @property
    def one_query(self) -> bool:
        """The decode kernel is called; windows and chunks cut a tree's prefix at a length of each draft's own."""
        cut = self.form == "verify-tree" and self.kind in ("sliding", "local", "mla-sliding", "mla-local")
        return self.form in ("decode", "draft-chain") or cut


BUILT = {(64, 64), (96, 96), (128, 128), (192, 192), (256, 256)}
ALL, SGL, OLD, VLLM = BUILDS, ("2026-08", "2026-10"), ("2026-08",), ("vllm",)
REFUSED: dict[str, tuple[tuple[str, ...], Callable[[Asked], bool]]] = {
    "queries are bf16 or fp16": (ALL, lambda a: a.dtype not in (BF16, FP16)),
    "a cache is of the queries' dtype, or e4m3": (ALL, lambda a: a.kv_dtype not in (a.dtype, FP8)),
    "queries over e4m3 are bf16": (ALL, lambda a: a.kv_dtype == FP8 and a.dtype != BF16),
    "an e4m3 cache has one factor": (ALL, lambda a: a.kv_dtype == FP8 and a.factors > 1),
    "head dims are equal and built": (ALL, lambda a: not a.latents and a.dims not in BUILT),
    "softcap is accepted and ignored": (OLD, lambda a: a.softcap),
    "the LSE is never written": (OLD, lambda a: a.merges),
    "sinks at head dim 64 alone": (SGL, lambda a: not a.latents and a.sinks and a.dims != (64, 64)),
    "decode has at most 16 heads a key head": (SGL, lambda a: not a.latents and a.one_query and a.group > 16),
    "no kernels of latents": (VLLM, lambda a: a.latents),
    "latents of 512, rope of 64": (SGL, lambda a: a.latents and a.dims != (64, 512)),
    "latents are 16 bits wide": (SGL, lambda a: a.latents and a.kv_dtype == FP8),
    "latents have no softcap": (SGL, lambda a: a.latents and a.softcap),
    "latents have no sinks": (SGL, lambda a: a.latents and a.sinks),
    "latents have no window": (SGL, lambda a: a.kind == "mla-sliding"),
    "latents have no LSE": (SGL, lambda a: a.latents and a.merges),
}  # fmt: skip


def reasons(build: str, asked: Asked) -> list[str]:
    """Why the table refuses it; nothing: it runs."""
    return [reason for reason, (builds, holds) in REFUSED.items() if build in builds and holds(asked)]


def pairs() -> list[tuple[str, str]]:
    return [(form, kind) for form in FORMS for kind in KINDS | LATENTS if kind != "cross" or form in WITH_CROSS]


every_pair = pytest.mark.parametrize("form,kind", pairs())
every_build = pytest.mark.parametrize("build", BUILDS)


def combinations(form: str, kind: str) -> Iterator[Asked]:
    """The whole product of a form and a kind."""
    cascades = (False, True) if cascadable(form, kind) else (False,)
    dims = DIMS["latents" if kind in LATENTS else "heads"]
    flags = (False, True)
    for cascade, page, dim, (q, kv, factors), softcap, sinks, group in product(
        cascades, PAGES, dims, DTYPES, flags, flags, GROUPS
    ):
        yield Asked(
            form=form, kind=kind, cascade=cascade, page_size=page, dims=dim, dtype=q, kv_dtype=kv, factors=factors,
            softcap=softcap, sinks=sinks, group=group,
        )  # fmt: skip


def cascadable(form: str, kind: str) -> bool:
    """A shared prefix is read once by full layers, of what is no draft."""
    return kind in ("full", "mla") and form in ("extend", "split-prefill", "mixed", "decode", "draft-extend")


# ---- the whole product, against the capability records -----------------------------------------------------------


def capability(build: str) -> Capability:
    """What the provider claims before a device was asked."""
    return vllm_xpu.TABLE if build == "vllm" else GENERATIONS[build]


def shape_of_plan(form: str, kind: str, cascade: bool, page_size: int) -> tuple[bool, bool]:
    """(merges, one query a sequence) as the backend finds them in its plan."""
    case = planned(form, kind, cascade, page_size)
    backend = provider_backend(case, "torch_cpu")
    step = backend._planned()
    shared = Shared(step, backend._layer(case.layer, step.pool, None))
    return shared.merges, shared.one_query


def provider_backend(case: Case, name: str) -> Any:
    from fa_fast import FlashAttentionBackend

    backend = FlashAttentionBackend(case.config, speculative_step_id=case.step, provider=name)
    backend.init_forward_metadata(case.batch)
    return backend


def planned(form: str, kind: str, cascade: bool, page_size: int, **more: Any) -> Case:
    """A small problem of the form; a cascade shares one page, or 64 tokens of smaller ones."""
    given: dict[str, Any] = dict(page_size=page_size) | more
    if cascade:
        shared = page_size * max(1, 64 // page_size)
        given |= dict(prefix_lens=(shared,) * 3, shared_prefix=shared)
    return problem(form, kind, **given)


def says(record: Capability, asked: Asked, merges: bool, one_query: bool) -> str:
    """What the record says to the two questions that the backend asks of a layer: "", or its refusal."""
    try:
        record.require(
            dtype=asked.dtype, kv_dtype=asked.kv_dtype, head_dim=asked.dims[0], v_head_dim=asked.dims[1],
            page_size=asked.page_size, softcap=asked.softcap, sinks=asked.sinks, qv=asked.latents,
            window=asked.kind in ("sliding", "mla-sliding"), head_scales=asked.kv_dtype == FP8 and asked.factors > 1,
        )  # fmt: skip
        record.require_passes(
            merges=merges, one_query=one_query, group=asked.group, sinks=asked.sinks, qv=asked.latents
        )
    except UnsupportedByProvider as refusal:
        return str(refusal)
    return ""


@every_pair
def test_every_combination_is_allowed_or_refused_as_the_table_says(form, kind):
    shapes = {
        (cascade, page): shape_of_plan(form, kind, cascade, page)
        for cascade in (False, True)[: 1 + cascadable(form, kind)]
        for page in PAGES
    }
    records = {build: capability(build) for build in BUILDS}
    wrong = []
    for asked in combinations(form, kind):
        merges, one_query = shapes[asked.cascade, asked.page_size]
        for build, record in records.items():
            refusal = says(record, asked, merges, one_query)
            if bool(refusal) is not bool(reasons(build, asked)):
                wrong.append((build, asked, refusal or "allowed", reasons(build, asked)))
    assert not wrong, f"{len(wrong)}, such as {wrong[:3]}"


def test_the_product_is_of_this_size():
    counts = {pair: sum(1 for _ in combinations(*pair)) for pair in pairs()}
    assert len(counts) == 69 and sum(counts.values()) == 384_960


def test_no_reason_of_the_table_is_idle():
    """Each refuses something that nothing else does: a record that lacked it would differ from the table."""
    found = [
        reasons(build, asked)
        for build, pair in product(BUILDS, pairs())
        for asked in combinations(*pair)
        if asked.page_size == 64
    ]
    assert {alone[0] for alone in found if len(alone) == 1} == set(REFUSED)


@every_build
def test_every_refusal_says_what_was_asked_what_runs_and_where_else(build):
    record = capability(build)
    for asked in combinations("verify-tree", "full"):
        if asked.page_size == 64 and (refusal := says(record, asked, merges=True, one_query=False)):
            assert " cannot run " in refusal and " It supports " in refusal
            assert "provider torch_cpu" in refusal and "provider='" in refusal


# ---- samples of it, computed -------------------------------------------------------------------------------------


def computable(asked: Asked) -> bool:
    """Queries of fp8 and caches of the other 16-bit dtype are no model's: the config or the pool may refuse first."""
    return asked.dtype != FP8 and asked.kv_dtype in (asked.dtype, FP8)


def case_of(asked: Asked) -> Case:
    scales: Any = dict(k_scale=0.5, v_scale=0.5)
    if asked.factors > 1:
        scales = dict(k_scale=torch.tensor([0.5, 0.25]), v_scale=torch.tensor([0.5, 1.0]))
    kv_heads = 1 if asked.latents else 2
    more: dict[str, Any] = dict(latent=asked.dims[1], rope=asked.dims[0]) if asked.latents else {}
    more |= {} if asked.latents else dict(head_dim=asked.dims[0], v_head_dim=asked.dims[1])
    more |= scales if asked.kv_dtype == FP8 else {}
    return planned(
        asked.form, asked.kind, asked.cascade, asked.page_size, dtype=asked.dtype, kv_dtype=asked.kv_dtype,
        softcap=0.5 if asked.softcap else 0.0, sinks=asked.sinks, heads=kv_heads * asked.group, kv_heads=kv_heads,
        **more,
    )  # fmt: skip


def samples(build: str, form: str, kind: str, count: int = 6) -> list[Asked]:
    """Some that run and some that do not, drawn by the names of all three."""
    draw = random.Random(f"{build}-{form}-{kind}")
    drawn = [a for a in combinations(form, kind) if computable(a) and not (a.latents and a.factors > 1)]
    runs = [a for a in drawn if not reasons(build, a)]
    near = [a for a in drawn if len(reasons(build, a)) == 1]  # one step beside what runs
    return [draw.choice(pool) for pool in (runs, near) if pool for _ in range(count // 2)]


@every_pair
@every_build
def test_samples_are_right_where_allowed_and_raise_where_refused(build, form, kind, provider):
    name = provider(build)
    for asked in samples(build, form, kind):
        found = outcome(case_of(asked), name)
        assert found == ("refused" if reasons(build, asked) else "right"), (asked, reasons(build, asked))


@pytest.mark.parametrize("lost", ["softcap", "sinks", "lse", "k_scale", "group", "head dim"])
def test_what_is_refused_has_written_nothing(lost, provider):
    """The cache is as it was: whoever catches the refusal can run the batch elsewhere."""
    layers: dict[str, Asked] = dict.fromkeys(["softcap", "sinks", "lse", "k_scale", "group", "head dim"], PLAIN)
    layers["softcap"] = replace(PLAIN, softcap=True)
    layers["sinks"] = replace(PLAIN, sinks=True, dims=(128, 128))
    layers["lse"] = replace(PLAIN, form="verify-tree")
    layers["k_scale"] = replace(PLAIN, kv_dtype=FP8, factors=2)
    layers["group"] = replace(PLAIN, group=17)
    layers["head dim"] = replace(PLAIN, dims=(80, 80))
    case = case_of(layers[lost])
    before = [buffer.clone().view(torch.uint8) for buffer in case.config.token_to_kv_pool.get_kv_buffer(0)]
    assert outcome(case, provider("2026-08")) == "refused"
    after = [buffer.view(torch.uint8) for buffer in case.config.token_to_kv_pool.get_kv_buffer(0)]
    assert all(map(torch.equal, before, after))


PLAIN = Asked(
    form="decode", kind="full", cascade=False, page_size=64, dims=(64, 64), dtype=BF16, kv_dtype=BF16, factors=1,
    softcap=False, sinks=False, group=2,
)  # fmt: skip
