"""The support table of README.md, from the code: what runs on which kernels, and how that is known.

    python tools/support_table.py           print it
    python tools/support_table.py --write   put it between its markers in README.md

A cell is never typed in. "CPU": this program runs the case on torch_cpu and judges it against the oracle. "H200": the
provider's Capability allows the case and tests/test_gpu.py runs it. "contract": the Capability allows it, and no test
runs it on that device. "emulated": the same on an Intel GPU, where no test was ever run; a test runs every such cell on
emulated kernels. "refused": the Capability says no. "not yet": planning says no.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fa_fast  # noqa: E402
from fa_fast.kernels.select import PROVIDERS  # noqa: E402
from fa_ref.api import ForwardMode, LayerKind, UnsupportedByProvider, layer_kind  # noqa: E402
from fa_ref.api.support import layer_kinds  # noqa: E402
from fa_ref.cases import Case, make_case  # noqa: E402

BEGIN, END = "<!-- support:begin -->", "<!-- support:end -->"
DEVICES = {"cuda": "NVIDIA (`sgl_cuda`)", "cpu": "CPU (`torch_cpu`)", "xpu": "Intel GPU (`sgl_xpu`)"}
SECOND = {"vllm_xpu": "Intel GPU (`vllm_xpu`)"}  # a provider that is not its device's default, in the table of features
KINDS = (LayerKind.FULL, LayerKind.SLIDING, LayerKind.LOCAL)
FP8 = torch.float8_e4m3fn

NOT_YET, REFUSED, CONTRACT, EMULATED, CPU, H200 = "not yet", "refused", "contract", "emulated", "CPU", "H200"

LEGEND = {
    H200: "run on that GPU by `pytest -m gpu`",
    CPU: "run on the CPU provider when this table is made",
    CONTRACT: "allowed by the provider's capability record and tested against it, never run on the device",
    EMULATED: "contract-tested, never run on Intel hardware; tests compute it on emulated kernels with the signatures, "
    "semantics and limits of the real ones, of their newest generation: the one before has no softcap and no LSE, so "
    "no trees, branches or shared prefixes",
    REFUSED: "raises `UnsupportedByProvider`, which says what would run",
    NOT_YET: "raises `UnsupportedByProvider`: there is no plan for it",
}

# Every forward mode, with the arguments of make_case that set it up; one with drafts has a row for each form of them.
MODES: list[tuple[str, ForwardMode, dict[str, Any]]] = [
    ("`EXTEND`", ForwardMode.EXTEND, {}),
    ("`SPLIT_PREFILL`", ForwardMode.SPLIT_PREFILL, {}),
    ("`MIXED`", ForwardMode.MIXED, {}),
    ("`DECODE`", ForwardMode.DECODE, {}),
    ("`IDLE`", ForwardMode.IDLE, {}),
    ("`DECODE` of drafts, topk 1", ForwardMode.DECODE, dict(topk=1, step=2)),
    ("`DECODE` of drafts, topk > 1", ForwardMode.DECODE, dict(topk=4, step=2)),
    ("`TARGET_VERIFY`, chain", ForwardMode.TARGET_VERIFY, dict(draft_token_num=4)),
    ("`TARGET_VERIFY`, tree", ForwardMode.TARGET_VERIFY, dict(trees=[[-1, 0, 0, 1]] * 3)),
    (
        "`TARGET_VERIFY`, tree as a page table",
        ForwardMode.TARGET_VERIFY,
        dict(trees=[[-1, 0, 0, 1]] * 3, tree_attention="expand"),
    ),
    ("`DRAFT_EXTEND`", ForwardMode.DRAFT_EXTEND, {}),
]


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A row: the cases that show it, and the keyword arguments that GPU tests show it with."""

    name: str
    cases: tuple[dict[str, Any], ...]  # arguments of make_case
    on_gpu: tuple[tuple[str, str], ...]  # (argument, its source text) in tests/test_gpu.py
    kinds: tuple[LayerKind, ...] = KINDS


