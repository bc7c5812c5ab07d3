"""The contract both packages share: batches, layers, configs, pools, plans and errors. Torch only."""

from fa_ref.api.batch import DraftInput, ForwardBatch, VerifyInput
from fa_ref.api.config import BackendConfig
from fa_ref.api.errors import (
    BadBatch,
    BadConfig,
    BadPageTable,
    FaError,
    ProviderNotInstalled,
    UnsupportedByProvider,
)
from fa_ref.api.layer import AttentionLayer, layer_kind, window_left, window_of_tokens
from fa_ref.api.mla import MLAProjections, PrefixChunks, chunk_prefix
from fa_ref.api.modes import ForwardMode, LayerKind
from fa_ref.api.plan import AttentionPass, AttentionPlan, GivenKeys, TreePass
from fa_ref.api.pools import MHAKVPool, MLAKVPool, ReqToTokenPool, SWAKVPool
from fa_ref.api.speculative import Accepted, DraftBeams, DraftTree

__all__ = [
    "Accepted",
    "AttentionLayer",
    "AttentionPass",
    "AttentionPlan",
    "BackendConfig",
    "BadBatch",
    "BadConfig",
    "BadPageTable",
    "DraftBeams",
    "DraftInput",
    "DraftTree",
    "FaError",
    "ForwardBatch",
    "ForwardMode",
    "GivenKeys",
    "LayerKind",
    "MHAKVPool",
    "MLAKVPool",
    "MLAProjections",
    "PrefixChunks",
    "ProviderNotInstalled",
    "ReqToTokenPool",
    "SWAKVPool",
    "TreePass",
    "UnsupportedByProvider",
    "VerifyInput",
    "chunk_prefix",
    "layer_kind",
    "window_left",
    "window_of_tokens",
]
