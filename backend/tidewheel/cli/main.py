"""Command `tidewheel COMMAND`.

Exit codes: 0 done; 1 the server could not start, or part of it died, or `check` found errors; 2 wrong usage, or the
request failed.
"""

import argparse
import io
import sys
from collections.abc import Sequence
from importlib import import_module

from tidewheel.confidential import forbid_core_dumps
from tidewheel.version import __version__

# Command → summary. Its module has add_arguments(parser) and run(args) → exit code, or add_COMMAND and run_COMMAND.
COMMANDS = {
    "serve": "serve a model, or a model repository, through Triton",
    "gateway": "answer in OpenAI's API for one server or several",
    "load": "load a model into a running server",
    "unload": "unload a model from a running server",
    "reload": "load a model of a running server again, as its files are now",
    "cluster": "run replicas on Ray Serve behind one gateway",
    "doctor": "say what this machine can run, and why not",
    "check": "say what is wrong with a model repository before it is deployed",
    "migrate": "turn entries of Triton's vLLM or TensorRT-LLM backend into ours",
    "generate": "send one prompt and stream the answer",
    "chat": "talk to a model",
    "top": "watch a running server: classes, cache, steps, errors, and its slowest requests",
    "enqueue": "add jobs to a durable queue",
    "worker": "answer the jobs of a queue",
    "results": "print what became of a queue's jobs, or cancel some",
    "simulate": "try a deployment under a load, with the real scheduler under a modelled clock",
    "tune": "propose settings from a recorded load, and predict what they change",
    "trace": "turn a recording into a trace of steps and requests that Perfetto opens",
    "bench": "measure any targets on the same requests, and report",
    "demo": "start a server with the demo model, let it write, and end it",
}
# Modules of another name.
_MODULES = {
    **dict.fromkeys(("load", "unload", "reload"), "model_commands"),
    **dict.fromkeys(("enqueue", "worker", "results"), "queue_commands"),
    "generate": "chat",
    "demo": "chat",
    "migrate": "check",
}
_EXIT_CODES = {
    "tidewheel.server.ServeError": 1,
    "tidewheel_process.child.CrashLoop": 1,
    "tidewheel.errors.ConfigError": 1,
    "tidewheel.cluster.ClusterError": 2,
    "tidewheel.top.TopError": 2,
    "tidewheel.cli.usage.UsageError": 2,
    "tidewheel_client.errors.RequestError": 2,
}
_READERS = ("check", "migrate", "cluster")  # commands whose settings and entries are part of their usage


def main(argv: Sequence[str] | None = None) -> int:
    forbid_core_dumps()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # of characters that the locale lacks
    arguments = sys.argv[1:] if argv is None else list(argv)
    args = _parser(arguments[0] if arguments else "").parse_args(arguments)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # such as `tidewheel generate … | head`
        sys.stderr.close()
        return 0
    except Exception as error:
        classes = (f"{cls.__module__}.{cls.__name__}" for cls in type(error).__mro__)
        code = next((_EXIT_CODES[name] for name in classes if name in _EXIT_CODES), None)
        if code is None:
            raise
        print(f"tidewheel: error: {error}", file=sys.stderr)
        return 2 if args.command in _READERS else code


def _parser(only: str | None = None) -> argparse.ArgumentParser:
    """Return the parser. `only`: the command whose options are added (None: all)."""
    parser = argparse.ArgumentParser(
        prog="tidewheel", description="Serve large language models from NVIDIA Triton Inference Server."
    )
    parser.add_argument("--version", action="version", version=f"tidewheel {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if only in (None, name):
            module = import_module(f"tidewheel.cli.{_MODULES.get(name, name)}")
            (getattr(module, f"add_{name}", None) or module.add_arguments)(command)
            command.set_defaults(run=getattr(module, f"run_{name}", None) or module.run, command=name)
    return parser


if __name__ == "__main__":
    sys.exit(main())