def _feature(name: str, *on_gpu: tuple[str, str], kinds: tuple[LayerKind, ...] = KINDS, **arguments: Any) -> Feature:
    return Feature(name=name, cases=(arguments,), on_gpu=on_gpu, kinds=kinds)


def _features() -> list[Feature]:
    """The rows of the second table. Sizes come from the lists that the GPU tests are parametrised with."""
    pages, dims = gpu_tests().page_sizes, gpu_tests().head_dims
    equal, unequal = ([pair for pair in dims if (pair[0] == pair[1]) is same] for same in (True, False))
    by_list = (("head_dim", "dims[0]"), ("v_head_dim", "dims[1]"))
    return [
        Feature(
            name=f"page sizes {', '.join(map(str, pages))}",
            cases=tuple(dict(page_size=size, chunk=size * 2) for size in pages),
            on_gpu=(("page_size", "page_size"),),
        ),
        _feature("other page sizes, as 7", ("page_size", "7"), page_size=7, chunk=14),
        Feature(
            name=f"head dims {', '.join(str(k) for k, _ in equal)}",
            cases=tuple(dict(head_dim=k, v_head_dim=v) for k, v in equal),
            on_gpu=by_list,
        ),
        Feature(
            name=f"head dims qk/v {', '.join(f'{k}/{v}' for k, v in unequal)}",
            cases=tuple(dict(head_dim=k, v_head_dim=v) for k, v in unequal),
            on_gpu=by_list,
        ),
        _feature("other head dims, as 80", ("head_dim", "80"), head_dim=80),
        _feature("bf16", ("dtype", "torch.bfloat16"), dtype=torch.bfloat16),
        _feature("fp16", ("dtype", "torch.float16"), dtype=torch.float16),
        _feature("fp32", ("dtype", "torch.float32"), dtype=torch.float32),
        _feature(
            "fp8 (e4m3) cache with scales",
            ("kv_dtype", "FP8"),
            ("k_scale", "0.5"),
            dtype=torch.bfloat16,
            kv_dtype=FP8,
            k_scale=0.5,
            v_scale=0.25,
        ),
        _feature("grouped heads, 24:2", ("heads", "24"), ("kv_heads", "2"), heads=24, kv_heads=2),
        _feature("softcap", ("softcap", "5.0"), softcap=5.0),
        _feature("sinks, head dim 64", ("sinks", "True"), ("head_dim", "64"), sinks=True),
        _feature("sinks, other head dims, as 128", ("sinks", "True"), ("head_dim", "128"), sinks=True, head_dim=128),
        _feature(
            "MLA, absorbed: latent 512, rope 64; FULL and LOCAL layers",
            *(absorbed := (("latent", "512"), ("rope", "64"))),
            kinds=(LayerKind.FULL, LayerKind.LOCAL),
            latent=512,
            rope=64,
        ),
        _feature("the same, SLIDING layers", *absorbed, kinds=(LayerKind.SLIDING,), latent=512, rope=64),
        _feature("other MLA sizes, as latent 128", ("latent", "128"), latent=128),
        _feature("window layers in a pool of their own", ("hybrid", "True"), hybrid=True),
        _feature("no host copies of the lengths", ("host_lengths", "False"), host_lengths=False),
        _feature("deterministic mode", ("deterministic", "True"), deterministic=True),
        _feature(
            "a shared prefix read once (`cascade_prefix`)",
            ("shared_prefix", "2048"),
            prefix_lens=(9, 8, 12),
            shared_prefix=8,
        ),
    ]


# ---- what the GPU tests run, read from their source ------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GpuTests:
    page_sizes: list[int]
    head_dims: list[tuple[int, int]]
    kinds: set[str]
    modes: set[str]  # without drafts
    topks: set[int]  # of draft decoding
    drafts: set[tuple[str, str]]  # arguments of cases with drafts
    arguments: set[tuple[str, str]]  # of all cases


