"""What this machine has, what is missing for fa_fast to run on its device, and the line that installs it.

    python -m fa_fast.doctor            a report; exit code 0 when fa_fast can run, 1 when something is broken
    python -m fa_fast.doctor --json     the same as JSON

`gather` reads the machine into a `Machine` record; `diagnose` is a pure function of that record, so every
situation can be tested without owning the hardware. Without a GPU sgl_kernel is never imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa_fast.kernels import distributions

# Provider -> the device type it runs on, as in kernels.select, which imports torch. The first of a type is its default.
PROVIDERS = {"torch_cpu": "cpu", "sgl_cuda": "cuda", "sgl_xpu": "xpu", "vllm_xpu": "xpu"}
XPU_PACKAGES = {"sgl_xpu": "sgl_kernel", "vllm_xpu": "vllm_xpu_kernels"}  # modules
XPU_RECIPE = "in a checkout of sgl-kernel-xpu: source /opt/intel/oneapi/setvars.sh && python -m pip install -v ."
XPU_TRITON = ("triton-xpu", "pytorch-triton-xpu")  # the newer name and the older one
XPU_INDEX = "https://download.pytorch.org/whl/xpu"
CPU_WORKS = 'Until then BackendConfig(device="cpu") runs here, on the provider torch_cpu.'
FA3_TESTED = (9, 0)  # compute capability of the H200, where the kernels are tested


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, as torch names it."""

    kind: str  # cuda, xpu, rocm, mps
    name: str
    compute: tuple[int, int] | None = None  # CUDA compute capability


@dataclass(frozen=True, kw_only=True)
class Probed:
    """What the kernels of one provider answered to the questions of kernels.xpu_probe."""

    provider: str
    error: str | None = None  # not importable, or wrong in plain attention
    verdicts: tuple[tuple[str, bool | None], ...] = ()
    notes: tuple[str, ...] = ()  # what came instead of a right answer


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts a diagnosis rests on. The defaults are a Linux x86_64 machine with nothing installed."""

    python: str = "3.11.0"
    system: str = "Linux"
    arch: str = "x86_64"
    torch: str | None = None  # None: cannot be imported
    torch_error: str | None = None
    cuda_runtime: str | None = None  # of the torch build
    xpu_runtime: str | None = None  # of the torch build
    xpu_graphs: bool = True  # torch has graphs of Intel GPUs; only asked of a build for them
    devices: tuple[Device, ...] = ()
    nvidia_driver: str | None = None
    owners: tuple[tuple[str, str], ...] = ()  # (name, version) of each distribution that installs sgl_kernel
    module_found: bool = False  # sgl_kernel is on the path, owned or not
    kernel_error: str | None = None  # what importing sgl_kernel said; only tried on a GPU
    operator_error: str | None = None  # why FA3 is not called as an operator, where sgl_kernel could be imported
    xpu_placeholder: bool = False  # sglang-kernel-xpu is installed and brings no module
    triton: str | None = None
    triton_xpu: tuple[str, str] | None = None  # name and version of the build for Intel GPUs
    vllm_xpu_found: bool = False  # vllm_xpu_kernels is on the path
    probes: tuple[Probed, ...] = ()  # only asked on an Intel GPU, of the packages that are there
    providers: tuple[str, ...] = tuple(PROVIDERS)  # modules of fa_fast.kernels that exist

    @property
    def kind(self) -> str:
        """The device fa_fast would use: cuda, else xpu, else cpu."""
        kinds = {device.kind for device in self.devices}
        return next((kind for kind in ("cuda", "xpu") if kind in kinds), "cpu")

    @property
    def build(self) -> str:
        """The build of torch in a word or two."""
        if self.cuda_runtime:
            return f"CUDA {self.cuda_runtime} build"
        kinds = {device.kind for device in self.devices} | ({"xpu"} if self.xpu_runtime else set())
        return next((f"{kind.upper()} build" for kind in ("xpu", "rocm") if kind in kinds), "CPU build")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report. `fix` is a command or an instruction."""

    level: str  # ok, note, broken
    text: str
    fix: str | None = None


def diagnose(machine: Machine) -> tuple[Finding, ...]:
    """Everything worth saying about a machine, in the order in which it should be fixed.

    >>> diagnose(Machine(torch="2.13.0+cpu"))[0].text
    'torch 2.13.0+cpu (CPU build)'
    """
    if machine.torch is None:
        reason = machine.torch_error or "it is not installed"
        return (
            Finding(
                level="broken",
                text=f"torch cannot be imported: {reason}",
                fix="python -m pip install torch",
            ),
        )
    findings = [Finding(level="ok", text=f"torch {machine.torch} ({machine.build})")]
    findings += _devices(machine)
    findings += _owners(machine)
    findings += {"cuda": _cuda, "xpu": _xpu, "cpu": _cpu}[machine.kind](machine)
    findings += _triton(machine)
    return tuple(findings)


