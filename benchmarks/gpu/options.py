from __future__ import annotations

import argparse
from pathlib import Path

TINY = "tiny"
MODEL_NAMES = ("qwen3-0.6b", "llama-3.1-8b")
DRY_MODELS = (TINY,)


def add_common_options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a dry run of the programs")
    made.add_argument(
        "--shape", choices=["real", "tiny"], help="tiny: small sizes and few samples; default on cpu, real on cuda"
    )
    made.add_argument("--models", default="", help=f"comma-separated; default: {', '.join(MODEL_NAMES)}")
    made.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder for results (default: %(default)s)")


def is_dry(options: argparse.Namespace) -> bool:
    return (options.shape or ("tiny" if options.device == "cpu" else "real")) == "tiny"


def model_names(options: argparse.Namespace) -> list[str]:
    known = (*MODEL_NAMES, *DRY_MODELS)
    wanted = [name for name in options.models.split(",") if name]
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"--models {','.join(unknown)}: choose from {', '.join(known)}")
    return wanted or list(DRY_MODELS if is_dry(options) else MODEL_NAMES)
