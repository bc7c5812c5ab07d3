"""What the two forms of MLA cost, counted: floating point operations and bytes of one layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Cost(NamedTuple):
    """Work of one layer. A multiply and an add are two operations; each operand is read once, each result written."""

    flops: int
    bytes: int

    def weighed(self, flops_per_byte: float) -> float:
        """In bytes: the operations at what the machine computes while it reads one byte."""
        return self.bytes + self.flops / flops_per_byte


def mla_costs(
    new_lens: Sequence[int],
    prefix_lens: Sequence[int],
    *,
    heads: int,
    nope: int,
    rope: int,
    latent: int,
    v_dim: int,
    itemsize: int = 2,
) -> dict[str, Cost]:
    """The absorbed form and the MHA form of a batch, projections included, from `kv_b_proj` to each head's output.

    Absorbed: every visible pair costs latent + rope for its score and latent for its value, but a key is read as it
    is cached, once for all heads. MHA: a pair costs nope + rope and v_dim, but all keys are expanded for every head.

    >>> sizes = dict(heads=128, nope=128, rope=64, latent=512, v_dim=128)
    >>> decode = mla_costs([1], [4096], **sizes)
    >>> decode["absorbed"].bytes < decode["mha"].bytes / 10  # a token that reads what is cached
    True
    >>> prefill = mla_costs([4096], [0], **sizes)
    >>> prefill["mha"].flops < prefill["absorbed"].flops / 2  # many queries a key: expanding pays
    True
    """
    tokens = sum(new_lens)
    keys = sum(new + prefix for new, prefix in zip(new_lens, prefix_lens, strict=True))
    pairs = sum(new * prefix + new * (new + 1) // 2 for new, prefix in zip(new_lens, prefix_lens, strict=True))
    weights = heads * latent * (nope + v_dim)
    cached = keys * (latent + rope)
    absorbed = Cost(
        flops=2 * pairs * heads * (latent + rope + latent) + 2 * tokens * weights,
        bytes=itemsize * (cached + weights + tokens * heads * (nope + rope + v_dim + 4 * latent)),
    )
    expanded = keys * heads * (nope + rope + v_dim)
    mha = Cost(
        flops=2 * pairs * heads * (nope + rope + v_dim) + 2 * keys * weights,
        bytes=itemsize * (cached + weights + 2 * expanded + tokens * heads * (nope + rope + v_dim)),
    )
    return {"absorbed": absorbed, "mha": mha}


FLOPS_PER_BYTE = 180.0  # of an H200 in bf16: 780 TFLOP/s over 4.4 TB/s


def cheaper_form(costs: dict[str, Cost], flops_per_byte: float = FLOPS_PER_BYTE) -> str:
    """The form whose operations and bytes weigh less."""
    return min(costs, key=lambda form: costs[form].weighed(flops_per_byte))
