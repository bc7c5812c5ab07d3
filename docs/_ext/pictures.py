"""The pictures of the pages, drawn by fa_ref.show from the running example of the notebooks."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from fa_ref import LayerKind, plan_batch, show
from fa_ref.cases import Case, make_case
from fa_ref.masks import causal
from fa_ref.show import Picture


def _example() -> Case:
    """A has 3 tokens cached and 5 new, B 0 and 4, C 6 and 1; pages of 4 tokens."""
    return make_case()


def overview() -> Picture:
    """What a backend gets, what it finds in the cache, and the one kernel call it makes of them."""
    case = _example()
    step = plan_batch(case.batch, case.config).for_kind(LayerKind.FULL)[0]
    queries = show.ragged(
        step.cu_seqlens_q, first=case.batch.extend_prefix_lens, title="1. new tokens of three requests, packed"
    )
    pool = show.pool_strip(case, title="2. the paged cache after their keys are written")
    call = show.plan(step, batch=case, title="3. the kernel call: which rows read which pages")
    masks = [
        show.mask_grid(causal, q_pos=range(prefix, total), k_pos=total, page_size=4, title=name, request=name)
        for name, prefix, total in zip(
            "ABC", case.batch.extend_prefix_lens.tolist(), case.batch.seq_lens.tolist(), strict=True
        )
    ]
    seen = show.side_by_side(*masks, title="4. what each row may see")
    return show.stacked(queries, pool, call, seen, gap=22)


def three_spaces() -> Picture:
    """Request A of the running example: its positions in the pool, and its row of the page table."""
    case = _example()
    row = case.config.req_to_token_pool.req_to_token[case.batch.req_pool_indices[0], :8]
    pool = show.pool_strip(
        {"A": row}, page_size=4, slots=40, title="slots of the pool; a cell shows the position it holds"
    )
    table = show.page_table([(row[::4] // 4).tolist()], lens=torch.tensor([8]), page_size=4, title="its page table")
    return show.stacked(pool, table)


if __name__ == "__main__":  # python docs/_ext/pictures.py docs/_static/overview.svg
    Path(sys.argv[1]).write_text(overview()._repr_svg_() + "\n", encoding="utf-8")
