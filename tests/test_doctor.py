"""The doctor's verdict, fix line and exit code on machines we do not own."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fa_fast import doctor
from fa_fast.doctor import Device, Machine, Probed, diagnose, exit_code
from fa_fast.kernels import distributions, select

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    tomllib = None

ROOT = Path(__file__).parent.parent
H200 = Device(kind="cuda", name="NVIDIA H200", compute=(9, 0))
CUDA12 = Machine(torch="2.9.1+cu128", cuda_runtime="12.8", devices=(H200,), triton="3.5.1")
CUDA13 = Machine(torch="2.11.0+cu130", cuda_runtime="13.0", devices=(H200,), triton="3.6.0")
CPU = Machine(torch="2.13.0+cpu")


def broken(machine: Machine) -> list[tuple[str, str | None]]:
    return [(finding.text, finding.fix) for finding in diagnose(machine) if finding.level == "broken"]


def notes(machine: Machine) -> list[tuple[str, str | None]]:
    return [(finding.text, finding.fix) for finding in diagnose(machine) if finding.level == "note"]


def with_kernel(machine: Machine, *owners: tuple[str, str], **changes: object) -> Machine:
    return dataclasses.replace(machine, owners=owners, module_found=True, **changes)


def test_a_machine_without_torch_is_broken():
    assert broken(Machine()) == [("torch cannot be imported: it is not installed", "python -m pip install torch")]
    assert exit_code(diagnose(Machine())) == 1


def test_a_torch_that_fails_to_load_says_why():
    machine = Machine(torch_error="OSError: libcudart.so.12: cannot open shared object file")
    assert broken(machine)[0][0].endswith("libcudart.so.12: cannot open shared object file")


def test_a_cpu_machine_runs_without_kernels_and_without_triton():
    assert broken(CPU) == []
    assert exit_code(diagnose(CPU)) == 0
    assert notes(CPU) == [("triton is not installed; the CPU provider does not need it", None)]


def test_a_cuda_12_machine_without_kernels_gets_the_cuda12_pins():
    assert broken(CUDA12) == [
        (
            'sgl_kernel is not installed. Until then BackendConfig(device="cpu") runs here, on the provider torch_cpu.',
            "python -m pip install sglang-kernel==0.4.1.post1 torch==2.9.1    (the extra cuda12)",
        )
    ]
    assert exit_code(diagnose(CUDA12)) == 1


@pytest.mark.parametrize(
    ("torch", "cuda", "extra"),
    [
        ("2.11.0+cu130", "13.0", "cuda13-torch211"),
        ("2.14.1+cu130", "13.0", "cuda13"),
        ("2.13.0+cu130", "13.0", "cuda13"),
        ("2.8.0+cu126", "12.6", "cuda12"),
    ],
)
def test_the_recommended_extra_follows_the_installed_torch_and_cuda(torch, cuda, extra):
    machine = dataclasses.replace(CUDA13, torch=torch, cuda_runtime=cuda)
    (_, fix), *_ = broken(machine)
    row = distributions.EXTRAS[extra]
    assert fix == f"python -m pip install {row.pin} torch=={row.torch}    (the extra {extra})"


@pytest.mark.parametrize(
    ("machine", "owner"),
    [
        (CUDA12, ("sgl-kernel", "0.3.21")),
        (CUDA12, ("sglang-kernel", "0.4.1.post1")),
        (CUDA13, ("sglang-kernel", "0.4.2.post2")),
        (CUDA13, ("sglang-kernel", "0.4.4")),
    ],
)
def test_a_matching_kernel_is_healthy(machine, owner):
    machine = with_kernel(machine, owner)
    assert broken(machine) == []
    assert notes(machine) == []
    assert any(finding.text == f"sgl_kernel comes from {owner[0]} {owner[1]}" for finding in diagnose(machine))


def test_two_distributions_owning_the_module_are_broken_even_if_one_matches():
    machine = with_kernel(CUDA13, ("sgl-kernel", "0.3.21"), ("sglang-kernel", "0.4.2.post2"))
    text, fix = broken(machine)[0]
    assert text == (
        "sgl-kernel 0.3.21 and sglang-kernel 0.4.2.post2 both install the module sgl_kernel "
        "and overwrite each other's files"
    )
    assert fix == (
        "python -m pip uninstall -y sgl-kernel sglang-kernel && "
        "python -m pip install sglang-kernel==0.4.2.post2 torch==2.11.0"
    )


def test_two_distributions_are_broken_on_a_cpu_machine_too():
    machine = with_kernel(CPU, ("sgl-kernel", "0.3.21"), ("sglang-kernel", "0.4.4"))
    assert broken(machine)[0][1] == "python -m pip uninstall -y sgl-kernel sglang-kernel"
    assert exit_code(diagnose(machine)) == 1


def test_a_cuda_13_kernel_under_a_cuda_12_torch_is_replaced_by_the_one_for_that_torch():
    machine = with_kernel(CUDA12, ("sglang-kernel", "0.4.4"))
    assert broken(machine) == [
        (
            "sglang-kernel==0.4.4 was built for torch 2.11.0 and CUDA 13; "
            "installed is torch 2.9.1+cu128 (CUDA 12.8 build)",
            "python -m pip install sglang-kernel==0.4.1.post1 torch==2.9.1    (the extra cuda12)",
        )
    ]


def test_the_old_name_is_uninstalled_before_the_new_one_goes_in():
    machine = with_kernel(CUDA13, ("sgl-kernel", "0.3.21"))
    assert broken(machine)[0][1] == (
        "python -m pip uninstall -y sgl-kernel && "
        "python -m pip install sglang-kernel==0.4.2.post2 torch==2.11.0    (the extra cuda13-torch211)"
    )


def test_a_torch_no_kernel_was_built_for_is_replaced_to_match_the_kernel():
    machine = dataclasses.replace(CUDA13, torch="2.12.0+cu130")
    machine = with_kernel(machine, ("sglang-kernel", "0.4.4"))
    assert broken(machine)[0][1] == "python -m pip install sglang-kernel==0.4.4 torch==2.11.0"


def test_the_report_says_how_fa3_is_called():
    machine = with_kernel(CUDA13, ("sglang-kernel", "0.4.2.post2"))
    assert "FA3 is called as an operator, by its schema" in [finding.text for finding in diagnose(machine)]
    machine = dataclasses.replace(machine, operator_error="torch.ops.sgl_kernel.fwd takes warps")
    assert notes(machine) == [
        (
            "FA3 is called through sgl_kernel's Python functions, which cost host time: torch.ops.sgl_kernel.fwd "
            "takes warps",
            None,
        )
    ]
    assert broken(machine) == []
    failed = dataclasses.replace(machine, kernel_error="ImportError: no", operator_error=None)
    assert not any("FA3 is called" in finding.text for finding in diagnose(failed))


def test_a_kernel_that_fails_to_import_is_broken_with_its_own_words():
    machine = with_kernel(
        CUDA13, ("sglang-kernel", "0.4.2.post2"), kernel_error="ImportError: undefined symbol: _ZN3c10"
    )
    assert broken(machine) == [
        (
            "importing sgl_kernel failed: ImportError: undefined symbol: _ZN3c10",
            "python -m pip install sglang-kernel==0.4.2.post2 torch==2.11.0    (the extra cuda13-torch211)",
        )
    ]


def test_a_module_nobody_owns_is_used_and_reported():
    machine = with_kernel(CUDA13)
    assert broken(machine) == []
    assert notes(machine)[0][0].startswith("sgl_kernel is on the path, but no installed distribution owns it")


def test_an_unknown_kernel_version_is_reported_with_the_known_ones():
    (text, _), *_ = notes(with_kernel(CUDA13, ("sglang-kernel", "0.5.0")))
    assert text.startswith("sgl_kernel comes from sglang-kernel 0.5.0, which is not one of the known wheels: ")
    assert "sglang-kernel==0.4.2.post2" in text


def test_aarch64_has_no_kernel_to_install():
    machine = dataclasses.replace(CUDA13, arch="aarch64")
    assert broken(machine) == [
        (
            "the FA3 kernels are published for Linux x86_64 only; this is Linux aarch64",
            'BackendConfig(device="cpu") runs here, on the provider torch_cpu.',
        )
    ]


@pytest.mark.parametrize(("compute", "level"), [((8, 0), "note"), ((7, 5), "broken"), ((10, 0), "broken")])
def test_a_gpu_that_is_not_hopper_is_named(compute, level):
    gpu = Device(kind="cuda", name="another GPU", compute=compute)
    machine = with_kernel(dataclasses.replace(CUDA13, devices=(gpu,)), ("sglang-kernel", "0.4.4"))
    wanted = f"compute capability {compute[0]}.{compute[1]}:"
    assert [finding.level for finding in diagnose(machine) if finding.text.startswith(wanted)] == [level]


def test_a_cuda_machine_without_triton_is_broken():
    machine = with_kernel(dataclasses.replace(CUDA13, triton=None), ("sglang-kernel", "0.4.4"))
    assert broken(machine) == [
        ("triton is not installed; fa_fast plans batches on cuda with it", "python -m pip install triton")
    ]


def test_an_nvidia_driver_under_a_cpu_torch_is_pointed_out():
    (text, fix), *_ = notes(dataclasses.replace(CPU, nvidia_driver="550.54.15"))
    assert text == "an NVIDIA driver (550.54.15) is present, but torch (CPU build) sees no GPU"
    assert fix == ("python -m pip uninstall -y torch && python -m pip install sglang-kernel==0.4.1.post1 torch==2.9.1")
    (_, fix), *_ = notes(dataclasses.replace(CPU, nvidia_driver="580.95.05"))
    assert fix is not None
    assert "sglang-kernel==0.4.10" in fix


def test_a_torch_too_new_for_the_driver_is_pointed_out():
    machine = Machine(torch="2.14.1+cu130", cuda_runtime="13.0", nvidia_driver="550.54.15", triton="3.7.1")
    (text, fix), *_ = notes(machine)
    assert text == "an NVIDIA driver (550.54.15) is present, but torch (CUDA 13.0 build) sees no GPU"
    assert fix is not None
    assert fix.endswith("python -m pip install sglang-kernel==0.4.1.post1 torch==2.9.1")


INTEL = Device(kind="xpu", name="Intel Data Center GPU Max 1550")
XPU = Machine(
    torch="2.13.0+xpu", xpu_runtime="20250302", devices=(INTEL,), triton_xpu=("triton-xpu", "3.7.1"),
    providers=("torch_cpu", "sgl_cuda", "sgl_xpu"),
)  # fmt: skip


def test_an_intel_gpu_gets_the_source_recipe():
    assert broken(XPU) == [
        (
            'sgl_kernel is not installed. Until then BackendConfig(device="cpu") runs here, on the provider torch_cpu.',
            "in a checkout of sgl-kernel-xpu: source /opt/intel/oneapi/setvars.sh && python -m pip install -v .",
        )
    ]
    assert exit_code(diagnose(XPU)) == 1


def test_the_placeholder_package_is_called_a_placeholder():
    (text, _), *_ = broken(dataclasses.replace(XPU, xpu_placeholder=True))
    assert "sglang-kernel-xpu from the package index is an empty placeholder" in text


NEVER_RUN = "the Intel GPU path is contract-tested, never run on Intel hardware"
RIGHT = Probed(provider="sgl_xpu", verdicts=(("plain", True), ("softcap", True), ("merge", None)))
WRONG = Probed(
    provider="sgl_xpu",
    verdicts=(("plain", True), ("softcap", False)),
    notes=("softcap, 1 per sequence: [0.9] for [0.7]",),
)


def test_an_intel_gpu_with_kernels_is_healthy_and_says_what_was_never_run():
    machine = dataclasses.replace(XPU, module_found=True, probes=(RIGHT,))
    assert broken(machine) == []
    assert notes(machine) == [(NEVER_RUN, None)]
    said = [finding.text for finding in diagnose(machine)]
    assert "sgl_xpu: the kernels' answers are right for plain, softcap" in said
    assert doctor.render(machine, diagnose(machine), ()).endswith("fa_fast runs here on sgl_xpu")


def test_what_an_intel_gpu_s_kernels_get_wrong_is_in_the_report():
    machine = dataclasses.replace(XPU, module_found=True, probes=(WRONG,))
    assert broken(machine) == []
    text = "sgl_xpu: a wrong answer, so refused or not used: softcap, 1 per sequence: [0.9] for [0.7]"
    assert notes(machine) == [(NEVER_RUN, None), (text, None)]
    assert json.loads(doctor.as_json(machine, diagnose(machine), ()))["machine"]["probes"][0]["verdicts"] == [
        ["plain", True],
        ["softcap", False],
    ]


def test_kernels_that_cannot_attend_on_an_intel_gpu_are_broken():
    machine = dataclasses.replace(XPU, module_found=True, probes=(Probed(provider="sgl_xpu", error="ImportError: no"),))
    assert broken(machine) == [("sgl_kernel cannot be used: ImportError: no", doctor.XPU_RECIPE)]


@pytest.mark.parametrize("sgl", [False, True], ids=["no-sgl", "sgl-fails"])
def test_the_other_package_alone_serves_an_intel_gpu_by_name(sgl):
    failed = (Probed(provider="sgl_xpu", error="OSError: x"),) if sgl else ()
    machine = dataclasses.replace(XPU, module_found=sgl, vllm_xpu_found=True, probes=failed)
    machine = dataclasses.replace(machine, providers=tuple(doctor.PROVIDERS))
    assert broken(machine) == []
    said = [finding.text for finding in diagnose(machine)]
    assert 'provider="vllm_xpu" runs here: pass it to the backend' in said
    assert [record.provider for record in doctor.capabilities(machine)] == ["vllm_xpu", "torch_cpu"]
    assert doctor.render(machine, diagnose(machine), ()).endswith("fa_fast runs here on vllm_xpu")


def test_the_other_package_that_cannot_be_used_is_named():
    probes = (RIGHT, Probed(provider="vllm_xpu", error="OSError: libsycl"))
    machine = dataclasses.replace(XPU, module_found=True, vllm_xpu_found=True, probes=probes)
    assert broken(machine) == []
    assert ("vllm_xpu_kernels cannot be used: OSError: libsycl", None) in notes(machine)


def test_triton_is_not_needed_on_an_intel_gpu():
    machine = dataclasses.replace(XPU, module_found=True, triton_xpu=None)
    assert notes(machine) == [(NEVER_RUN, None), ("triton is not installed; Intel GPUs do not need it", None)]


@pytest.mark.parametrize("name", ["triton-xpu", "pytorch-triton-xpu"])
def test_the_triton_of_intel_gpus_is_reported_by_its_name(name):
    machine = dataclasses.replace(XPU, module_found=True, triton_xpu=(name, "3.7.1"))
    assert notes(machine) == [(NEVER_RUN, None)]
    assert diagnose(machine)[-1] == doctor.Finding(level="ok", text=f"{name} 3.7.1")


def test_two_tritons_in_one_folder_are_broken_and_the_one_of_torch_is_installed_anew():
    machine = dataclasses.replace(XPU, module_found=True, triton="3.6.0")
    text = "triton 3.6.0 and triton-xpu 3.7.1 both install the folder triton and overwrite each other's files"
    uninstall = "python -m pip uninstall -y triton triton-xpu && python -m pip install --no-deps "
    index = "--index-url https://download.pytorch.org/whl/xpu"
    assert broken(machine) == [(text, f"{uninstall}triton-xpu==3.7.1 {index}")]
    machine = with_kernel(CUDA13, ("sglang-kernel", "0.4.4"), triton_xpu=("triton-xpu", "3.7.1"))
    ((_, fix),) = broken(machine)
    assert fix == f"{uninstall}triton==3.6.0"


def test_a_triton_for_other_devices_is_not_taken_for_that_of_intel_gpus():
    machine = dataclasses.replace(XPU, module_found=True, triton="3.6.0", triton_xpu=None)
    assert broken(machine) == []
    assert notes(machine)[1][0].startswith("triton 3.6.0 is not the build for Intel GPUs (triton-xpu)")


def test_a_torch_without_graphs_of_intel_gpus_has_no_graphs():
    machine = dataclasses.replace(XPU, module_found=True, torch="2.10.0+xpu", xpu_graphs=False)
    assert broken(machine) == []
    ((text, fix),) = [(text, fix) for text, fix in notes(machine) if "graphs" in text]
    assert text.startswith("no graphs: torch 2.10.0+xpu has no torch.xpu.XPUGraph")
    assert fix == "install torch 2.11 or newer, and build the kernels for it"


def test_a_torch_for_intel_gpus_that_sees_none_says_so():
    machine = dataclasses.replace(XPU, devices=())
    assert diagnose(machine)[0].text == "torch 2.13.0+xpu (XPU build)"
    text = "torch is an XPU build and sees no Intel GPU"
    assert notes(machine) == [(text, "check the driver, and that this user may open /dev/dri/renderD*")]


def test_the_doctor_reads_what_this_torch_and_its_triton_are(monkeypatch):
    import torch

    versions = {"pytorch-triton-xpu": "3.3.0", "triton": "3.6.0"}
    monkeypatch.setattr(doctor, "_version", versions.get)
    monkeypatch.setattr(torch.version, "xpu", "20250302", raising=False)
    monkeypatch.delattr(torch.xpu, "XPUGraph", raising=False)
    machine = doctor.gather()
    assert (machine.triton, machine.triton_xpu) == ("3.6.0", ("pytorch-triton-xpu", "3.3.0"))
    assert (machine.xpu_runtime, machine.xpu_graphs) == ("20250302", False)


def test_an_intel_gpu_without_a_provider_in_this_version_is_broken():
    machine = dataclasses.replace(XPU, providers=("torch_cpu", "sgl_cuda"))
    assert broken(machine)[0][0].startswith("this version of fa_fast has no provider for Intel GPUs")


def test_macos_runs_on_the_cpu_provider():
    machine = Machine(system="Darwin", arch="arm64", torch="2.13.0")
    assert exit_code(diagnose(machine)) == 0
    report = doctor.render(machine, diagnose(machine), ())
    assert report.splitlines()[0] == "Python 3.11.0 on Darwin arm64"
    assert report.splitlines()[-1] == "fa_fast runs here on torch_cpu"


def test_rocm_runs_on_the_cpu_provider_and_says_so():
    machine = Machine(torch="2.13.0+rocm", devices=(Device(kind="rocm", name="MI300X"),), triton="3.7.1")
    assert exit_code(diagnose(machine)) == 0
    assert notes(machine)[0][0] == "fa_fast has no kernels for ROCm: it runs on the CPU of this machine"


def test_the_report_puts_each_fix_under_its_finding():
    lines = doctor.render(CUDA12, diagnose(CUDA12), ()).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("broken  sgl_kernel is not installed"))
    assert lines[at + 1].strip().startswith("fix: python -m pip install sglang-kernel==0.4.1.post1")
    assert lines[-1] == "1 broken"


def test_the_json_report_carries_the_verdict_and_the_facts():
    report = json.loads(doctor.as_json(CUDA12, diagnose(CUDA12), ()))
    assert report["ok"] is False
    assert report["device"] == "cuda"
    assert report["machine"]["cuda_runtime"] == "12.8"
    assert {"level", "text", "fix"} == set(report["findings"][0])


@pytest.mark.skipif(tomllib is None, reason="tomllib needs Python 3.11")
def test_the_extras_of_pyproject_are_the_table_of_distributions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    cuda_extras = {name: lines for name, lines in extras.items() if name.startswith("cuda")}
    marker = "sys_platform == 'linux' and platform_machine == 'x86_64'"
    assert cuda_extras == {
        extra: [f"{row.pin}; {marker}", f"torch=={row.torch}; {marker}"] for extra, row in distributions.EXTRAS.items()
    }


def test_the_install_page_has_the_row_of_every_extra():
    page = (ROOT / "docs" / "install.md").read_text()
    for extra, row in distributions.EXTRAS.items():
        assert f"| `{extra}` | {row.name} {row.version} | {row.cuda} | {row.torch} |" in page


def test_every_fix_line_installs_a_known_wheel():
    for row in distributions.DISTRIBUTIONS:
        assert distributions.find(row.name, row.version) is row
        assert re.fullmatch(r"python -m pip install sgl(ang)?-kernel==\S+ torch==\d+\.\d+\.\d+", row.install)


def run_doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fa_fast.doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_the_doctor_knows_every_provider_that_can_be_selected():
    assert list(doctor.PROVIDERS.items()) == list(select.PROVIDERS.items())


@pytest.mark.gpu
def test_a_gpu_that_runs_the_gpu_tests_is_healthy():
    done = run_doctor("--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["device"]) == (0, "cuda")
    assert [record["provider"] for record in report["capabilities"]] == ["sgl_cuda", "torch_cpu"]


def test_the_command_reports_this_machine():
    done = run_doctor("--json")
    report = json.loads(done.stdout)
    assert "Warning" not in done.stderr
    assert done.returncode == (0 if report["ok"] else 1)
    assert report["machine"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "torch_cpu" in [record["provider"] for record in report["capabilities"]]


def test_the_capability_table_names_every_field_of_the_record():
    from fa_fast.kernels.torch_cpu import CAPABILITY

    printed = run_doctor().stdout
    for field in dataclasses.fields(CAPABILITY):
        assert re.search(rf"^{field.name}\s", printed, re.MULTILINE), field.name


def test_the_doctor_imports_neither_torch_nor_kernels_until_it_runs():
    code = (
        "import sys, fa_fast.doctor; print([name for name in ('torch', 'triton', 'sgl_kernel') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