@cache
def gpu_tests() -> GpuTests:
    tree = ast.parse((ROOT / "tests" / "test_gpu.py").read_text(encoding="utf-8"))
    constants = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    tests = [node for name, node in functions.items() if name.startswith("test_every")]
    drafting = functions["speculative_cases"]
    encoder = functions["test_every_mode_of_an_encoder_decoder"]  # all of the modes
    assert any("speculative_cases(" in ast.unparse(test) for test in tests)
    (steps,) = (node.iter for node in ast.walk(drafting) if isinstance(node, ast.For))
    return GpuTests(
        page_sizes=ast.literal_eval(constants["PAGE_SIZES"]),
        head_dims=ast.literal_eval(constants["HEAD_DIMS"]),
        kinds=set().union(*(_members(node, "LayerKind") for node in (constants["KINDS"], *encoder.decorator_list))),
        modes=set().union(*(_members(test, "ForwardMode") for test in tests)),
        topks={topk for topk, _ in ast.literal_eval(steps)},
        drafts=_keywords(drafting),
        arguments=_keywords(tree),
    )


def _keywords(node: ast.AST) -> set[tuple[str, str]]:
    calls = [child for child in ast.walk(node) if isinstance(child, ast.Call)]
    return {(k.arg, ast.unparse(k.value)) for call in calls for k in call.keywords if k.arg is not None}


def _members(node: ast.AST, enum: str) -> set[str]:
    return {
        child.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name) and child.value.id == enum
    }


# ---- one cell --------------------------------------------------------------------------------------------


def state(device: str, case: Case, runs_on_gpu: bool) -> str:
    """How it stands with a planned case on a device, or with a provider that is not its device's default."""
    served = (provider for provider, kind in PROVIDERS.items() if kind == device)
    name = device if device in SECOND else next(served, None)
    if name is None:
        return NOT_YET
    device = PROVIDERS[name]
    try:
        _require(import_module(f"fa_fast.kernels.{name}").CAPABILITY, case)
    except UnsupportedByProvider:
        return REFUSED
    if device == "cpu":
        result = case.run(fa_fast)
        verdict = case.judge(result) if result.numel() else None
        if verdict is not None and not verdict.ok:
            raise AssertionError(f"torch_cpu is wrong on {case.batch.forward_mode.name} {case.layer}: {verdict}")
        return CPU
    if device == "xpu":
        return EMULATED
    return H200 if runs_on_gpu else CONTRACT


def _require(capability: Any, case: Case) -> None:
    """The questions that a backend asks of a layer and of its passes."""
    kind, layer = layer_kind(case.layer, case.config.attention_chunk_size), case.layer
    passes = fa_fast.plan_batch(case.batch, case.config, case.step).for_kind(kind)
    capability.require_passes(
        merges=len(passes) > 1 and passes[0].token_index is None,
        one_query=any(getattr(one, "max_seqlen_q", 0) == 1 for one in passes),
        group=layer.tp_q_head_num // layer.tp_k_head_num,
        sinks=case.sinks is not None,
        qv=case.config.use_mla,
    )
    capability.require(
        dtype=case.q.dtype,
        kv_dtype=case.config.kv_cache_dtype,
        head_dim=case.layer.head_dim - (case.layer.v_head_dim if case.config.use_mla else 0),
        v_head_dim=case.layer.v_head_dim,
        qv=case.config.use_mla,
        page_size=case.config.page_size,
        softcap=case.layer.logit_cap != 0,
        sinks=case.sinks is not None,
        window=kind is LayerKind.SLIDING,
    )


def mode_cell(mode: ForwardMode, arguments: dict[str, Any], kind: LayerKind) -> str:
    """All that a mode and a layer kind were run on, or that there is no plan for them."""
    encoder = dict(encoder_lens=(3, 0, 7)) if kind is LayerKind.CROSS else {}
    case = make_case(mode, kind=kind, head_dim=64, dtype=torch.bfloat16, **arguments, **encoder)
    if mode.is_idle():
        case = _without_tokens(case)
    if kind not in layer_kinds(case.config)[0]:
        return NOT_YET
    on_gpu = _mode_ran_on_gpu(mode, arguments) and kind.name in gpu_tests().kinds
    states = [state(device, case, on_gpu) for device in DEVICES]
    return " + ".join(s for s in states if s not in (NOT_YET, REFUSED))


