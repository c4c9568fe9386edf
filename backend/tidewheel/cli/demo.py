from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidewheel.cli.chat import TerminalChat
from tidewheel.cli.serve import DEFAULT_REPOSITORY
from tidewheel.cli.usage import UsageError, show

if TYPE_CHECKING:
    from tidewheel.server.endpoints import Endpoints
    from tidewheel_client import Client

MODEL = "demo"
PROMPTS = ("A tuple is", "The server process", "To create a table")
QUESTIONS = ("What is the capital of France?", "Name three things to see there, in one sentence.")
CHAT_SETTINGS = {"max_model_len": "2048", "kv_cache_memory_mb": "512"}  # enough to talk, whatever there could be


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "with the entry demo (default: %(default)s)"
    parser.add_argument("--model-repository", type=Path, default=DEFAULT_REPOSITORY, metavar="DIR", help=text)
    text = "a model with a chat template: it is asked two questions, and in a terminal the conversation goes on"
    parser.add_argument("--model", metavar="DIR", help=text)
    text = "longest text in tokens (default: %(default)s)"
    parser.add_argument("--max-tokens", type=int, default=80, metavar="N", help=text)
    parser.add_argument("-v", "--verbose", action="store_true", help="show all that tritonserver and its stubs print")


def run(args: argparse.Namespace) -> int:
    from tidewheel.gateway.gateway_options import StandaloneOptions
    from tidewheel.server.endpoints import Endpoints
    from tidewheel.server.run_server import ServeOptions, serve
    from tidewheel_client import Client

    if args.model is None and not args.model_repository.is_dir():
        raise UsageError(
            f"no folder {str(args.model_repository)!r} here: the demo model comes with Tidewheel's source; run this "
            "there, or name its model_repository with --model-repository"
        )
    errors: list[Exception] = []

    def session(endpoints: Endpoints) -> None:
        try:
            with Client(endpoints.authority(endpoints.grpc), MODEL) as client:
                if args.model is None:
                    _write(client, args.max_tokens)
                else:
                    _talk(client, endpoints, args.max_tokens)
        except Exception as error:  # raised by `run`, in its own thread
            errors.append(error)

    what: dict[str, Any] = {"model_repository": args.model_repository, "settings": {}, "endpoints": Endpoints()}
    what["models"] = (MODEL,)  # loading the others takes time
    if args.model is not None:
        what = {"model": args.model, "model_name": MODEL, "settings": CHAT_SETTINGS, "endpoints": Endpoints(openai=0)}
        what["gateway"] = StandaloneOptions(playground=True)
    code = serve(ServeOptions(**what, drain_s=0.0, restart=False, verbose=args.verbose), session)
    if errors:
        raise errors[0]
    return code


def _write(client: Client, max_tokens: int) -> None:
    for seed, prompt in enumerate(PROMPTS):
        print(f"\n> {prompt}", end="", flush=True)
        with client.stream(prompt, max_tokens=max_tokens, temperature=0.7, seed=seed) as stream:
            print(f"  ({show(stream).stats})", flush=True)


def _talk(client: Client, endpoints: Endpoints, max_tokens: int) -> None:
    conversation = TerminalChat(client, None, {"temperature": 0.0, "max_tokens": max_tokens}, stats=True)
    for question in QUESTIONS:
        print(f"\n> {question}", flush=True)
        conversation.ask(question)
    if sys.stdin.isatty():
        authority = endpoints.authority(endpoints.grpc)
        assert endpoints.openai is not None
        print(
            f"\nThe server stays. In a browser:  http://{endpoints.authority(endpoints.openai)}/playground"
            f"\nIn another terminal:             tidewheel chat --url {authority} --model {MODEL}"
            "\nHere: ask on; /new starts over, Ctrl-D ends the demo."
        )
        conversation.run()
