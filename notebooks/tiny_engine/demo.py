"""`make demo`: three prompts in one continuous batch of a real model, on fa_ref and on fa_fast.

Then the same with speculative decoding. All runs must produce the same tokens, stay within the error budget and
give every page back; otherwise the exit code is 1.
"""

import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch

import fa_fast
import fa_ref
from fa_ref.numerics import Verdict, judge
from fa_ref.oracle import masked_attention
from tiny_engine import Engine, Speculation, load

TEACHER = "You are a patient teacher. You explain one idea at a time, in two or three short sentences of plain \
words, and you end with a small example from everyday life."
CHATS = {
    "A": [("system", TEACHER), ("user", "Why is the sky blue?")],
    "B": [("system", TEACHER), ("user", "What does the cache of a computer do, and why is it small?")],
    "C": [("user", "What is the capital of France, and what is it known for?")],
}
PACKAGES, PROVIDERS = {"fa_ref": fa_ref, "fa_fast": fa_fast}, {"fa_ref": "passes", "fa_fast": None}
BACKENDS = {name: partial(PACKAGES[name].FlashAttentionBackend, provider=PROVIDERS[name]) for name in PACKAGES}
NEW_TOKENS, CHECKED_TOKENS = 48, 8
ENGINE = {"pages": 32, "page_size": 16, "token_budget": 32}
# Nobody trained these layers to end a model, so few of their guesses are right. Accepted guesses a step, measured on
# these prompts: first 2 layers 0.28 (8 branches, 1 step), 24 layers 0.47 (4 branches, 2 steps), 28 layers 1.00 (as
# below). None of them is faster than no guesses at all: a draft that guesses well is nearly the whole model here.
GUESSES = {"draft_layers": 28, "topk": 2, "num_steps": 2, "draft_tokens": 5}


class Watched:
    """A backend that adds up its time and, with `check`, keeps what the oracle says about each call."""

    def __init__(self, factory: Callable, check: bool, config):
        self.backend, self.config, self.check = factory(config), config, check
        self.seconds, self.calls = 0.0, defaultdict(list)  # layer -> (result, fp64 oracle, plain fp32)

    def init_forward_metadata(self, batch) -> None:
        start = time.perf_counter()
        self.backend.init_forward_metadata(batch)
        self.seconds += time.perf_counter() - start

    def forward(self, q, k, v, layer, batch):
        start = time.perf_counter()
        out = self.backend.forward(q, k, v, layer, batch)
        self.seconds += time.perf_counter() - start
        if self.check:
            call = [q.view(len(q), layer.tp_q_head_num, layer.head_dim), batch, layer, self.config]
            oracle, plain = (masked_attention(*call, compute_dtype=d).out for d in (torch.float64, q.dtype))
            self.calls[layer.layer_id].append((out, oracle.flatten(1), plain.flatten(1)))
        return out

    def worst(self) -> Verdict:
        """Of the layer that uses up most of its budget, over all steps."""
        verdicts = [judge(*map(torch.cat, zip(*calls, strict=True))) for calls in self.calls.values()]
        return max(verdicts, key=lambda verdict: verdict.error / verdict.budget)


class Screen:
    """Lines of text as they fill up and, on a terminal, a line of progress below them."""

    def __init__(self, name: str, tokenizer, total: int):
        self.name, self.total, self.done, self.start = name, total, 0, time.perf_counter()
        self.live = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self.clear = "\r\x1b[2K" if self.live else ""
        self.width = min(shutil.get_terminal_size().columns, 100) - 8
        self.streams, self.lines = [tokenizer.stream() for _ in CHATS], ["" for _ in CHATS]
        self.eos_id = tokenizer.eos_id

    def show(self, prompt: int, token: int) -> None:
        self.done += 1
        text = self.lines[prompt]
        if token != self.eos_id:
            text += self.streams[prompt](token).replace("\n", " ")
        if len(text) > self.width:
            cut = text.rfind(" ", 1, self.width) + 1 or self.width
            self.print_line(prompt, text[:cut])
            text = text[cut:]
        self.lines[prompt] = text
        if self.live:
            rate = self.done / (time.perf_counter() - self.start)
            status = f"  {self.name}: {self.done} of {self.total} tokens, {rate:.1f} tokens/s"
            print(self.clear + status, end="", flush=True)

    def print_line(self, prompt: int, text: str) -> None:
        print(f"{self.clear}  {list(CHATS)[prompt]} | {text.strip()}", flush=True)

    def close(self) -> None:
        for prompt, text in enumerate(self.lines):
            if text.strip():
                self.print_line(prompt, text)
        print(self.clear, end="", flush=True)


def run(name: str, model, tokenizer, prompts: list[list[int]]) -> dict:
    """Generate with one package, timed, and then a few tokens again with every attention call checked."""

    def engine(check: bool) -> Engine:
        return Engine(model, partial(Watched, BACKENDS[name], check), stop_ids=(tokenizer.eos_id,), **ENGINE)

    engine(False).generate(prompts[-1:], 2)  # warm up
    timed, checked = engine(False), engine(True)
    screen, start = Screen(name, tokenizer, len(prompts) * NEW_TOKENS), time.perf_counter()
    outputs = timed.generate(prompts, NEW_TOKENS, on_token=screen.show)
    seconds = time.perf_counter() - start
    screen.close()
    checked.generate(prompts, CHECKED_TOKENS)
    return {
        "outputs": outputs,
        "speed": sum(map(len, outputs)) / seconds,
        "attention_ms": 1e3 * timed.backend.seconds / timed.count["steps"],
        "worst": checked.backend.worst(),
        "checked": sum(map(len, checked.backend.calls.values())),
        "count": timed.count,
        "peak": timed.cache.peak,
        "freed": timed.cache.freed,
        "leaked": timed.pages_used + checked.pages_used,
    }


