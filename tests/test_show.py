"""Pictures: the ASCII twin says exactly what is drawn, and the SVG is small, well formed and never varies."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from fa_ref import plan_batch, show
from fa_ref.api import AttentionPass, BadBatch, BadConfig, ForwardMode, LayerKind, TreePass
from fa_ref.cases import make_case
from fa_ref.masks import Mask, causal, prefix, sliding_window
from fa_ref.masks import tree as tree_mask
from fa_ref.planning.local import make_local_attention_virtual_batches
from fa_ref.show.cells import runs
from fa_ref.show.requests import COLOURS, WRONG
from fa_ref.show.tree import ancestors

SVG = "{http://www.w3.org/2000/svg}"
ROOT = Path(__file__).parent.parent
PARENTS = [-1, 0, 0, 1, 1, 2, 4]
CHAIN = torch.tensor([[j in ancestors(PARENTS, i) for j in range(7)] for i in range(7)])
TABLE = torch.arange(30).reshape(3, 10)


def planned(case):
    return plan_batch(case.batch, case.config)


def branches() -> AttentionPass:
    """Two requests of two branches each, which share their request's row of the table."""
    return AttentionPass(
        page_table=torch.tensor([[3, 1, 4], [2, 0, 0]], dtype=torch.int32),
        row_index=torch.tensor([0, 0, 1, 1], dtype=torch.int32),
        cache_seqlens=torch.tensor([9, 9, 2, 2], dtype=torch.int32),
        cu_seqlens_q=torch.arange(5, dtype=torch.int32),
        max_seqlen_q=1,
        max_seqlen_k=9,
        causal=False,
        page_size=4,
        takes_sinks=False,
    )


def drafts() -> TreePass:
    return TreePass(
        slots=torch.tensor([[20, 21, 22], [12, 13, 14]], dtype=torch.int32),
        mask=CHAIN[None, :3, :3].expand(2, 3, 3),
    )


def local_case():
    return make_case(prefix_lens=(3, 0, 6), new_lens=(5, 9, 1), kind=LayerKind.LOCAL, chunk=4)


GALLERY = {
    "causal": lambda: show.mask_grid(causal, q_pos=5, k_pos=8, page_size=4),
    "sixteen": lambda: show.mask_grid(causal & sliding_window(5), q_pos=16, k_pos=16, page_size=4),
    "verify": lambda: show.mask_grid(
        prefix(5) | tree_mask(CHAIN, 5),
        q_pos=7,
        k_pos=12,
        page_size=4,
        bands={"prefix": (0, 5), "draft <tree>": (5, 12)},
        title="drafts & prefix",
    ),
    "highlight": lambda: show.mask_grid(CHAIN, highlight=~CHAIN),
    "diff": lambda: show.mask_diff(causal & sliding_window(3), causal & sliding_window(4), q_pos=6, k_pos=12),
    "three masks": lambda: show.mask_row(causal, sliding_window(3), CHAIN.repeat(2, 2)[:8, :8], q_pos=8, k_pos=8),
    "pool": lambda: show.pool_strip(make_case()),
    "pool of single slots": lambda: show.pool_strip({"A": [8, 9, 4]}, page_size=1, slots=24),
    "page table": lambda: show.page_table([[3, 1, 7], [2, 0, 0]], lens=[9, 2], page_size=4, title="a table"),
    "page table of a pass": lambda: show.page_table(branches()),
    "ragged": lambda: show.ragged([0, 5, 5, 14, 15], first=[3, 0, 0, 6]),
    "ragged with cuts": lambda: show.ragged([0, 3, 3, 9], cuts=[3, 8]),
    "virtual batches": lambda: show.virtual_batches(4, [0, 4, 14, 19], [6, 17, 9], TABLE, page_size=2),
    "extend": lambda: show.plan(planned(make_case())),
    "local": lambda: show.plan(planned(local_case()), batch=local_case()),
    "deterministic": lambda: show.plan(planned(make_case(deterministic=True))),
    "branches": lambda: show.plan(branches()),
    "tree pass": lambda: show.plan(drafts()),
    "tree": lambda: show.tree(PARENTS, ["the", "cat", "dog", "sat", "ran", "barked", "<off>"]),
    "bars": lambda: show.bars(["plain", "cascade"], [48, 16.25], "MB", title="read"),
    "chain": lambda: show.chain([("q", 1, 12), ("w<uk>", 12, 16), ("latent", 16, 9)], first=1, title="keys first"),
    "roofline": lambda: show.roofline(
        {"decode": (4, 16), "tree <T>": (60, 200), "window": (8, 2), "prefill": (5000, 650)},
        tera_bytes=4.4,
        tera_flops=770,
        title="an H200",
    ),
    "ladder": lambda: show.ladder({"naive": 3000, "paged & split": 1400.4, "graph": 450}, 122, title="a step"),
    "timeline": lambda: show.timeline({"host": "ppaa", "gpu": "...p.a"}, {"p": "plan", "a": "<a>"}, title="eager"),
}