def exit_code(findings: Iterable[Finding]) -> int:
    """1 when anything is broken, else 0."""
    return int(any(finding.level == "broken" for finding in findings))


def _devices(machine: Machine) -> list[Finding]:
    found = [Finding(level="ok", text=f"device {_device_line(device)}") for device in machine.devices]
    if machine.kind == "cpu":
        found.append(Finding(level="ok", text="device cpu"))
    if any(device.kind == "rocm" for device in machine.devices):
        found.append(Finding(level="note", text="fa_fast has no kernels for ROCm: it runs on the CPU of this machine"))
    if machine.nvidia_driver and machine.kind == "cpu":
        found.append(_unused_gpu(machine, machine.nvidia_driver))
    if machine.xpu_runtime and machine.kind == "cpu":
        found.append(
            Finding(
                level="note",
                text=f"torch is an {machine.build} and sees no Intel GPU",
                fix="check the driver, and that this user may open /dev/dri/renderD*",
            )
        )
    return found


def _unused_gpu(machine: Machine, driver: str) -> Finding:
    """A GPU that torch cannot see: the build has no CUDA, or a newer CUDA than the driver knows."""
    row = distributions.recommend(None, _driver_cuda(driver))
    text = f"an NVIDIA driver ({driver}) is present, but torch ({machine.build}) sees no GPU"
    return Finding(level="note", text=text, fix=f"python -m pip uninstall -y torch && {row.install}")


def _owners(machine: Machine) -> list[Finding]:
    if len(machine.owners) < 2:
        return []
    names = " and ".join(f"{name} {version}" for name, version in machine.owners)
    uninstall = "python -m pip uninstall -y " + " ".join(name for name, _ in machine.owners)
    row = _recommended(machine)
    return [
        Finding(
            level="broken",
            text=f"{names} both install the module sgl_kernel and overwrite each other's files",
            fix=f"{uninstall} && {row.install}" if machine.kind == "cuda" else uninstall,
        )
    ]


def _cuda(machine: Machine) -> list[Finding]:
    if machine.system != "Linux" or machine.arch != "x86_64":
        this = f"{machine.system} {machine.arch}"
        text = f"the FA3 kernels are published for Linux x86_64 only; this is {this}"
        return [Finding(level="broken", text=text, fix=CPU_WORKS.removeprefix("Until then "))]
    return [*_compute_capability(machine), *_installed_kernels(machine)]


def _compute_capability(machine: Machine) -> list[Finding]:
    found = []
    for compute in sorted({device.compute for device in machine.devices if device.compute}):
        name = f"compute capability {compute[0]}.{compute[1]}"
        if compute[0] == 8:
            found.append(Finding(level="note", text=f"{name}: FA3 is tested on 9.0; some kernel builds leave out 8.x"))
        elif compute != FA3_TESTED:
            text = f"{name}: the FA3 kernels of sgl_kernel need 9.0 (H100, H200); no install changes that"
            found.append(Finding(level="broken", text=text, fix=CPU_WORKS.removeprefix("Until then ")))
    return found


def _installed_kernels(machine: Machine) -> list[Finding]:
    row = _recommended(machine)
    if not machine.module_found:
        text = f"sgl_kernel is not installed. {CPU_WORKS}"
        return [Finding(level="broken", text=text, fix=_install(row))]
    found = []
    if not machine.owners:
        text = "sgl_kernel is on the path, but no installed distribution owns it: its version is unknown"
        found.append(Finding(level="note", text=text))
    for name, version in machine.owners:
        found += _match(machine, name, version)
    if machine.kernel_error:
        text = f"importing sgl_kernel failed: {machine.kernel_error}"
        found.append(Finding(level="broken", text=text, fix=_install(row)))
    elif machine.operator_error:
        text = f"FA3 is called through sgl_kernel's Python functions, which cost host time: {machine.operator_error}"
        found.append(Finding(level="note", text=text))
    else:
        found.append(Finding(level="ok", text="FA3 is called as an operator, by its schema"))
    return found