def speculate(name: str, model, tokenizer, prompts: list[list[int]]) -> dict:
    """Generate the same text again, with guesses."""
    how = Speculation(package=PACKAGES[name], provider=PROVIDERS[name], **GUESSES)
    engine = Engine(model, BACKENDS[name], stop_ids=(tokenizer.eos_id,), speculation=how, **ENGINE)
    start = time.perf_counter()
    outputs = engine.generate(prompts, NEW_TOKENS)
    seconds = time.perf_counter() - start
    return {
        "outputs": outputs,
        "speed": sum(map(len, outputs)) / seconds,
        "count": engine.count,
        "accepted": engine.count["accepted"] / engine.count["verify_steps"],
        "leaked": engine.pages_used,
    }


def main() -> int:
    torch.set_num_threads(1)
    sys.stdout.reconfigure(errors="replace")
    start = time.perf_counter()
    model, tokenizer = load()
    prompts = [tokenizer.encode_chat(chat) for chat in CHATS.values()]
    lengths = ", ".join(str(len(prompt)) for prompt in prompts)
    print(f"SmolLM2-135M-Instruct, fp32, one thread, loaded in {time.perf_counter() - start:.1f} s")
    print(f"Three prompts of {lengths} tokens; A and B begin with the same system prompt.")
    for key, chat in CHATS.items():
        print(f"  {key} ? {chat[-1][1]}")
    results = []
    for name in BACKENDS:
        print(f"\n{name}: one continuous batch, up to {NEW_TOKENS} new tokens for each prompt")
        results.append(run(name, model, tokenizer, prompts))
        print(f"{name}: the same again, with guesses of the first {GUESSES['draft_layers']} layers ...", flush=True)
        results[-1]["spec"] = speculate(name, model, tokenizer, prompts)
    failures = report(*results)
    print("\n" + ("\n".join(f"FAILED: {failure}" for failure in failures) or "all checks passed"))
    return 1 if failures else 0


def report(ref: dict, fast: dict) -> list[str]:
    """Print the table; return what is wrong."""
    same = ref["outputs"] == fast["outputs"]

    def row(label: str, show: Callable[[dict], object], note: str = "") -> None:
        print(f"{label:<33}{show(ref)!s:>10}{show(fast)!s:>10}   {note}".rstrip())

    print()
    row("", lambda r: "fa_ref" if r is ref else "fa_fast")
    row("tokens/s", lambda r: f"{r['speed']:.1f}", f"ratio {fast['speed'] / ref['speed']:.2f}")
    row("attention, ms a step", lambda r: f"{r['attention_ms']:.1f}", "30 layers and planning")
    row("new tokens", lambda r: sum(map(len, r["outputs"])), f"identical: {'yes' if same else 'NO'}")
    row(
        "attention error, worst layer",
        lambda r: f"{r['worst'].error:.1e}",
        f"{ref['checked']} calls, fp64 oracle",
    )
    row("its budget", lambda r: f"{r['worst'].budget:.1e}", "2 x plain fp32 + rounding")
    row("prompt tokens from shared pages", lambda r: r["count"]["shared"])
    for mode in ("EXTEND", "MIXED", "DECODE"):
        row(f"{mode} steps", lambda r, mode=mode: r["count"][mode])
    row("pages at peak", lambda r: r["peak"], f"of {ENGINE['pages']}")
    row("pages freed", lambda r: r["freed"])
    row("pages still used", lambda r: r["leaked"])
    failures = [] if same else ["the two packages generated different tokens"]
    failures += report_speculation(row, ref, fast)
    for name, result in zip(BACKENDS, (ref, fast), strict=True):
        if not result["worst"].ok:
            failures.append(f"{name}: attention error {result['worst'].error:.2e} exceeds its budget")
        if result["leaked"]:
            failures.append(f"{name}: {result['leaked']} pages were not given back")
        if not result["count"]["shared"]:
            failures.append(f"{name}: no page was shared, although two prompts begin alike")
    return failures


def report_speculation(row: Callable, ref: dict, fast: dict) -> list[str]:
    """The part of the table about speculative decoding; returns what is wrong."""
    how = "{draft_layers} of 30 layers guess, {topk} branches, {num_steps} steps deep".format(**GUESSES)
    print(f"\nspeculative decoding: {how}, {GUESSES['draft_tokens']} tokens verified at once")
    print("(not faster here: this model has no small draft, so most of the model itself does the guessing)")
    ratios = " and ".join(f"{r['spec']['speed'] / r['speed']:.2f}" for r in (ref, fast))
    row("tokens/s", lambda r: f"{r['spec']['speed']:.1f}", f"{ratios} of the speed without guesses")
    row("accepted guesses a step", lambda r: f"{r['spec']['accepted']:.2f}", "and one token of the model itself")
    row("engine steps", lambda r: r["spec"]["count"]["steps"], f"{fast['count']['steps']} without guesses")
    row("same text as without", lambda r: "yes" if r["spec"]["outputs"] == r["outputs"] else "NO")
    row("pages still used", lambda r: r["spec"]["leaked"])
    failures = []
    for name, result in zip(BACKENDS, (ref, fast), strict=True):
        if result["spec"]["outputs"] != result["outputs"]:
            failures.append(f"{name}: speculation changed the text")
        if result["spec"]["leaked"]:
            failures.append(f"{name}: speculation kept {result['spec']['leaked']} pages")
    return failures


if __name__ == "__main__":
    raise SystemExit(main())