@pytest.fixture(params=GALLERY, ids=lambda name: name.replace(" ", "-"))
def picture(request):
    return GALLERY[request.param]()


def test_every_svg_is_well_formed_small_and_has_a_title(picture):
    svg = picture._repr_svg_()
    root = ET.fromstring(svg)
    assert len(svg.encode()) <= 5 * 1024
    assert root.tag == f"{SVG}svg"
    assert root[0].tag == f"{SVG}title"
    assert root[0].text


def test_every_picture_is_the_same_when_drawn_again(picture, request):
    again = GALLERY[request.node.callspec.params["picture"]]()
    assert (again._repr_svg_(), repr(again)) == (picture._repr_svg_(), repr(picture))


def test_text_follows_the_page_and_nothing_paints_the_background(picture):
    root = ET.fromstring(picture._repr_svg_())
    assert root.get("fill") == "currentColor"
    parents = {child: parent for parent in root.iter() for child in parent}
    for text in root.iter(f"{SVG}text"):
        node = text
        while node is not root:
            assert node.get("fill") is None
            assert node.get("style") is None
            node = parents[node]
    assert not list(root.iter(f"{SVG}rect"))


def test_colours_are_the_palette_and_the_standalone_rule_touches_no_page(picture):
    svg = picture._repr_svg_()
    style = re.search(r"<style>(.*?)</style>", svg).group(1)
    assert style.startswith("svg:root{")  # an svg element inside an HTML page is never :root
    literals = set(re.findall(r"#[0-9A-Fa-f]{3,6}\b", svg.replace(style, "")))
    assert literals <= {*COLOURS, WRONG}


def test_all_text_lies_inside_the_picture(picture):
    """Right edges estimated at 0.6 em a character, the advance of common monospace fonts."""
    root = ET.fromstring(picture._repr_svg_())
    left, top, width, height = (float(v) for v in root.get("viewBox").split())

    def walk(node, x, y, font, anchor):
        moved = re.match(r"translate\((\S+) (\S+)\)", node.get("transform", ""))
        if moved:
            x, y = x + float(moved.group(1)), y + float(moved.group(2))
        font, anchor = float(node.get("font-size", font)), node.get("text-anchor", anchor)
        if node.tag == f"{SVG}text":
            long = len(node.text or "") * font * 0.6
            start = x + float(node.get("x", 0)) - {"start": 0, "middle": long / 2, "end": long}[anchor]
            assert left <= start, node.text
            assert start + long <= left + width, node.text
            assert top <= y + float(node.get("y", 0)) <= top + height, node.text
        for child in node:
            walk(child, x, y, font, anchor)

    walk(root, 0.0, 0.0, 11.0, "start")


