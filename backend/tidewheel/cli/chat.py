import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidewheel.cli import usage
from tidewheel.cli.serve import DEFAULT_REPOSITORY

if TYPE_CHECKING:
    from tidewheel.server.endpoints import Endpoints
    from tidewheel_client import Client

_HELP = "Ctrl-C stops an answer, Ctrl-D ends the chat, /new starts over."
_PROMPT = "> "
_DEMO_MODEL = "demo"
_DEMO_PROMPTS = ("A tuple is", "The server process", "To create a table")
_DEMO_QUESTIONS = ("What is the capital of France?", "Name three things to see there, in one sentence.")
_DEMO_SETTINGS = {"max_model_len": "2048", "kv_cache_memory_mb": "512"}  # enough to talk


def add_chat(parser: argparse.ArgumentParser) -> None:
    usage.add_server_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the first message")
    parser.add_argument("--stats", action="store_true", help="add tokens and times after each answer")
    usage.add_sampling_options(parser)


def run_chat(args: argparse.Namespace) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` line editing and a history
    params = usage.sampling_params(args)
    with usage.connect(args) as client:
        print(f"{client.model} at {client.url}. {_HELP}")
        TerminalChat(client, args.system, params, stats=args.stats).run()
    return 0


class TerminalChat:
    def __init__(self, client: "Client", system: str | None, params: dict[str, object], *, stats: bool) -> None:
        self._client = client
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)
        self._params = params
        self._stats = stats

    def run(self) -> None:
        from tidewheel_client import RequestError

        while (line := _read_line()) is not None:
            if line == "/new":
                self._messages = list(self._opening)
            elif line:
                try:
                    self.ask(line)
                except RequestError as error:
                    print(f"error: {error}", file=sys.stderr)

    def ask(self, question: str) -> None:
        """Send a question and print the answer. Raise `RequestError`; the conversation then lacks the question."""
        messages = [*self._messages, {"role": "user", "content": question}]
        with self._client.stream(messages=messages, **self._params) as stream:  # type: ignore[arg-type]
            answer = usage.show(stream)
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        if self._stats:
            print(answer.stats, file=sys.stderr)


def _read_line() -> str | None:
    try:
        return input(_PROMPT if sys.stdin.isatty() else "").strip()
    except KeyboardInterrupt:
        print()
        return ""
    except EOFError:
        if sys.stdin.isatty():
            print()
        return None


def add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt; without it, or with -, standard input")
    usage.add_server_options(parser)
    parser.add_argument("--stats", action="store_true", help="add tokens and times, on standard error")
    usage.add_sampling_options(parser)


def run_generate(args: argparse.Namespace) -> int:
    prompt = _prompt(args.prompt)
    params = usage.sampling_params(args)
    with usage.connect(args) as client, client.stream(prompt, **params) as stream:  # type: ignore[arg-type]
        answer = usage.show(stream)
    if args.stats:
        print(answer.stats, file=sys.stderr)
    return 0 if answer.finish_reason is not None else usage.INTERRUPTED


def _prompt(argument: str | None) -> str:
    if argument not in (None, "-"):
        return str(argument)
    if sys.stdin.isatty() and argument is None:
        raise usage.UsageError('give a prompt: tidewheel generate "Once upon a time"')
    return sys.stdin.read()


def add_demo(parser: argparse.ArgumentParser) -> None:
    text = "with the entry demo (default: %(default)s)"
    parser.add_argument("--model-repository", type=Path, default=DEFAULT_REPOSITORY, metavar="DIR", help=text)
    text = "a model with a chat template: it is asked two questions, and in a terminal the conversation goes on"
    parser.add_argument("--model", metavar="DIR", help=text)
    text = "longest text in tokens (default: %(default)s)"
    parser.add_argument("--max-tokens", type=int, default=80, metavar="N", help=text)
    parser.add_argument("-v", "--verbose", action="store_true", help="show all that tritonserver and its stubs print")


def run_demo(args: argparse.Namespace) -> int:
    from tidewheel.gateway.gateway_options import StandaloneOptions
    from tidewheel.server.endpoints import Endpoints
    from tidewheel.server.run_server import ServeOptions, serve
    from tidewheel_client import Client

    if args.model is None and not args.model_repository.is_dir():
        raise usage.UsageError(
            f"no folder {str(args.model_repository)!r} here: the demo model comes with Tidewheel's source; run this "
            "there, or name its model_repository with --model-repository"
        )
    errors: list[Exception] = []

    def session(endpoints: "Endpoints") -> None:
        try:
            with Client(endpoints.authority(endpoints.grpc), _DEMO_MODEL) as client:
                if args.model is None:
                    _write(client, args.max_tokens)
                else:
                    _talk(client, endpoints, args.max_tokens)
        except Exception as error:  # raised by `run`, in its own thread
            errors.append(error)

    what: dict[str, Any] = {"model_repository": args.model_repository, "settings": {}, "endpoints": Endpoints()}
    what["models"] = (_DEMO_MODEL,)  # loading the others takes time
    if args.model is not None:
        what = {"model": args.model, "model_name": _DEMO_MODEL, "settings": _DEMO_SETTINGS}
        what["endpoints"] = Endpoints(openai=0)
        what["gateway"] = StandaloneOptions(playground=True)
    code = serve(ServeOptions(**what, drain_s=0.0, restart=False, verbose=args.verbose), session)
    if errors:
        raise errors[0]
    return code


def _write(client: "Client", max_tokens: int) -> None:
    for seed, prompt in enumerate(_DEMO_PROMPTS):
        print(f"\n> {prompt}", end="", flush=True)
        with client.stream(prompt, max_tokens=max_tokens, temperature=0.7, seed=seed) as stream:
            print(f"  ({usage.show(stream).stats})", flush=True)


def _talk(client: "Client", endpoints: "Endpoints", max_tokens: int) -> None:
    conversation = TerminalChat(client, None, {"temperature": 0.0, "max_tokens": max_tokens}, stats=True)
    for question in _DEMO_QUESTIONS:
        print(f"\n> {question}", flush=True)
        conversation.ask(question)
    if sys.stdin.isatty():
        authority = endpoints.authority(endpoints.grpc)
        assert endpoints.openai is not None
        print(
            f"\nThe server stays. In a browser:  http://{endpoints.authority(endpoints.openai)}/playground"
            f"\nIn another terminal:             tidewheel chat --url {authority} --model {_DEMO_MODEL}"
            "\nHere: ask on; /new starts over, Ctrl-D ends the demo."
        )
        conversation.run()