def _mode_ran_on_gpu(mode: ForwardMode, arguments: dict[str, Any]) -> bool:
    tests = gpu_tests()
    if "topk" in arguments:
        return arguments["topk"] in tests.topks
    if "tree_attention" in arguments:
        return ("tree_attention", repr(arguments["tree_attention"])) in tests.drafts
    if arguments:
        return set(arguments) <= {name for name, _ in tests.drafts}
    return mode.name in tests.modes


def _without_tokens(case: Case) -> Case:
    empty = {name: getattr(case, name)[:0] for name in ("q", "k", "v")}
    return replace(case, **empty, batch=replace(case.batch, out_cache_loc=None))


def feature_cell(feature: Feature, device: str) -> str:
    """The state of a feature on a device: of all its cases, in prefill and decode, on every planned layer kind."""
    on_gpu = set(feature.on_gpu) <= gpu_tests().arguments
    states = set()
    for arguments in feature.cases:
        defaults = dict(dtype=torch.bfloat16, head_dim=64)
        for mode in (ForwardMode.EXTEND, ForwardMode.DECODE):
            for kind in feature.kinds:
                states.add(state(device, make_case(mode, kind=kind, **(defaults | arguments)), on_gpu))
    if len(states) != 1:
        raise AssertionError(f"{feature.name} on {device} is {sorted(states)}; give its cases rows of their own")
    return states.pop()


# ---- the whole -------------------------------------------------------------------------------------------


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *map(list, rows)])


def support() -> str:
    """Both tables with the words that explain their cells, as Markdown."""
    kinds, columns = list(LayerKind), DEVICES | SECOND
    modes = [[name, *(mode_cell(mode, spec, kind) for kind in kinds)] for name, mode, spec in MODES]
    features = [[f.name, *(feature_cell(f, device) for device in columns)] for f in _features()]
    met = {word for row in modes + features for cell in row[1:] for word in cell.split(" + ")}
    return "\n\n".join(
        [
            "Forward modes and layer kinds of `fa_fast`. `fa_ref` runs every one of them that is planned.",
            _table(["mode", *(f"{kind.name} layers" for kind in kinds)], modes),
            "Features, on prefill and decode of FULL, SLIDING and LOCAL layers:",
            _table(["", *columns.values()], features),
            _pages_of_intel(),
            " ".join(f"*{word}*: {meaning}." for word, meaning in LEGEND.items() if word in met),
        ]
    )


def _pages_of_intel() -> str:
    """Which pages the providers of Intel GPUs read where they are; the others work, at a price."""
    read = {name: _in_place(name) for name, kind in PROVIDERS.items() if kind == "xpu"}
    default, *others = read
    also = "".join(f'; `{name}` (`provider="{name}"`) also {_listed(read[name] - read[default])}' for name in others)
    return (
        f"Page sizes on an Intel GPU, MLA aside: `{default}` reads pages of {_listed(read[default])} where they are"
        f"{also}. With pages of other sizes the keys are copied in every layer, in every step: take `page_size=64`."
    )


def _in_place(name: str) -> set[int]:
    """Of the page sizes in use, those that decode and prefill read without a copy."""
    reads = import_module(f"fa_fast.kernels.{name}").reads_in_place
    return {size for size in (1, 3, 5, 16, 32, 64, 128) if reads(size, 1) and reads(size, 2)}


def _listed(sizes: set[int]) -> str:
    return " and ".join(map(str, sorted(sizes)))


def with_support(text: str) -> str:
    """A document with the table between its markers renewed."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"the document must hold {BEGIN} and {END} once each")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{support()}\n{END}{rest.split(END)[1]}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--write", action="store_true", help="renew README.md")
    torch.set_num_threads(1)
    if not parser.parse_args(argv).write:
        print(support())
        return 0
    readme = ROOT / "README.md"
    readme.write_text(with_support(readme.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
