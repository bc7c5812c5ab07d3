"""A plan: for each pass, which query rows read which rows of the page table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fa_ref.api import AttentionPass, AttentionPlan, DraftInput, TreePass, VerifyInput
from fa_ref.show.cells import boxes
from fa_ref.show.picture import Picture, Pixels, group, label, stacked, text_width
from fa_ref.show.requests import ints, request_names, tint
from fa_ref.show.table import FRAME, HIGH, ROW, WIDE, cell_width, row_text, rows_of_pass, table_cells

_ARROW = 46  # pixels from the query rows to the table


def plan(
    plan: AttentionPlan | AttentionPass | TreePass,
    *,
    names: Sequence[str] | None = None,
    batch: Any = None,
    title: str = "",
) -> Picture:
    """The passes of a plan, or one pass: query rows, and an arrow to the pages that they read.

    names: of the rows of the page table (default A, B, ...). batch: a ForwardBatch or a Case, to name each row
    after the request whose queries read it: where a request is cut into pieces, they share its name and colour, and
    a row that several requests read is "A+B" and grey. A row that nobody reads is left out.

    >>> import torch
    >>> table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    >>> lens, cu = torch.tensor([5, 2], dtype=torch.int32), torch.tensor([0, 4, 5], dtype=torch.int32)
    >>> plan(AttentionPass(page_table=table, cache_seqlens=lens, cu_seqlens_q=cu,
    ...                    max_seqlen_q=4, max_seqlen_k=5, causal=True, page_size=4))
    causal, pages of 4, full pool
    rows 0:4 -> A [3] [1]  5 keys
    row 4    -> B [2]  0   2 keys
    """
    if not isinstance(plan, AttentionPlan):
        return _panel(plan, names, batch, title or _summary(plan))
    panels = [
        _panel(step, names, batch, f"{kind.name}, pass {number} of {len(passes)}: {_summary(step)}")
        for kind, passes in plan.passes.items()
        for number, step in enumerate(passes, start=1)
    ]
    return stacked(*panels, title=title or f"{plan.forward_mode.name}: {plan.num_tokens} query tokens")


def _summary(step: AttentionPass | TreePass) -> str:
    if isinstance(step, TreePass):
        parts = ["drafts under a mask", f"{step.pool} pool"]
    else:
        parts = ["causal" if step.causal else "not causal", f"pages of {step.page_size}", f"{step.pool} pool"]
        parts += ["window"] if step.uses_window else []
    return ", ".join(parts + ([] if step.takes_sinks else ["no sinks"]))


def _panel(step: AttentionPass | TreePass, names: Sequence[str] | None, batch: Any, title: str) -> Picture:
    if isinstance(step, TreePass):
        return _tree_panel(step, names, title)
    pages, counts, keys = rows_of_pass(step)
    rows = list(range(step.sequences)) if step.row_index is None else ints(step.row_index)
    named = request_names(len(pages), names) if batch is None else _names_from(batch, step, rows, len(pages))
    read = sorted(set(rows))
    pages, counts, keys, named = ([of_row[row] for row in read] for of_row in (pages, counts, keys, named))
    rows = [read.index(row) for row in rows]
    queries = _query_spans(step)
    tops = _row_tops(rows, len(pages))
    boxed = max(map(text_width, queries), default=0) + 10
    x = boxed + _ARROW + 3  # the names of the rows, then their cells, then their keys
    cells = x + text_width("M" * max(map(len, named), default=0)) + 4
    right = cells + max(map(len, pages), default=0) * WIDE + 8
    notes = [_keys(n) for n in keys]
    body = _query_boxes(queries, [named[row] for row in rows], boxed)
    body += _arrows([tops[row] for row in rows], boxed, boxed + _ARROW)
    body += "".join(label(x, y + 14, name) for y, name in zip(tops, named, strict=True))
    body += table_cells(pages, counts, named, cells, tops)
    body += group("".join(label(right, y + 14, n) for y, n in zip(tops, notes, strict=True)), font_size=10)
    return Picture(
        alt="query rows and the page table rows they read",
        width=right + max((text_width(note, 10) for note in notes), default=0),
        height=max(len(rows), len(pages), 1) * ROW - ROW + HIGH,
        body=body,
        text=_ascii(step, queries, [pages[row] for row in rows], [named[row] for row in rows]),
        title=title,
    )


def _row_tops(rows: list[int], count: int) -> list[Pixels]:
    """Where each table row is drawn: level with the middle of its readers, if that keeps the rows in order."""
    if rows != sorted(rows):
        return [row * ROW for row in range(count)]
    readers = [[i for i, row in enumerate(rows) if row == wanted] for wanted in range(count)]
    return [sum(mine) / len(mine) * ROW for mine in readers]


def _query_spans(step: AttentionPass) -> list[str]:
    """The query rows of each sequence: "rows 0:5", or token_index's where the pass takes only some."""
    bounds = ints(step.cu_seqlens_q)
    tokens = list(range(bounds[-1])) if step.token_index is None else ints(step.token_index)
    return [_span(tokens[start:end]) for start, end in zip(bounds[:-1], bounds[1:], strict=True)]


