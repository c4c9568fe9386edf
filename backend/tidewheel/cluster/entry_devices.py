"""GPUs that a replica needs, as its entries say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tidewheel.cluster.cluster_settings import ClusterSettings
from tidewheel.entries.entry import UnreadableConfig, read_entry
from tidewheel.server import repository


def gpus_of(settings: ClusterSettings, *, has_gpus: bool) -> float:
    """Return the number given, else 1 if an entry's device is cuda, or auto on a cluster with GPUs.

    Raise `ConfigError` for a repository without the entries.
    """
    if settings.replica_gpus is not None:
        return settings.replica_gpus
    devices = {_given(settings.serve_arguments)} if settings.model else set(_of_entries(settings))
    return float("cuda" in devices or ("auto" in devices and has_gpus))


def _given(arguments: list[str]) -> str:
    texts = [text.removeprefix("--set=") for text in arguments]
    return next((text.partition("=")[2] for text in texts if text.startswith("device=")), "auto")


def _of_entries(settings: ClusterSettings) -> Iterator[str]:
    folder = Path(settings.model_repository)
    repository.check_names(folder, settings.models)
    for name in settings.models or repository.entries(folder):
        try:
            entry = read_entry(folder / name)
        except UnreadableConfig:
            continue  # the server says what is wrong with it
        if entry.is_ours and not entry.engine_of:
            yield str(entry.settings.get("device", "auto"))
