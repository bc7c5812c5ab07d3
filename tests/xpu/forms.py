"""The forms that a batch takes, and the layers it meets: what every test here goes through."""

from __future__ import annotations

from typing import Any

import torch

from fa_ref import ForwardMode, LayerKind
from fa_ref.cases import Case, make_case

TREE = [-1, 0, 0, 1]
PAST = (70, 0, 130)
FORMS: dict[str, dict[str, Any]] = {
    "extend": dict(mode=ForwardMode.EXTEND, new_lens=(5, 66, 1)),
    "prefill": dict(mode=ForwardMode.EXTEND, prefix_lens=(0, 0, 0), new_lens=(5, 66, 1)),
    "split-prefill": dict(mode=ForwardMode.SPLIT_PREFILL, new_lens=(2, 3, 4)),
    "mixed": dict(mode=ForwardMode.MIXED, new_lens=(1, 66, 1)),
    "decode": dict(mode=ForwardMode.DECODE),
    "draft-chain": dict(mode=ForwardMode.DECODE, topk=1, step=1),
    "draft-branches": dict(mode=ForwardMode.DECODE, topk=3, step=1),
    "verify-chain": dict(mode=ForwardMode.TARGET_VERIFY, draft_token_num=4),
    "verify-tree": dict(mode=ForwardMode.TARGET_VERIFY, trees=[TREE, TREE, TREE]),
    "draft-extend": dict(mode=ForwardMode.DRAFT_EXTEND, new_lens=(3, 1, 2)),
    "idle": dict(mode=ForwardMode.IDLE, prefix_lens=(), new_lens=()),
}
KINDS = {kind.name.lower(): kind for kind in LayerKind} | {"mla": None}
LATENTS = {"mla": LayerKind.FULL, "mla-sliding": LayerKind.SLIDING, "mla-local": LayerKind.LOCAL}
MERGED = ("draft-branches", "verify-tree")  # two passes, joined by their LSE
WITH_CROSS = ("extend", "mixed", "decode")


def pairs() -> list[tuple[str, str]]:
    """(form, kind) of all that a model may meet."""
    return [(form, kind) for form in FORMS for kind in KINDS if kind != "cross" or form in WITH_CROSS]


def problem(form: str, kind: str, **arguments: Any) -> Case:
    """A ragged batch of a form, with a layer of a kind: 16 bit, pages of 64, heads of 64 unless said otherwise.

    kind: one of KINDS, or of LATENTS, whose heads are a latent of 512 and a rope part of 64.
    """
    given: dict[str, Any] = dict(prefix_lens=PAST) | FORMS[form]
    given |= dict(page_size=64, heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16, window=20)
    given |= dict(kind=LATENTS[kind], latent=512, rope=64) if kind in LATENTS else dict(kind=KINDS[kind])
    if kind == "cross":
        given |= dict(encoder_lens=(3, 0, 70))
    given |= arguments
    page_size = given["page_size"]
    given["chunk"] = page_size * max(1, 64 // page_size)  # a chunk is of whole pages
    if kind in LATENTS and given.get("v_scale"):
        given["v_scale"] = given["k_scale"]  # a latent is key and value
    return make_case(given.pop("mode"), **given)
