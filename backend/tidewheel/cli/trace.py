import argparse
import sys
from pathlib import Path

from tidewheel.cli.usage import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "a recording, of `tidewheel serve --record` or the setting record"
    parser.add_argument("recording", type=Path, metavar="FILE", help=text)
    text = "where to write the trace (default: the recording's name with .trace.json)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)


def run(args: argparse.Namespace) -> int:
    from tidewheel.simulate.replay import Recording
    from tidewheel.simulate.step_trace import write

    out = args.out or args.recording.with_suffix(".trace.json")
    if out.resolve() == args.recording.resolve():
        raise UsageError(f"--out is {out}: it is the recording itself")
    try:
        replayed = write(Recording(args.recording), out)
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}") from None
    if replayed.difference:
        print(f"the trace ends early: {replayed.difference}", file=sys.stderr)
    cut = " (the recording was cut off)" if replayed.is_cut else ""
    print(
        f"{replayed.num_steps} steps and {replayed.num_requests} requests{cut}: open {out} at https://ui.perfetto.dev"
    )
    return 0