def _match(machine: Machine, name: str, version: str) -> list[Finding]:
    """Whether an installed kernel wheel was built for the installed torch and its CUDA runtime."""
    assert machine.torch is not None
    installed = distributions.find(name, version)
    if installed is None:
        text = f"sgl_kernel comes from {name} {version}, which is not one of the known wheels: "
        known = ", ".join(row.pin for row in distributions.DISTRIBUTIONS)
        return [Finding(level="note", text=text + known)]
    if installed.fits(machine.torch, machine.cuda_runtime):
        return [Finding(level="ok", text=f"sgl_kernel comes from {name} {version}")]
    text = (
        f"{installed.pin} was built for torch {installed.torch} and CUDA {installed.cuda}; "
        f"installed is torch {machine.torch} ({machine.build})"
    )
    row = _recommended(machine)
    # The wheel for this torch when there is one, else the torch for this wheel.
    fix = row if row.fits(machine.torch, machine.cuda_runtime) else installed
    return [Finding(level="broken", text=text, fix=_replace(machine, fix))]


def _xpu(machine: Machine) -> list[Finding]:
    if "sgl_xpu" not in machine.providers:
        text = f"this version of fa_fast has no provider for Intel GPUs. {CPU_WORKS}"
        return [Finding(level="broken", text=text)]
    usable = _usable_on_xpu(machine)
    found = [Finding(level="note", text="the Intel GPU path is contract-tested, never run on Intel hardware")]
    if "sgl_xpu" in usable:
        found.append(Finding(level="ok", text="sgl_kernel is installed"))
    else:
        found.append(_no_sgl_xpu(machine, "note" if usable else "broken"))
        found += [Finding(level="ok", text=f'provider="{name}" runs here: pass it to the backend') for name in usable]
    if not machine.xpu_graphs:
        text = (
            f"no graphs: torch {machine.torch} has no torch.xpu.XPUGraph, which fa_fast.graphs needs; steps run without"
        )
        found.append(Finding(level="note", text=text, fix="install torch 2.11 or newer, and build the kernels for it"))
    return found + [line for probed in machine.probes for line in _probed(probed)]


def _usable_on_xpu(machine: Machine) -> list[str]:
    """Providers of Intel GPUs whose package is there and can attend."""
    there = {"sgl_xpu": machine.module_found, "vllm_xpu": machine.vllm_xpu_found}
    failed = {probed.provider for probed in machine.probes if probed.error}
    return [name for name in machine.providers if there.get(name) and name not in failed]


def _no_sgl_xpu(machine: Machine, level: str) -> Finding:
    """Why the default provider of Intel GPUs does not run."""
    error = next((probed.error for probed in machine.probes if probed.provider == "sgl_xpu"), None)
    if error:
        return Finding(level=level, text=f"sgl_kernel cannot be used: {error}", fix=XPU_RECIPE)
    placeholder = " (sglang-kernel-xpu from the package index is an empty placeholder)"
    text = f"sgl_kernel is not installed{placeholder if machine.xpu_placeholder else ''}."
    return Finding(level=level, text=text if level == "note" else f"{text} {CPU_WORKS}", fix=XPU_RECIPE)


def _probed(probed: Probed) -> list[Finding]:
    """What the probe said of one package; what failed there is refused by name."""
    name = probed.provider
    if probed.error:
        text = f"{XPU_PACKAGES[name]} cannot be used: {probed.error}"
        return [] if name == "sgl_xpu" else [Finding(level="note", text=text)]  # of the default it has been said
    right = ", ".join(question for question, verdict in probed.verdicts if verdict)
    notes = [f"{name}: a wrong answer, so refused or not used: {note}" for note in probed.notes]
    found = [Finding(level="ok", text=f"{name}: the kernels' answers are right for {right}")] if right else []
    return found + [Finding(level="note", text=note) for note in notes]


def _cpu(machine: Machine) -> list[Finding]:
    if not machine.module_found:
        return []
    return [Finding(level="note", text="sgl_kernel is installed but unused: torch sees no GPU it could run on")]


def _triton(machine: Machine) -> list[Finding]:
    if machine.triton and machine.triton_xpu:
        return [_two_tritons(machine, machine.triton_xpu)]
    if machine.triton_xpu:
        return [Finding(level="ok", text=" ".join(machine.triton_xpu))]
    if machine.triton and machine.build == "XPU build":
        text = (
            f"triton {machine.triton} is not the build for Intel GPUs ({XPU_TRITON[0]}); fa_fast needs neither of them"
        )
        return [Finding(level="note", text=text)]
    if machine.triton:
        return [Finding(level="ok", text=f"triton {machine.triton}")]
    if machine.kind != "cuda":
        needless = {"cpu": "the CPU provider does not need it", "xpu": "Intel GPUs do not need it"}[machine.kind]
        return [Finding(level="note", text=f"triton is not installed; {needless}")]
    return [
        Finding(
            level="broken",
            text=f"triton is not installed; fa_fast plans batches on {machine.kind} with it",
            fix="python -m pip install triton",
        )
    ]


