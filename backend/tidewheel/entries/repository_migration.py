from __future__ import annotations

from pathlib import Path

from tidewheel.entries.checking import find_target
from tidewheel.entries.migration import Migration, NewEntry
from tidewheel.entries.trtllm_entry import find_parts, from_trtllm
from tidewheel.entries.vllm_entry import BACKEND as VLLM
from tidewheel.entries.vllm_entry import from_vllm, read_entry
from tidewheel.errors import ConfigError


def migrate(path: Path, model: str = "") -> Migration:
    """Migrate an entry, or all of a repository, whose other entries come along as they are.

    Empty `model`: the one that each entry names. Raise `ConfigError`.
    """
    target = find_target(path)
    entries = [read_entry(target.repository / name) for name in target.names]
    parts = find_parts(entries)
    if parts and path.resolve() != target.repository.resolve():
        raise ConfigError(f"{path} is a part of a model of several entries: name the model repository")
    vllm = [entry for entry in entries if entry.config.backend == VLLM]
    if not vllm and not parts:
        raise ConfigError(f"{path} has no entry of Triton's vLLM or TensorRT-LLM backend")
    if model and len(vllm) + len(parts) > 1:
        raise ConfigError(
            f"--model is for one model, and {path} has {len(vllm) + len(parts)}: migrate each by itself"
        )
    done = [from_vllm(entry, model) for entry in vllm] + [from_trtllm(one, model) for one in parts]
    replaced = {entry.name for entry in vllm} | {part.name for one in parts for part in one.all}
    kept = [NewEntry(entry.name, {}, entry.folder) for entry in entries if entry.name not in replaced]
    return Migration(
        [new for one in done for new in one.entries] + kept,
        [loss for one in done for loss in one.lost],
        [finding for one in done for finding in one.unknown],
    )
