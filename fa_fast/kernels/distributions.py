"""Which distributions own the module `sgl_kernel`, and the torch and CUDA each was built for.

The extras of pyproject.toml repeat these pins and a test keeps them equal. What a provider can do is never
read from this table: it asks the device and the signatures of the installed functions.
"""

from __future__ import annotations

from dataclasses import dataclass

MODULE = "sgl_kernel"
XPU_PLACEHOLDER = "sglang-kernel-xpu"  # an empty package; Intel GPUs need a build from source


@dataclass(frozen=True, kw_only=True)
class KernelDistribution:
    """One published kernel wheel (Linux x86_64).

    >>> EXTRAS["cuda12"].pin
    'sglang-kernel==0.4.1.post1'
    """

    name: str
    version: str
    cuda: int  # major version of the CUDA runtime
    torch: str
    extra: str | None = None  # the extra of this project that installs it
    note: str = ""

    @property
    def pin(self) -> str:
        return f"{self.name}=={self.version}"

    @property
    def install(self) -> str:
        """The command that installs this wheel beside the torch it was built for."""
        return f"python -m pip install {self.pin} torch=={self.torch}"

    def fits(self, torch: str, cuda: str | None) -> bool:
        """Whether an installed torch ('2.11.0+cu130') and its CUDA runtime ('13.0') match this wheel."""
        return minor_version(torch) == minor_version(self.torch) and major_version(cuda) == self.cuda


DISTRIBUTIONS = (
    KernelDistribution(
        name="sgl-kernel",
        version="0.3.21",
        cuda=12,
        torch="2.9.1",
        note="the last under the old name; no out=, no get_scheduler_metadata",
    ),
    KernelDistribution(
        name="sglang-kernel",
        version="0.4.1.post1",
        cuda=12,
        torch="2.9.1",
        extra="cuda12",
        note="adds out= and get_scheduler_metadata",
    ),
    KernelDistribution(
        name="sglang-kernel",
        version="0.4.2.post2",
        cuda=13,
        torch="2.11.0",
        extra="cuda13-torch211",
        note="the one the published measurements were made with",
    ),
    KernelDistribution(name="sglang-kernel", version="0.4.4", cuda=13, torch="2.11.0", note="adds only_qv"),
    KernelDistribution(
        name="sglang-kernel", version="0.4.10", cuda=13, torch="2.14.1", extra="cuda13", note="the newest"
    ),
)
EXTRAS = {row.extra: row for row in DISTRIBUTIONS if row.extra is not None}
NAMES = tuple(dict.fromkeys(row.name for row in DISTRIBUTIONS))


def find(name: str, version: str) -> KernelDistribution | None:
    """The table's row for an installed distribution, or None when it is not one of the known wheels."""
    return next((row for row in DISTRIBUTIONS if (row.name, row.version) == (name, version)), None)


def recommend(torch: str | None, cuda_major: int | None) -> KernelDistribution:
    """The extra for a machine: the one built for its torch, else the newest one for its CUDA major version.

    >>> recommend("2.11.0+cu130", 13).extra
    'cuda13-torch211'
    >>> recommend("2.10.0+cu128", 12).extra
    'cuda12'
    """
    rows = [row for row in EXTRAS.values() if row.cuda == cuda_major] or list(EXTRAS.values())
    same_torch = [row for row in rows if torch and minor_version(row.torch) == minor_version(torch)]
    return (same_torch or rows)[-1]


def minor_version(version: str) -> tuple[str, ...]:
    """'2.11.0+cu130' -> ('2', '11'): compiled extensions of torch hold within one minor version."""
    return tuple(version.split("+")[0].split(".")[:2])


def major_version(version: str | None) -> int | None:
    return int(version.split(".")[0]) if version else None