def _two_tritons(machine: Machine, other: tuple[str, str]) -> Finding:
    """The one that torch was built with is installed anew: uninstalling the other takes its files away."""
    name, version = other
    wanted = f"triton=={machine.triton}" if machine.cuda_runtime else f"{name}=={version} --index-url {XPU_INDEX}"
    both = f"triton {machine.triton} and {name} {version}"
    return Finding(
        level="broken",
        text=f"{both} both install the folder triton and overwrite each other's files",
        fix=f"python -m pip uninstall -y triton {name} && python -m pip install --no-deps {wanted}",
    )


def _recommended(machine: Machine) -> distributions.KernelDistribution:
    return distributions.recommend(machine.torch, distributions.major_version(machine.cuda_runtime))


def _install(row: distributions.KernelDistribution) -> str:
    return f"{row.install}    (the extra {row.extra})" if row.extra else row.install


def _replace(machine: Machine, row: distributions.KernelDistribution) -> str:
    """Both names own the same files, so another name has to go before this one is installed."""
    others = [name for name, _ in machine.owners if name != row.name]
    uninstall = f"python -m pip uninstall -y {' '.join(others)} && " if others else ""
    return uninstall + _install(row)


def _driver_cuda(driver: str) -> int:
    """CUDA 13 needs driver 580 or newer."""
    return 13 if int(driver.split(".")[0]) >= 580 else 12


def _device_line(device: Device) -> str:
    compute = f", compute capability {device.compute[0]}.{device.compute[1]}" if device.compute else ""
    return f"{device.kind}: {device.name}{compute}"


# ---- reading the machine ---------------------------------------------------------------------------------


def gather() -> Machine:
    """The facts of this machine."""
    torch_facts = _torch_facts()
    module_found = importlib.util.find_spec(distributions.MODULE) is not None
    owners = _owning_distributions()
    has_cuda = any(device.kind == "cuda" for device in torch_facts.get("devices", ()))
    owner_names = {name for name, _ in owners}
    kernel_error = _kernel_error() if has_cuda and module_found else None
    has_xpu = not has_cuda and any(device.kind == "xpu" for device in torch_facts.get("devices", ()))
    vllm_xpu_found = importlib.util.find_spec(XPU_PACKAGES["vllm_xpu"]) is not None
    there = dict(sgl_xpu=module_found, vllm_xpu=vllm_xpu_found)
    return Machine(
        python=platform.python_version(),
        system=platform.system(),
        arch=platform.machine(),
        nvidia_driver=_nvidia_driver(),
        owners=owners,
        module_found=module_found,
        kernel_error=kernel_error,
        operator_error=_operator_error() if has_cuda and module_found and not kernel_error else None,
        xpu_placeholder=_version(distributions.XPU_PLACEHOLDER) is not None
        and distributions.XPU_PLACEHOLDER not in owner_names,
        triton=_version("triton"),
        triton_xpu=next(((name, version) for name in XPU_TRITON if (version := _version(name))), None),
        vllm_xpu_found=vllm_xpu_found,
        probes=tuple(_asked(name) for name, found in there.items() if has_xpu and found),
        providers=tuple(name for name in PROVIDERS if importlib.util.find_spec(f"fa_fast.kernels.{name}")),
        **torch_facts,
    )


