"""The page on graphs: its code runs, and each way gives what the eager step does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fa_fast

PAGE = (Path(__file__).parent.parent / "docs" / "graphs.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the page's blocks leave behind, run one after another."""
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        exec(compile(block, "docs/graphs.md", "exec"), found)
    return found


def eager(names: dict[str, Any], batch: Any, hidden: torch.Tensor) -> torch.Tensor:
    backend = names["backend"]
    backend.init_forward_metadata(batch)
    return names["model"](batch, hidden)


def test_every_way_gives_the_eager_step(names):
    batch = names["decode"]([1, 4, 2], [21, 30, 21])
    right = eager(names, batch, names["new"])
    assert right.shape == (3, 256) and right.abs().max() > 0
    for found in (names["kept"], names["replay"](batch, names["new"])):
        torch.testing.assert_close(found, right, atol=2e-2, rtol=2e-2)
    later = eager(names, names["decode"]([1, 4, 2], [22, 31, 22]), names["new"])
    torch.testing.assert_close(names["runner"].run(names["batch"], **names["inputs"]), later, atol=2e-2, rtol=2e-2)


def test_a_smaller_batch_after_a_larger_one_is_padded_by_the_page_s_own_loop(names):
    names["replay"](names["decode"]([1, 4, 2, 3], [21, 30, 21, 40]), torch.randn(4, 256).bfloat16())
    hidden = torch.randn(2, 256).bfloat16()
    batch = names["decode"]([5, 3], [20, 33])
    found = names["replay"](batch, hidden).clone()
    torch.testing.assert_close(found, eager(names, batch, hidden), atol=2e-2, rtol=2e-2)


def test_the_verified_tree_is_the_eager_one(names):
    hidden = torch.randn(8, 256).bfloat16()
    tree, lens = fa_fast.build_tree([[-1, 0, 0, 1]] * 2), torch.tensor([21, 30])
    columns = lens[:, None] + torch.arange(4)
    batch = fa_fast.ForwardBatch(
        forward_mode=fa_fast.ForwardMode.TARGET_VERIFY,
        batch_size=2,
        req_pool_indices=torch.tensor([1, 4]),
        seq_lens=lens,
        out_cache_loc=names["table"][torch.tensor([[1], [4]]), columns].flatten().long(),
        spec_info=fa_fast.VerifyInput(draft_token_num=4, topk=2, custom_mask=tree.custom_mask(lens)),
    )
    found = names["verifier"].run(batch, hidden=hidden).clone()
    assert names["verified"].shape == found.shape == (8, 256)
    torch.testing.assert_close(found, eager(names, batch, hidden), atol=2e-2, rtol=2e-2)
