"""What every notebook needs: quiet, deterministic torch, the running example, and the three-way comparison."""

from __future__ import annotations

import warnings

import torch

import fa_fast
import fa_ref
from fa_ref.cases import Case, make_case

NAMES = ("A", "B", "C")  # the running example: three requests, page size 4, two heads


def setup() -> None:
    """One thread and no warnings, so that every run prints the same."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)


def example(mode: fa_ref.ForwardMode = fa_ref.ForwardMode.EXTEND, **changes) -> Case:
    """The running example: A has 3 tokens cached and 5 new, B 0 and 4, C 6 and 1."""
    return make_case(mode, **changes)


def compare(case: Case) -> None:
    """Run a case three ways and print how each stands to the definition.

    The budget is derived, not chosen: twice the error of plain torch in the inputs' dtype, plus a rounding floor.
    """
    dtype = str(case.q.dtype).removeprefix("torch.")
    print(f"masks          the definition, fp32, output {tuple(case.run(fa_ref, 'masks').shape)}")
    for name, package, provider in (("passes", fa_ref, "passes"), ("fa_fast", fa_fast, None)):
        verdict = case.judge(case.run(package, provider))
        print(f"{name:<14} {'within' if verdict.ok else 'OVER'} the budget of a plain {dtype} run")
        assert verdict.ok, f"{name}: error {verdict.error:.2e} over budget {verdict.budget:.2e}"
    if torch.cuda.is_available():
        sizes = dict(latent=512, rope=64) if case.config.use_mla else dict(head_dim=64, v_head_dim=64)
        on_gpu = case.like(device="cuda", dtype=torch.bfloat16, **sizes)  # the least FA3 takes
        if on_gpu.recipe["kv_dtype"] in (None, torch.bfloat16):
            verdict = on_gpu.judge(on_gpu.run(fa_fast))
            assert verdict.ok, f"CUDA: error {verdict.error:.2e} over budget {verdict.budget:.2e}"
            print("fa_fast, CUDA  within the budget of a plain bfloat16 run")
