"""Bundle of other engines: a tar file of folders for PYTHONPATH, made online (README.md)."""

from __future__ import annotations

import tarfile
from pathlib import Path

FA3_FOLDER = "site-shim"  # flash_attn_interface over the library below
FA3_LIBRARY = "site-vllm/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"


def unpack(bundle: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(bundle) as archive:
        archive.extractall(folder, filter="data")
    return folder