def _asked(name: str) -> Probed:
    """Load a provider of Intel GPUs, which asks its kernels once, and read what they answered."""
    provider: Any = importlib.import_module(f"fa_fast.kernels.{name}")
    try:
        provider.load()
    except Exception as error:  # not importable, or wrong in plain attention
        return Probed(provider=name, error=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
    return Probed(provider=name, verdicts=tuple(provider.VERDICTS.rows()), notes=provider.VERDICTS.notes)


def _torch_facts() -> dict[str, Any]:
    try:
        import torch
    except Exception as error:  # a broken shared library raises OSError, an old numpy ImportError
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        return {"torch_error": None if missing else f"{type(error).__name__}: {error}"}
    devices: list[Device] = []
    if torch.cuda.is_available():
        kind = "rocm" if torch.version.hip else "cuda"
        for index in range(torch.cuda.device_count()):
            compute = torch.cuda.get_device_capability(index) if kind == "cuda" else None
            devices.append(Device(kind=kind, name=torch.cuda.get_device_name(index), compute=compute))
    if torch.xpu.is_available():
        devices += [
            Device(kind="xpu", name=torch.xpu.get_device_name(index)) for index in range(torch.xpu.device_count())
        ]
    xpu_runtime = getattr(torch.version, "xpu", None)
    return {
        "torch": torch.__version__,
        "cuda_runtime": torch.version.cuda,
        "xpu_runtime": xpu_runtime,
        "xpu_graphs": xpu_runtime is None or hasattr(torch.xpu, "XPUGraph"),
        "devices": tuple(devices),
    }


def _owning_distributions() -> tuple[tuple[str, str], ...]:
    names = importlib.metadata.packages_distributions().get(distributions.MODULE, [])
    return tuple((name, importlib.metadata.version(name)) for name in sorted(set(names)))


def _kernel_error() -> str | None:
    try:
        importlib.import_module(f"{distributions.MODULE}.flash_attn")
    except Exception as error:  # ImportError, OSError of a missing library, RuntimeError of a duplicate op
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return None


def _operator_error() -> str | None:
    found = importlib.import_module("fa_fast.kernels.fa3_op").find_operator()
    return found if isinstance(found, str) else None


def _nvidia_driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", path.read_text()) if path.exists() else None
    return match[1] if match else None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- the report ------------------------------------------------------------------------------------------


def capability_rows(capability: Any) -> list[tuple[str, str]]:
    """(field, value) of a Capability record as text, in the record's own order.

    `None` means any; sets are sorted; a head-dim pair is "qk/v", or one number where the two are equal.
    """
    return [(field.name, _text(getattr(capability, field.name))) for field in dataclasses.fields(capability)]


def _text(value: Any) -> str:
    if value is None:
        return "any"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return str(value[0]) if len(set(value)) == 1 else "/".join(map(str, value))
    if isinstance(value, (frozenset, set)):
        numbers = all(isinstance(item, (int, tuple)) for item in value)
        return ", ".join(_text(item) for item in (sorted(value) if numbers else sorted(value, key=str)))
    return str(value).removeprefix("torch.")


def capabilities(machine: Machine) -> tuple[Any, ...]:
    """The Capability records of the providers this machine can choose: its device's, and the CPU's."""
    if machine.torch is None:
        return ()
    on_xpu = _usable_on_xpu(machine) if machine.kind == "xpu" else []
    wanted = dict.fromkeys((*on_xpu, _chosen(machine), "torch_cpu"))
    names = [name for name in wanted if name in machine.providers]
    return tuple(importlib.import_module(f"fa_fast.kernels.{name}").CAPABILITY for name in names)


def _chosen(machine: Machine) -> str:
    """The provider that runs here: the device's default, or on an Intel GPU the one whose package is there."""
    default = next(name for name, kind in PROVIDERS.items() if kind == machine.kind)
    return next(iter(_usable_on_xpu(machine)), default) if machine.kind == "xpu" else default


def render(machine: Machine, findings: Iterable[Finding], records: Iterable[Any]) -> str:
    """The report as text."""
    findings = tuple(findings)
    lines = [f"Python {machine.python} on {machine.system} {machine.arch}"]
    for finding in findings:
        lines.append(f"{finding.level:<7} {finding.text}")
        if finding.fix:
            lines.append(f"{'':<7} fix: {finding.fix}")
    for record in records:
        rows = capability_rows(record)
        width = max(len(name) for name, _ in rows)
        lines += ["", *(f"{name:<{width}}  {value}" for name, value in rows)]
    broken = sum(finding.level == "broken" for finding in findings)
    lines += ["", f"{broken} broken" if broken else f"fa_fast runs here on {_chosen(machine)}"]
    return "\n".join(lines)


def as_json(machine: Machine, findings: Iterable[Finding], records: Iterable[Any]) -> str:
    """The report as JSON: ok, machine, findings, capabilities."""
    findings = tuple(findings)
    report = {
        "ok": exit_code(findings) == 0,
        "device": machine.kind,
        "machine": dataclasses.asdict(machine),
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "capabilities": [dict(capability_rows(record)) for record in records],
    }
    return json.dumps(report, indent=2)


def main(argv: list[str] | None = None) -> int:
    """Print the report; the exit code is 1 when something is broken."""
    parser = argparse.ArgumentParser(prog="python -m fa_fast.doctor", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    machine = gather()
    findings = diagnose(machine)
    try:
        print((as_json if arguments.json else render)(machine, findings, capabilities(machine)), flush=True)
    except BrokenPipeError:  # the reader has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_code(findings)


if __name__ == "__main__":
    sys.exit(main())
