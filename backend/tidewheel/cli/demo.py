"""`tidewheel demo`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tidewheel.cli.serve import DEFAULT_REPOSITORY
from tidewheel.cli.usage import UsageError, show

if TYPE_CHECKING:
    from tidewheel.server.endpoints import Endpoints
    from tidewheel_client import Client

MODEL = "demo"
PROMPTS = ("A tuple is", "The server process", "To create a table")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model-repository",
        type=Path,
        default=DEFAULT_REPOSITORY,
        metavar="DIR",
        help="with the entry demo (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=80, metavar="N", help="longest text in tokens (default: %(default)s)"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show all that tritonserver and its stubs print")


def run(args: argparse.Namespace) -> int:
    from tidewheel.server.endpoints import Endpoints
    from tidewheel.server.run_server import ServeOptions, serve

    if not args.model_repository.is_dir():
        raise UsageError(
            f"no folder {str(args.model_repository)!r} here: the demo model comes with Tidewheel's source; run this "
            "there, or name its model_repository with --model-repository"
        )
    session = _Session(args.max_tokens)
    options = ServeOptions(
        model_repository=args.model_repository,
        models=(MODEL,),  # loading the others takes time
        settings={},
        endpoints=Endpoints(),
        drain_s=0.0,
        verbose=args.verbose,
    )
    code = serve(options, session.run)
    if session.error is not None:
        raise session.error
    return code


class _Session:
    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.error: Exception | None = None

    def run(self, endpoints: Endpoints) -> None:
        from tidewheel_client import Client, RequestError

        try:
            with Client(endpoints.authority(endpoints.grpc), MODEL) as client:
                for seed, prompt in enumerate(PROMPTS):
                    self._write(client, prompt, seed)
        except RequestError as error:
            self.error = error

    def _write(self, client: Client, prompt: str, seed: int) -> None:
        print(f"\n> {prompt}", end="", flush=True)
        with client.stream(prompt, max_tokens=self._max_tokens, temperature=0.7, seed=seed) as stream:
            print(f"  ({show(stream).stats})", flush=True)
