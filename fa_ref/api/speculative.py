"""What speculative decoding passes around: the tree of drafts, the beams it grows from, and what was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fa_ref.api.errors import BadBatch, BadPageTable


@dataclass(frozen=True, kw_only=True)
class DraftTree:
    """One tree of T drafts a request. Draft 0 is the root; parents come before children, siblings best first.

    Draft i is stored at column seq_lens + i of req_to_token; its logical position is seq_lens + depth[i].
    Made by `build_tree` or `select`.
    """

    parents: Int[Tensor, "requests drafts"]  # -1 for the root
    ancestors: Bool[Tensor, "requests drafts drafts"]  # [r, i, j]: draft i descends from draft j, or is it
    depth: Int[Tensor, "requests drafts"]  # 0 for the root
    max_depth: int  # no draft is deeper; known on the host, it sizes what acceptance returns

    def custom_mask(
        self, seq_lens: Int[Tensor, " requests"], seq_lens_cpu: Int[Tensor, " requests"] | None = None
    ) -> Bool[Tensor, " entries"]:
        """The mask as VerifyInput takes it: flat, for each request T rows of seq_lens + T columns.

        The number of entries depends on the lengths: without their host copy they are read, which synchronises.

        >>> import fa_ref, torch
        >>> tree = fa_ref.build_tree([[-1, 0, 0]])
        >>> tree.custom_mask(torch.tensor([2])).view(3, 2 + 3).int().tolist()
        [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]
        """
        requests, drafts = self.parents.shape
        host = seq_lens if seq_lens_cpu is None else seq_lens_cpu
        entries = drafts * (int(host.sum()) + requests * drafts)
        prefix = seq_lens.long()[:, None]
        row_len = prefix + drafts
        draft = torch.arange(drafts, device=seq_lens.device)
        row = (torch.cumsum(row_len, dim=0) - row_len) * drafts + row_len * draft  # [requests, drafts]: where it starts
        mask = torch.ones(entries, dtype=torch.bool, device=seq_lens.device)
        mask[(row + prefix)[:, :, None] + draft] = self.ancestors
        return mask

    def positions(self, seq_lens: Int[Tensor, " requests"]) -> Int[Tensor, " queries"]:
        """The logical position of every draft, request-major.

        >>> import fa_ref, torch
        >>> fa_ref.build_tree([[-1, 0, 0, 1]]).positions(torch.tensor([7])).tolist()
        [7, 8, 8, 9]
        """
        return (seq_lens[:, None] + self.depth).flatten()


@dataclass(frozen=True, kw_only=True)
class DraftBeams:
    """A draft tree while it grows: k beams a request to continue, and every candidate seen so far.

    Candidates are numbered in the order in which they were found, so a parent's number is smaller than its child's.
    Made by `start`, extended by `grow`, cut to a DraftTree by `select`.
    """

    tokens: Int[Tensor, "requests topk"]  # what the draft model reads next, best beam first
    scores: Float[Tensor, "requests topk"]  # fp32 sum of logprobs from the root to the beam's end
    origin: Int[Tensor, "requests topk"]  # which beam of the step before this one continues; 0 in the first step
    candidate: Int[Tensor, "requests topk"]  # the number of the beam's last token among the candidates
    candidate_tokens: Int[Tensor, "requests candidates"]  # the token of every candidate
    candidate_scores: Float[Tensor, "requests candidates"]  # fp32 sum of logprobs from the root to the candidate
    candidate_parents: Int[Tensor, "requests candidates"]  # a candidate, or -1: the root
    steps: int  # depth of the beams: 1 after `start`


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """What the target accepted of a DraftTree: a path from the root, and one token more."""

    path: Int[Tensor, "requests path"]  # accepted drafts from the root on, max_depth + 1 wide, then -1
    lengths: Int[Tensor, " requests"]  # accepted drafts, the root counts: at least 1
    bonus: Int[Tensor, " requests"]  # the target's token after the path: the next root

    def new_tokens(self, tokens: Int[Tensor, "requests drafts"]) -> Int[Tensor, "requests path"]:
        """What the step adds to the text: the accepted drafts without the root, then the bonus, then -1.

        `lengths` tokens a request: the root was already part of the text.

        >>> import torch
        >>> done = Accepted(path=torch.tensor([[0, 2, -1]]), lengths=torch.tensor([2]), bonus=torch.tensor([50]))
        >>> done.new_tokens(torch.tensor([[10, 11, 12]])).tolist()
        [[12, 50, -1]]
        """
        drafts = tokens.gather(1, self.path.clamp(min=0)).roll(-1, dims=1)
        place = torch.arange(self.path.shape[1], device=tokens.device)
        last = self.lengths[:, None] - 1
        return torch.where(place < last, drafts, torch.where(place == last, self.bonus[:, None], -1))


def parents_tensor(parents: Tensor | Sequence[Sequence[int]]) -> Int[Tensor, "requests drafts"]:
    """`parents` as int64 [requests, drafts]. Raises BadBatch for another shape or dtype."""
    try:
        given = torch.as_tensor(parents)
    except (ValueError, TypeError) as error:
        raise BadBatch(f"parents must be one list of equal length a request: {error}") from error
    if given.dim() != 2 or given.shape[1] == 0 or given.dtype.is_floating_point or given.dtype == torch.bool:
        raise BadBatch(
            f"parents has shape {tuple(given.shape)} and dtype {given.dtype}; it must be integers "
            "[requests, drafts] with at least the root: one row a request"
        )
    return given.long()


def check_parents(parents: Int[Tensor, "requests drafts"]) -> None:
    """Raise BadBatch unless draft 0 is the only root and every parent comes before its child. Reads values."""
    for request, row in enumerate(parents.tolist()):
        for draft, parent in enumerate(row):
            if parent == -1 and draft > 0:
                raise BadBatch(f"request {request}: draft {draft} is a second root; only draft 0 has the parent -1")
            if not -1 <= parent < draft:
                raise BadBatch(
                    f"request {request}: draft {draft} has the parent {parent}; "
                    + (
                        "draft 0 is the root: its parent is -1"
                        if draft == 0
                        else "order drafts so that parents come first"
                    )
                )


def depth_bound(drafts: int, max_depth: int | None) -> int:
    """`max_depth`, or what it is for a chain. Raises BadBatch for a negative one."""
    if max_depth is not None and max_depth < 0:
        raise BadBatch(f"max_depth is {max_depth}; the root alone has depth 0: pass 0 or more, or nothing")
    return drafts - 1 if max_depth is None else max_depth


def check_depth(depth: Int[Tensor, "requests drafts"], max_depth: int) -> None:
    """Raise BadBatch if a draft is deeper than `max_depth`. Reads values."""
    deepest = int(depth.max()) if depth.numel() else 0
    if deepest > max_depth:
        raise BadBatch(f"max_depth is {max_depth}, but a draft has depth {deepest}; pass at least that, or nothing")


def check_shape(name: str, value: Tensor, shape: tuple[int, ...], axes: str) -> None:
    """Raise BadBatch unless `value` is a tensor of this shape; -1 stands for any size."""
    if not isinstance(value, Tensor):
        instead = f"its .{name}" if hasattr(value, name) else "one"
        raise BadBatch(f"{name} is {value!r}; it must be a tensor [{axes}]: pass {instead}")
    if value.dim() != len(shape) or any(want not in (-1, got) for want, got in zip(shape, value.shape, strict=True)):
        want = ", ".join("any" if size == -1 else str(size) for size in shape)
        raise BadBatch(f"{name} has shape {tuple(value.shape)}; it must be [{axes}] = [{want}]")


def check_logprobs(logprobs: Tensor) -> None:
    """Raise BadBatch for a logprob above 0 or NaN: a child would outrank its parent. Reads values."""
    if not bool((logprobs <= 0).all()):
        raise BadBatch(
            f"logprobs hold {float(logprobs.max())}; the log of a probability is at most 0: pass log_softmax(logits)"
        )


def check_topk(topk: int, vocab: int) -> None:
    if not 1 <= topk <= vocab:
        raise BadBatch(f"topk is {topk}; it must be at least 1 and at most the vocabulary's {vocab}")


def check_selection(beams: DraftBeams, root_tokens: Tensor, num_draft_tokens: int) -> None:
    """Raise BadBatch unless the beams have enough candidates for a tree of that size."""
    requests, candidates = beams.candidate_tokens.shape
    check_shape("root_tokens", root_tokens, (requests,), "requests")
    if not 1 <= num_draft_tokens <= candidates + 1:
        raise BadBatch(
            f"num_draft_tokens is {num_draft_tokens}; {beams.steps} steps of topk {beams.tokens.shape[1]} give a root "
            f"and {candidates} candidates: ask for 1 to {candidates + 1}, or grow further"
        )


def check_sampling(
    tree: DraftTree, tokens: Tensor, target_probs: Tensor, draft_probs: Tensor | None, uniforms: Tensor
) -> None:
    """Raise BadBatch unless the arguments of `verify_sampled` have one request, draft and vocabulary count."""
    requests, drafts = tree.parents.shape
    check_shape("tokens", tokens, (requests, drafts), "requests, drafts")
    check_shape("target_probs", target_probs, (requests, drafts, -1), "requests, drafts, vocab")
    if draft_probs is not None:
        check_shape("draft_probs", draft_probs, tuple(target_probs.shape), "requests, drafts, vocab")
    check_shape("uniforms", uniforms, (requests, drafts + 1), "requests, drafts + 1")


def check_compaction(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, accepted: Accepted) -> None:
    """Raise BadBatch unless there is a table, and one row and one length for each request."""
    requests = accepted.path.shape[0]
    check_shape("req_to_token", req_to_token, (-1, -1), "rows, columns")
    check_shape("req_pool_indices", req_pool_indices, (requests,), "requests")
    check_shape("seq_lens", seq_lens, (requests,), "requests")


def check_columns(req_to_token: Tensor, seq_lens: Tensor, accepted: Accepted) -> None:
    """Raise BadPageTable if an accepted draft lies past the columns of req_to_token. Reads values."""
    last = seq_lens + accepted.path.max(dim=1).values
    if bool((last >= req_to_token.shape[1]).any()):
        raise BadPageTable(
            f"an accepted draft is at column {int(last.max())}, req_to_token has {req_to_token.shape[1]}; give the "
            "ReqToTokenPool as many extra_tokens as there are drafts"
        )
