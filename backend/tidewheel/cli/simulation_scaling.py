import argparse

import msgspec

from tidewheel.cli.usage import UsageError
from tidewheel.errors import ConfigError
from tidewheel.fleet.scaling import ScalingSettings
from tidewheel.server.repository import parse_settings
from tidewheel.settings import check_known
from tidewheel.simulate.fleet_choice import check_scaling
from tidewheel.workload.trace_files import read_trace

_GIVEN = ("min_replicas", "max_replicas", "startup_s")  # by options of their own
SETTINGS = tuple(name for name in ScalingSettings.__dataclass_fields__ if name not in _GIVEN)


def scaling_options(args: argparse.Namespace) -> tuple[ScalingSettings, tuple[float, ...]]:
    """Return scaling settings and arrival times of past days. Raise `UsageError` or `ConfigError`."""
    least, most = _replicas(args.replicas)
    if not args.scaling:
        _check_unused(args, least, most)
        return ScalingSettings(min_replicas=least, max_replicas=most), ()
    check_scaling(args.scaling)
    if ":" not in args.replicas:
        raise UsageError(f"--scaling needs --replicas MIN:MAX, not {args.replicas}")
    if args.history is not None and args.scaling != "predictive":
        raise UsageError("--history goes with --scaling predictive")
    values: dict[str, object] = {"min_replicas": least, "max_replicas": most, **_settings(args.scale)}
    if args.startup_s is not None:
        values["startup_s"] = args.startup_s
    try:
        settings = msgspec.convert(values, ScalingSettings, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"--scale: {error}") from None
    return settings, () if args.history is None else tuple(read_trace(args.history).arrivals.tolist())


def _check_unused(args: argparse.Namespace, least: int, most: int) -> None:
    if least != most or ":" in args.replicas:
        raise UsageError(f"--replicas is {args.replicas}: MIN:MAX goes with --scaling")
    for option, value in (("--startup-s", args.startup_s), ("--scale", args.scale), ("--history", args.history)):
        if value not in (None, []):
            raise UsageError(f"{option} goes with --scaling")


def _replicas(text: str) -> tuple[int, int]:
    try:
        numbers = [int(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    match numbers:
        case [count] if count >= 1:
            return count, count
        case [least, most] if 0 <= least <= most and most >= 1:
            return least, most
    raise UsageError(f"--replicas is {text}: it must be a number, at least 1, or MIN:MAX, say 0:4")


def _settings(pairs: list[str]) -> dict[str, str]:
    try:
        values = parse_settings(pairs, "--scale")
        check_known(values, SETTINGS, "--scale: ")
    except ConfigError as error:
        raise UsageError(str(error)) from None
    return values
