"""docs/from-sglang.md names everything the two SGLang files define, and every symbol and notebook it names exists."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import fa_fast
import fa_ref
from fa_ref.cases import make_case

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "from-sglang.md").read_text(encoding="utf-8")
STATES = ("works", "differs")

# Every class, function, method, metadata field and attribute that the two files define or set.
SGLANG_0_4_5_FLASHATTENTION_BACKEND = {
    "classes and functions": """FlashAttentionMetadata LocalAttentionMetadata make_local_attention_virtual_batches cdiv
        FlashAttentionBackend FlashAttentionMultiStepBackend""",
    "methods": """__init__ init_forward_metadata forward_extend forward_decode init_cuda_graph_state
        init_forward_metadata_capture_cuda_graph init_forward_metadata_replay_cuda_graph
        get_cuda_graph_seq_len_fill_value""",
    "metadata": """cu_seqlens_q cu_seqlens_k max_seq_len_q max_seq_len_k window_size page_table cache_seqlens_int32
        local_attn_metadata local_query_start_loc local_seqused_k local_block_table local_max_query_len
        local_max_seq_len""",
    "attributes": """forward_metadata max_context_len device decode_cuda_graph_metadata target_verify_metadata
        req_to_token page_size use_mla skip_prefill topk step_id speculative_num_steps attention_chunk_size
        strided_indices attn_backends""",
    "graph buffers": "page_table_draft_decode cache_seqlens max_seqlen_q",
    "branches": "is_decode is_target_verify is_extend_or_draft_extend use_local_attn DRAFT_EXTEND cu_seqlens_k_new",
}
SGLANG_0_5_4_XPU_BACKEND = {
    "classes": "XPUAttentionBackend",
    "methods": """__init__ init_forward_metadata forward_extend forward_decode get_cuda_graph_seq_len_fill_value
        _init_local_attn_metadata _init_sliding_window_attn_spec_metadata""",
    "functions it calls": """make_local_attention_virtual_batches merge_state_v2_wrapper merge_state_v2
        prepare_swa_spec_page_table_triton flash_attn_varlen_func flash_attn_with_kvcache""",
    "metadata": """swa_spec_metadata encoder_lens_int32 encoder_cu_seqlens_k encoder_max_seq_len_k
        encoder_page_table""",
    "attributes": """forward_metadata_spec_decode_expand kv_cache_dtype kv_cache_dtype_str is_hybrid
        full_to_swa_index_mapping speculative_num_draft_tokens speculative_step_id sliding_window_size has_swa""",
    "branches": """is_decode_or_idle is_extend_or_draft_extend_or_mixed use_cascade_attn is_swa metadata_expand causal
        k_descale v_descale sinks o_expand softmax_lse_expand""",
    "batch": """forward_mode batch_size seq_lens seq_lens_cpu req_pool_indices out_cache_loc encoder_lens
        encoder_out_cache_loc extend_seq_lens extend_seq_lens_cpu extend_prefix_lens_cpu spec_info draft_token_num
        custom_mask attn_attend_prefix_cache prefix_chunk_idx prefix_chunk_cu_seq_lens prefix_chunk_max_seq_lens
        mha_return_lse req_to_token_pool token_to_kv_pool""",
    "layer": """layer_id tp_q_head_num tp_k_head_num tp_v_head_num head_dim v_head_dim scaling logit_cap use_irope
        is_cross_attention k_scale v_scale""",
    "pools and arguments": """get_kv_buffer get_key_buffer set_kv_buffer set_mla_kv_buffer save_kv_cache q_rope k_rope
        qv""",
}


def rows() -> list[list[str]]:
    """The body rows of every table: [there, here, notebooks, state]."""
    cells = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in PAGE.splitlines() if line[:1] == "|"]
    return [row for row in cells if row[0] != "there" and not set(row[0]) <= {"-"}]


ROWS = rows()
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])


def symbols(text: str) -> list[str]:
    return re.findall(r"`(fa_(?:ref|fast)(?:\.\w+)+)`", text)


def resolve(path: str) -> Any:
    """The object of a dotted name. A dataclass field counts: those without a default are no class attributes."""
    if ".triton_ops." in path:
        pytest.importorskip("triton")
    parts = path.split(".")
    value: Any = importlib.import_module(parts[0])
    for depth, name in enumerate(parts[1:], start=2):
        if not hasattr(value, name) and hasattr(value, "__path__"):
            importlib.import_module(".".join(parts[:depth]))
        if dataclasses.is_dataclass(value) and name in {field.name for field in dataclasses.fields(value)}:
            return value
        value = getattr(value, name)
    return value


def names(groups: dict[str, str]) -> list[str]:
    return [name for group in groups.values() for name in group.split()]


@pytest.mark.parametrize(
    "groups", [SGLANG_0_4_5_FLASHATTENTION_BACKEND, SGLANG_0_5_4_XPU_BACKEND], ids=["0.4.5", "0.5.4"]
)
def test_every_name_of_both_files_is_on_the_page(groups):
    left = set(re.findall(r"\w+", " ".join(row[0] for row in ROWS)))
    assert [name for name in names(groups) if name not in left] == []


@pytest.mark.parametrize("path", sorted(set(symbols(PAGE))))
def test_every_symbol_exists(path):
    # ReqToTokenPool and the backends set some attributes when they are made, so those have no class attribute.
    made = {
        "fa_ref.ReqToTokenPool.req_to_token": lambda: fa_ref.ReqToTokenPool(size=1, context_len=1).req_to_token,
        "fa_ref.SWAKVPool.full_to_swa_index_mapping": lambda: (
            make_case(hybrid=True).config.token_to_kv_pool.full_to_swa_index_mapping
        ),
    }
    assert (made[path]() if path in made else resolve(path)) is not None


@every_row
def test_every_row_has_a_state_and_a_place(row):
    assert len(row) == 4
    assert row[3].startswith(STATES)
    assert symbols(row[1]), "the row names no symbol of fa_ref or fa_fast"


@every_row
def test_what_works_is_explained_in_a_notebook(row):
    numbers = re.findall(r"\{nb\}`(\d\d)`", row[2])
    assert numbers
    for number in numbers:
        found = list((ROOT / "notebooks").glob(f"{number}_*.ipynb"))
        assert len(found) == 1, f"{len(found)} notebooks have the number {number}"


def test_intel_gpus_are_said_to_be_tested_by_contract_alone():
    """Wherever the page names that backend, it says what was never run."""
    section = PAGE.split("## Intel GPUs")[1]
    said = "contract-tested, never run on Intel hardware"
    assert said in section
    assert [row[3] for row in ROWS if row[0] == "`XPUAttentionBackend`" and said not in row[3]] == []
    assert [row for row in ROWS if row[0] == "`XPUAttentionBackend`"]


def test_a_wrong_symbol_would_be_noticed():
    for path in (
        "fa_ref.AttentionPass.cu_seqlens_z",
        "fa_fast.planning.nothing",
        "fa_ref.planning.decode.plan_nothing",
    ):
        with pytest.raises((AttributeError, ImportError)):
            resolve(path)


def test_both_packages_are_named():
    assert {path.split(".")[0] for path in symbols(PAGE)} == {fa_ref.__name__, fa_fast.__name__}
