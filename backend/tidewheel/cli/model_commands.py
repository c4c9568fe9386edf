from __future__ import annotations

import argparse

_DONE = {"load": "loaded", "unload": "unloaded", "reload": "loaded again"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="name of an entry of the server's model repository")
    text = "one of the ports of a server that this user runs on this machine (default: the only server)"
    parser.add_argument("--server", type=int, metavar="PORT", help=text)


def run(args: argparse.Namespace) -> int:
    from tidewheel.server.model_control import ask_server
    from tidewheel.server.workdir import control_of

    ask_server(control_of(args.server), args.command, args.model)
    print(f"{args.model} is {_DONE[args.command]}")
    return 0