def _span(tokens: list[int]) -> str:
    if len(tokens) < 2:
        return f"row {tokens[0]}" if tokens else "no rows"
    if tokens == list(range(tokens[0], tokens[-1] + 1)):
        return f"rows {tokens[0]}:{tokens[-1] + 1}"
    return "rows " + " ".join(map(str, tokens))


def _names_from(batch: Any, step: AttentionPass, rows: list[int], count: int) -> list[str]:
    """The requests whose queries read each table row."""
    new = _new_tokens(getattr(batch, "batch", batch))
    owner = [name for name, n in zip(request_names(len(new)), new, strict=True) for _ in range(n)]
    tokens = range(len(owner)) if step.token_index is None else ints(step.token_index)
    bounds = ints(step.cu_seqlens_q)
    readers: list[dict[str, None]] = [{} for _ in range(count)]  # in order, each once
    for row, start, end in zip(rows, bounds[:-1], bounds[1:], strict=True):
        readers[row] |= dict.fromkeys(owner[token] for token in tokens[start:end])
    return ["+".join(names) or "-" for names in readers]


def _new_tokens(batch: Any) -> list[int]:
    """Query rows of each request."""
    if isinstance(batch.spec_info, VerifyInput):
        return [batch.spec_info.draft_token_num] * batch.batch_size
    if batch.forward_mode.is_decode():
        branches = batch.spec_info.topk if isinstance(batch.spec_info, DraftInput) else 1
        return [branches] * batch.batch_size
    return ints(batch.extend_seq_lens)


def _query_boxes(queries: list[str], names: list[str], width: int) -> str:
    corners = [(0, i * ROW) for i in range(len(queries))]
    filled = "".join(boxes([c], width, HIGH, tint(name)) for c, name in zip(corners, names, strict=True))
    texts = "".join(label(5, y + 14, query) for (_, y), query in zip(corners, queries, strict=True))
    return filled + boxes(corners, width, HIGH, FRAME) + texts


def _arrows(tops: Sequence[Pixels], x: int, target: int) -> str:
    path, middle = "", (x + target) // 2
    for i, top in enumerate(tops):
        start, end = i * ROW + HIGH // 2, top + HIGH // 2
        path += f"M{x + 2} {start}C{middle} {start} {middle} {end:g} {target - 2} {end:g}m-5-3l5 3-5 3"
    return f'<path d="{path}" fill="none" stroke="currentColor" stroke-opacity=".7"/>' if path else ""


def _keys(count: int) -> str:
    return f"{count} key" if count == 1 else f"{count} keys"


def _ascii(step: AttentionPass, queries: list[str], pages: list[list[int]], names: list[str]) -> str:
    """A line a sequence: its query rows, the table row it reads, its own count of keys."""
    wide, side, cell = max(map(len, queries), default=0), max(map(len, names), default=0), cell_width(pages)
    lines = []
    for query, row, name, keys in zip(queries, pages, names, ints(step.cache_seqlens), strict=True):
        cells = row_text(row, -(-keys // step.page_size), cell)
        lines.append(f"{query.ljust(wide)} -> {name.ljust(side)} {cells}  {_keys(keys)}")
    return "\n".join(lines)


def _tree_panel(step: TreePass, names: Sequence[str] | None, title: str) -> Picture:
    """Each query row beside the slots of its request's drafts, in colour where its mask allows."""
    queries, slots = step.mask.shape[1], [ints(row) for row in step.slots]
    named = request_names(len(slots), names)
    lines, seen, unseen, body = [], [], [], ""
    numbers = {True: "", False: ""}  # of slots that are seen, and of the others
    side = text_width(f"{max(named, key=len, default='')} row {len(slots) * queries}") + 10
    cell = cell_width(slots)
    for request, name in enumerate(named):
        for i in range(queries):
            visible, y = step.mask[request, i].tolist(), len(lines) * (HIGH + 2)
            row = f"{name} row {request * queries + i}"
            mine = []
            for j, (slot, ok) in enumerate(zip(slots[request], visible, strict=True)):
                corner = (side + j * WIDE, y)
                (mine if ok else unseen).append(corner)
                numbers[ok] += label(corner[0] + WIDE // 2, y + 14, str(slot))
            seen += mine
            body += label(0, y + 14, row) + boxes(mine, WIDE, HIGH, tint(name))
            parts = [f"[{s}]" if ok else f" {s} " for s, ok in zip(slots[request], visible, strict=True)]
            lines.append(f"{row} -> " + " ".join(part.rjust(cell) for part in parts).rstrip())
    pale = 'fill="none" stroke="currentColor" stroke-opacity=".2"'
    return Picture(
        alt="query rows and the draft slots their mask allows",
        width=side + step.slots.shape[1] * WIDE,
        height=max(len(lines), 1) * (HIGH + 2),
        body=body
        + boxes(unseen, WIDE, HIGH, pale)
        + boxes(seen, WIDE, HIGH, FRAME)
        + group(numbers[True] + group(numbers[False], opacity=".4"), text_anchor="middle"),
        text="\n".join(lines),
        title=title,
    )