def cells_drawn(picture, paint: str) -> int:
    """Cells in the dashed strokes of one paint: a run of n cells of 16 with gaps of 2 is 18 n - 2 long."""
    paths = [p for p in ET.fromstring(picture._repr_svg_()).iter(f"{SVG}path") if p.get("stroke") == paint]
    lengths = [int(n) for p in paths if p.get("stroke-dasharray") == "16 2" for n in re.findall(r"h(\d+)", p.get("d"))]
    assert all(n % 18 == 16 for n in lengths)
    return sum((n + 2) // 18 for n in lengths)


@pytest.mark.parametrize("seed", range(5))
def test_the_svg_draws_as_many_cells_as_the_mask_has(seed):
    mask = torch.rand(7, 13, generator=torch.Generator().manual_seed(seed)) < 0.5
    picture = show.mask_grid(mask)
    assert cells_drawn(picture, COLOURS[0]) == int(mask.sum()) == repr(picture).count("#")
    assert cells_drawn(picture, "currentColor") == int((~mask).sum()) == repr(picture).count(".")


def test_runs_put_together_are_the_row_again():
    row = "##.x.#"
    drawn = ["-"] * len(row)
    for wanted in "#.x":
        for _, column, length in runs([row], wanted):
            drawn[column : column + length] = wanted * length
    assert "".join(drawn) == row


def tinted(picture) -> list[tuple[int, int]]:
    """Corners of the cells in a request's colour."""
    paths = [p for p in ET.fromstring(picture._repr_svg_()).iter(f"{SVG}path") if p.get("fill-opacity") == ".4"]
    return [tuple(map(int, corner)) for p in paths for corner in re.findall(r"M(\d+) (\d+)", p.get("d"))]


def test_the_svg_of_a_page_table_colours_what_is_read_and_nothing_else():
    picture = show.page_table([[12, 5, 7], [2, 0, 0], [1, 0, 0]], lens=[9, 4, 0], page_size=4)
    left = min(x for x, _ in tinted(picture))
    assert tinted(picture) == [(left, 0), (left + 28, 0), (left + 56, 0), (left, 26)]
    faint = [g for g in ET.fromstring(picture._repr_svg_()).iter(f"{SVG}g") if g.get("opacity") == ".4"]
    assert [text.text for g in faint for text in g] == ["0", "0", "1", "0", "0"]
    outlines = [p for p in ET.fromstring(picture._repr_svg_()).iter(f"{SVG}path") if p.get("fill") == "none"]
    assert sorted(p.get("d").count("M") for p in outlines) == [4, 5]


def test_the_svg_of_a_pool_colours_every_owned_slot_once():
    case = make_case(prefix_lens=(3, 0, 6), new_lens=(5, 4, 1))
    corners = tinted(show.pool_strip(case))
    assert len(corners) == len(set(corners)) == 8 + 4 + 7


def test_the_arrows_of_a_plan_end_at_the_row_that_is_read():
    svg = show.plan(branches())._repr_svg_()
    ends = [float(y) for y in re.findall(r"C[^m]* (\S+)m-5-3", svg)]
    names = [float(y) - 14 + 10 for y in re.findall(r'y="([\d.]+)">[AB]<', svg)]
    assert ends == [names[0], names[0], names[1], names[1]]


def lines(picture) -> list[str]:
    return repr(picture).split("\n")


def test_a_mask_grid_names_positions_and_page_borders():
    assert lines(show.mask_grid(causal & sliding_window(3), q_pos=3, k_pos=10, page_size=4, title="window")) == [
        "window",
        "   k0 1 2 3 | 4 5 6 7 | 8 9",
        "q7  . . . . | # # # # | . .",
        "q8  . . . . | . # # # | # .",
        "q9  . . . . | . . # # | # #",
    ]


def test_a_mask_grid_with_positions_of_its_own_aligns_two_digit_keys():
    assert lines(show.mask_grid(causal, q_pos=[9, 10], k_pos=range(8, 12), bands={"draft": (10, 12)})) == [
        "causal",
        "     k8  9 10 11",
        "q9    #  #  .  .",
        "q10   #  #  #  .",
        "            ~  ~  draft",
    ]


def test_a_dense_mask_is_bottom_right_aligned_unless_positions_say_otherwise():
    dense = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    assert lines(show.mask_grid(dense))[1:] == ["q1  # # .", "q2  # # #"]
    assert lines(show.mask_grid(dense, q_pos=range(2)))[1:] == ["q0  # # .", "q1  # # #"]


def test_highlighted_cells_are_marked_visible_or_hidden():
    dense = torch.tensor([[1, 0]], dtype=torch.bool)
    assert lines(show.mask_grid(dense, highlight=torch.ones(1, 2, dtype=torch.bool)))[1] == "q1  X x"


def test_mask_diff_tells_too_much_from_too_little():
    top_left = Mask(lambda q_pos, k_pos: k_pos <= q_pos - 2, "top-left")
    assert lines(show.mask_diff(causal, top_left | Mask(lambda q, k: k == q + 1, "next"), q_pos=2, k_pos=4)) == [
        "   k0 1 2 3",
        "q2  # - - +",
        "q3  # # - -",
        "+ sees a key it must not: 1 cell",
        "- misses a key it should see: 4 cells",
    ]
    assert lines(show.mask_diff(causal, causal, q_pos=1, k_pos=2)) == ["   k0 1", "q1  # #", "no difference"]


def test_mask_row_sets_masks_side_by_side():
    assert lines(show.mask_row(causal, ~causal, titles=["a", "b"], q_pos=2, k_pos=2, title="both")) == [
        "both",
        "a          b",
        "   k0 1       k0 1",
        "q0  # .    q0  . #",
        "q1  # #    q1  . .",
    ]


def test_a_pool_strip_shows_owner_position_padding_and_new_slots():
    strip = show.pool_strip({"A": [8, 9, 10, 11, 4], "B": [12]}, page_size=4, slots=20, new=[4, 12])
    assert lines(strip) == [
        "page 0           page 1           page 2           page 3           page 4",
        "///|///|///|///  A4*| . | . | .   A0 |A1 |A2 |A3   B0*| . | . | .    . | . | . | .",
    ]


def test_a_pool_strip_of_a_case_holds_every_token_once():
    case = make_case(prefix_lens=(3, 0, 6), new_lens=(5, 4, 1))
    found = re.findall(r"([ABC])(\d+)(\*?)", repr(show.pool_strip(case)))
    expected = [(name, str(i)) for name, length in (("A", 8), ("B", 4), ("C", 7)) for i in range(length)]
    assert sorted((name, at) for name, at, _ in found) == sorted(expected)
    assert sum(new == "*" for *_, new in found) == 10


def test_a_shared_slot_names_every_owner():
    strip = show.pool_strip({"A": [4, 5, 6], "B": [4, 5, 8]}, page_size=4)
    assert lines(strip)[1] == "////|////|////|////  AB0 |AB1 |A2  | .    B2  | .  | .  | ."
    assert len(tinted(strip)) == 2 + 2 + 1 + 1


def test_a_page_table_brackets_what_is_read():
    assert lines(show.page_table([[12, 5, 7], [2, 0, 0], [1, 0, 0]], lens=[9, 4, 0], page_size=4)) == [
        "A [12]  [5]  [7]  9 keys",
        "B  [2]   0    0   4 keys",
        "C   1    0    0   0 keys",
    ]


def test_a_page_table_of_a_pass_agrees_with_its_pages():
    step = planned(make_case()).passes[LayerKind.FULL][0]
    for sequence, line in enumerate(lines(show.page_table(step))):
        assert [int(page) for page in re.findall(r"\[(\d+)\]", line)] == step.pages(sequence)


def test_ragged_shows_boundaries_and_empty_requests():
    assert lines(show.ragged(torch.tensor([0, 2, 2, 3]), first=[4, 0, 8])) == [
        "A4 A5 | B empty | C8",
        "cu_seqlens 0 2 2 3",
    ]


def test_ragged_marks_cuts_inside_requests_and_between_them():
    picture = show.ragged([0, 3, 3, 9], cuts=[0, 3, 8])
    assert lines(picture)[0] == "/ A0 A1 A2 | B empty | / C0 C1 C2 C3 C4 / C5"
    bars = [p for p in ET.fromstring(picture._repr_svg_()).iter(f"{SVG}path") if p.get("stroke-width") == "3"]
    cells = [x for x, _ in tinted(picture)]
    assert [int(x) + 1 for p in bars for x in re.findall(r"M(\d+)", p.get("d"))] == [cells[0], cells[3], cells[8]]
    for cuts in ([9], [-1]):
        with pytest.raises(BadBatch, match="a cut is before a token"):
            show.ragged([0, 3, 3, 9], cuts=cuts)


def test_virtual_batches_show_every_piece_beside_its_mask():
    assert lines(show.virtual_batches(4, [0, 3, 3], [6, 2], TABLE, page_size=2)) == [
        "A    k0 1 2 3 | 4 5",
        "q3    # # # # | . .  sequence 0: q 1, k 4, pages 0 1",
        "q4    . . . . | # .  sequence 1: q 2, k 2, pages 2",
        "q5    . . . . | # #",
        "",
        "B has no queries",
    ]


@pytest.mark.parametrize(
    ("new", "total"), [([4, 10, 5], [6, 17, 9]), ([1, 1], [8, 9]), ([8, 3, 1], [8, 20, 1]), ([0, 4], [3, 4])]
)
def test_virtual_batches_draw_what_the_reference_builds(new, total):
    cu = torch.cumsum(torch.tensor([0, *new]), 0).numpy()
    q, _, k, table = make_local_attention_virtual_batches(4, cu, torch.tensor(total).numpy(), TABLE, 2)
    found = re.findall(
        r"sequence (\d+): q (\d+), k (\d+), pages ([\d ]+)", repr(show.virtual_batches(4, cu, total, TABLE, 2))
    )
    drawn = [(int(number), int(q), int(k), [int(p) for p in pages.split()]) for number, q, k, pages in found]
    built = [(i, q[i], k[i], table[i, : -(-k[i] // 2)].tolist()) for i in range(len(q))]
    assert drawn == built


def test_a_plan_points_query_rows_at_pages():
    case = make_case(ForwardMode.DECODE, prefix_lens=(7, 3, 6))
    step = planned(case).passes[LayerKind.FULL][0]
    a, b, c = (step.pages(i) for i in range(3))
    assert lines(show.plan(planned(case))) == [
        "DECODE: 3 query tokens",
        "FULL, pass 1 of 1: causal, pages of 4, full pool",
        f"row 0 -> A [{a[0]}] [{a[1]}]  8 keys",
        f"row 1 -> B [{b[0]}]  0   4 keys",
        f"row 2 -> C [{c[0]}] [{c[1]}]  7 keys",
    ]


def test_sequences_that_share_a_table_row_point_at_it():
    assert lines(show.plan(branches())) == [
        "not causal, pages of 4, full pool, no sinks",
        "row 0 -> A [3] [1] [4]  9 keys",
        "row 1 -> A [3] [1] [4]  9 keys",
        "row 2 -> B [2]  0   0   2 keys",
        "row 3 -> B [2]  0   0   2 keys",
    ]


def test_a_tree_pass_shows_the_slots_each_draft_sees():
    assert lines(show.plan(drafts()))[1:4] == [
        "A row 0 -> [20]  21   22",
        "A row 1 -> [20] [21]  22",
        "A row 2 -> [20]  21  [22]",
    ]


def test_a_tree_pass_pales_the_slots_that_a_draft_does_not_see():
    faint = re.findall(r'<g opacity=".4">(.*?)</g>', show.plan(drafts())._repr_svg_())
    assert [re.findall(r">(\d+)<", texts) for texts in faint] == [["21", "22", "22", "21", "13", "14", "14", "13"]]


def test_with_the_batch_pieces_of_a_request_carry_its_name():
    local = repr(show.plan(planned(local_case()), batch=local_case())).split("LOCAL")[1]
    assert re.findall(r"(rows? \S+) +-> (\w)", local) == [
        ("row 0", "A"),
        ("rows 1:5", "A"),
        ("rows 5:9", "B"),
        ("rows 9:13", "B"),
        ("row 13", "B"),
        ("row 14", "C"),
    ]


def test_passes_over_some_rows_name_those_rows():
    case = make_case(prefix_lens=(3, 0, 6), new_lens=(5, 4, 1), deterministic=True)
    assert re.findall(r"(rows? \S+) +-> (\w)", repr(show.plan(planned(case), batch=case))) == [
        ("row 9", "C"),
        ("rows 0:5", "A"),
        ("rows 5:9", "B"),
    ]


def test_a_row_that_several_requests_read_is_grey_and_a_row_that_nobody_reads_is_left_out():
    case = make_case(ForwardMode.DECODE, prefix_lens=(11, 8, 14), shared_prefix=8)
    shared = planned(case).passes[LayerKind.FULL][0]
    picture = show.plan(shared, batch=case)
    assert [line.split(" [")[0] for line in lines(picture)[1:]] == ["rows 0:3 -> A+B+C"]
    svg = picture._repr_svg_()
    assert ">0 keys<" not in svg and ">B<" not in svg  # the rows of B and C, which this pass does not read
    assert len(re.findall(r"(?<=>)8 keys", svg)) == 1
    assert not [colour for colour in COLOURS if colour in svg]


def test_a_tree_shows_depth_and_the_ancestor_mask():
    tree = show.tree(PARENTS[:5], ["the", "cat", "dog", "sat", "ran"])
    assert lines(tree) == [
        "d0  the         # . . . .",
        "d1  +-cat       # # . . .",
        "d2  +-dog       # . # . .",
        "d3    +-sat d1  # # . # .",
        "d4    +-ran d1  # # . . #",
    ]


def test_a_tree_sets_off_the_nodes_and_edges_of_a_path():
    plain, marked = (show.tree(PARENTS[:5], path=path) for path in ((), (0, 1, 3)))
    assert [line.split()[0] for line in lines(marked)] == ["d0*", "d1*", "d2", "d3*", "d4"]
    edges, rings = re.findall(r'<path d="([^"]+)"[^>]*stroke-width="3"', marked._repr_svg_())
    assert (edges.count("C"), rings.count("M")) == (2, 3)
    assert 'stroke-width="3"' not in plain._repr_svg_()


def test_two_trees_with_equal_masks_of_tokens_but_other_parents_differ():
    assert repr(show.tree([-1, 0, 0, 1])) != repr(show.tree([-1, 0, 0, 2]))


def test_bars_are_proportional():
    assert lines(show.bars(["a", "bcd"], [60, 20], "tokens")) == [
        f"a    {'#' * 30} 60 tokens",
        f"bcd  {'#' * 10} 20 tokens",
    ]
    assert [line.split(" ", 1)[1].strip("# ") for line in lines(show.bars("abc", [1234567, 0.12345, 2048.5]))] == [
        "1,234,567",
        "0.123",
        "2,048",
    ]


ROOFED = {"low": (1, 1), "ridge": (100, 100), "right": (1000, 50)}


def test_a_roofline_rises_with_the_bytes_to_the_ridge_and_is_level_behind():
    picture = show.roofline(ROOFED, tera_bytes=1, tera_flops=100)
    plot = [line[2:] for line in lines(picture)[:16]]
    at_top = plot[0].ljust(57)
    assert at_top.index("b") == round(2 / 3 * 56) and set(at_top[at_top.index("b") + 1 :]) == {"="}
    slope = {(column, row) for row, line in enumerate(plot) for column, cell in enumerate(line) if cell in "/ab"}
    assert slope == {(column, 15 - round(column * 15 / (2 / 3 * 56))) for column in range(round(2 / 3 * 56) + 1)}
    assert lines(picture)[-1] == "c right: 1000 flops a byte, 50 TFLOP/s, 50 % of the roof"


def test_a_point_with_a_roof_of_its_own_is_compared_with_that():
    picture = show.roofline(ROOFED, tera_bytes=1, tera_flops=100, roofs={"right": 80})
    assert lines(picture)[-1] == "c right: 1000 flops a byte, 50 TFLOP/s, 62 % of its roof"
    assert lines(picture)[:-1] == lines(show.roofline(ROOFED, tera_bytes=1, tera_flops=100))[:-1]


def test_the_svg_of_a_roofline_puts_dots_on_and_under_the_roof():
    picture = show.roofline(ROOFED, tera_bytes=1, tera_flops=100)
    _, roof, dots = [path.get("d") for path in ET.fromstring(picture._repr_svg_()).iter(f"{SVG}path")]
    corners = [tuple(map(int, corner.split())) for corner in roof.strip("M").split("L")]
    centres = [(int(x) + 4, int(y)) for x, y in re.findall(r"M(\d+) (\d+)a", dots)]
    assert centres[:2] == corners[:2] and corners[1][1] == corners[2][1]
    assert centres[2][0] == corners[2][0] and centres[2][1] > corners[2][1]


def test_a_ladder_says_what_each_rung_was_worth_and_marks_the_floor():
    picture = show.ladder({"plain": 60, "paged": 20}, floor=10)
    assert lines(picture) == [
        f"plain  #####|{'#' * 24} 60 us",
        f"paged  #####|####{' ' * 20} 20 us, 3.00x",
        f"floor       |{' ' * 24} 10 us",
    ]
    bars, line = [path.get("d") for path in ET.fromstring(picture._repr_svg_()).iter(f"{SVG}path")]
    ends = [(int(end) - int(side)) for side, end in re.findall(r"M(\d+) \d+H(\d+)", bars)]
    side = int(re.match(r"M(\d+)", bars).group(1))
    assert ends == [240, 80] and int(re.match(r"M(\d+)", line).group(1)) - side == 40


def test_a_chain_counts_the_products_of_either_order():
    matrices = [("q", 2, 3), ("w", 3, 5), ("k", 5, 7)]
    assert lines(show.chain(matrices, first=0)) == [
        "q 2x3 @ w 3x5 = q w 2x5  30 products",
        "q w 2x5 @ k 5x7 = result 2x7  70 products",
        "100 products",
    ]
    assert lines(show.chain(matrices, first=1, result="scores")) == [
        "w 3x5 @ k 5x7 = w k 3x7  105 products",
        "q 2x3 @ w k 3x7 = scores 2x7  42 products",
        "147 products",
    ]


@pytest.mark.parametrize("first", [0, 1])
def test_the_svg_of_a_chain_draws_every_matrix_to_scale(first):
    picture = show.chain([("q", 2, 3), ("w", 3, 5), ("k", 5, 7)], first=first)
    filled = [p.get("d") for p in ET.fromstring(picture._repr_svg_()).iter(f"{SVG}path")]
    drawn = [tuple(int(n) // 4 for n in re.search(r"h(\d+)v(\d+)", d).groups()) for d in filled]
    shapes = re.findall(r"(\d+)x(\d+)", repr(picture))
    assert drawn == [(int(columns), int(rows)) for rows, columns in shapes]


@pytest.mark.parametrize(
    ("matrices", "first"),
    [
        ([("q", 2, 3), ("w", 4, 5), ("k", 5, 7)], 0),
        ([("q", 2, 3), ("w", 3, 5)], 0),
        ([("q", 2, 3), ("w", 3, 5), ("k", 5, 7)], 2),
        ([("q", 0, 3), ("w", 3, 5), ("k", 5, 7)], 0),
    ],
)
def test_a_chain_that_cannot_be_multiplied_is_refused(matrices, first):
    with pytest.raises(BadBatch, match="each with as many rows"):
        show.chain(matrices, first=first)


def test_a_timeline_draws_every_run_where_it_happens():
    picture = show.timeline({"host": "ppa", "device": "..p.aa"}, {"p": "plan", "a": "attend"})
    assert lines(picture) == ["host    ppa...", "device  ..p.aa", "p plan  a attend"]
    paths = [path.get("d") for path in ET.fromstring(picture._repr_svg_()).iter(f"{SVG}path")]
    drawn = [tuple(map(int, box)) for d in paths for box in re.findall(r"M(\d+) (\d+)h(\d+)v16", d)]
    origin = min(x for x, _, _ in drawn)
    blocks = {(y // 22, (x - origin) // 9, (width + 1) // 9) for x, y, width in drawn}
    assert blocks == {(0, 0, 2), (0, 2, 1), (1, 2, 1), (1, 4, 2)}  # lane, start, length


@pytest.mark.parametrize(
    "names", [{"p": "plan"}, {"p": "plan", "a": "attend", ".": "idle"}, {"p": "", "a": "", "xy": ""}]
)
def test_a_timeline_with_a_letter_that_means_nothing_is_refused(names):
    with pytest.raises(BadBatch, match="name every letter"):
        show.timeline({"host": "pa"}, names)


def sample(x):
    """First line.

    Second paragraph.
    """
    # a comment with if
    return f"{x if x else 0} <b>"


def test_source_keeps_the_code_and_cuts_the_docstring():
    assert show.source(sample).code.split("\n") == [
        "def sample(x):",
        '    """First line."""',
        "    # a comment with if",
        '    return f"{x if x else 0} <b>"',
    ]
    assert "Second paragraph." in show.source(sample, docstring=True).code
    assert repr(show.source(sample)) == f"# {__name__}.sample\n{show.source(sample).code}"


def test_source_as_html_is_the_same_text_with_marks():
    html = show.source(sample)._repr_html_()
    assert "".join(ET.fromstring(html).itertext()) == repr(show.source(sample))
    assert '<span style="font-weight:bold">def</span> sample' in html
    assert '<span style="opacity:.65"># a comment with if</span>' in html
    assert html.count("font-weight:bold") == 2  # def and return, none of the words inside the f-string


def test_source_of_a_class_cuts_every_docstring():
    code = show.source(AttentionPass).code
    ast.parse(code)
    assert ">>>" not in code
    assert "Copies to the host" in code


@pytest.mark.parametrize(
    ("draw", "error", "says"),
    [
        (lambda: show.mask_grid(causal), BadBatch, "pass q_pos and k_pos"),
        (lambda: show.mask_grid(torch.ones(2, 3, 4)), BadBatch, r"shape \(2, 3, 4\)"),
        (lambda: show.mask_grid(torch.ones(2, 3), q_pos=range(3)), BadBatch, "3 q_pos"),
        (lambda: show.mask_diff(torch.ones(1, 2), torch.ones(2, 2)), BadBatch, "wrong has shape"),
        (lambda: show.mask_row(causal, titles=["a", "b"]), BadBatch, "2 titles for 1 masks"),
        (lambda: show.pool_strip([[4]]), BadBatch, "page_size is missing"),
        (lambda: show.pool_strip([[40]], 4, 8), BadBatch, "slot 40 is used"),
        (lambda: show.page_table([[1]], lens=[9], page_size=4), BadBatch, "cannot hold"),
        (lambda: show.page_table([[1], [2]], lens=[1], page_size=4), BadBatch, "1 lens"),
        (lambda: show.ragged([0, 3, 2]), BadBatch, "never fall"),
        (lambda: show.virtual_batches(6, [0, 1], [1], TABLE, 4), BadConfig, "multiple of"),
        (lambda: show.tree([0]), BadBatch, "parent 0"),
        (lambda: show.tree([-1], ["a", "b"]), BadBatch, "2 tokens for 1 nodes"),
        (lambda: show.tree([-1], path=[0, 1]), BadBatch, "a tree of 1 nodes"),
        (lambda: show.bars(["a"], [-1]), BadBatch, "at least 0"),
        (lambda: show.bars(["a"], [1, 2]), BadBatch, "1 labels"),
        (lambda: show.roofline({"a": (0, 1)}, tera_bytes=1, tera_flops=1), BadBatch, "above 0"),
        (lambda: show.roofline({}, tera_bytes=1, tera_flops=1), BadBatch, "1 to 26"),
        (lambda: show.roofline({"a": (1, 1)}, tera_bytes=1, tera_flops=1, roofs={"a": 0}), BadBatch, "above 0"),
        (lambda: show.roofline({"a": (1, 1)}, tera_bytes=1, tera_flops=1, roofs={"b": 1}), BadBatch, "no points"),
        (lambda: show.ladder({}, 1), BadBatch, "at least one rung"),
        (lambda: show.ladder({"a": 1}, 0), BadBatch, "above 0"),
        (lambda: show.page_table([[1]], names=["A", "B"]), BadBatch, "2 names for 1 rows"),
    ],
)
def test_a_picture_that_cannot_be_drawn_says_why(draw, error, says):
    with pytest.raises(error, match=says):
        draw()


def test_pictures_are_frozen():
    with pytest.raises(AttributeError):
        show.bars(["a"], [1]).text = "b"


def test_show_sees_the_contract_and_the_masks_only():
    for path in sorted((ROOT / "fa_ref" / "show").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fa_ref"):
                assert re.match(r"fa_ref\.(api|masks|show)(\.|$)", node.module), (path.name, node.module)


def test_show_loads_no_plotting_library():
    code = "import sys, fa_ref.show; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"
