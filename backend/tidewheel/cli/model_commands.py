import argparse

from tidewheel.cli.usage import printable

_DONE = {"load": "loaded", "unload": "unloaded", "reload": "loaded again"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="name of an entry of the server's model repository")
    text = (
        "a LoRA adapter of MODEL in place of MODEL itself: its name, and to load it the folder, which lies below the "
        "entry's lora_dir (repeatable)"
    )
    parser.add_argument("--lora", action="append", metavar="NAME[=FOLDER]", default=[], help=text)
    text = "one of the ports of a server that this user runs on this machine (default: the only server)"
    parser.add_argument("--server", type=int, metavar="PORT", help=text)


def run(args: argparse.Namespace) -> int:
    from tidewheel.server.model_control import ask_server
    from tidewheel.server.workdir import control_of

    if args.lora:
        return _order_loras(args)
    ask_server(control_of(args.server), args.command, args.model)
    print(f"{args.model} is {_DONE[args.command]}")
    return 0


def _order_loras(args: argparse.Namespace) -> int:
    from tidewheel.server.workdir import server_of
    from tidewheel_client import Client

    _, endpoints = server_of(args.server)
    with Client(endpoints.authority(endpoints.grpc), args.model) as client:
        for text in args.lora:
            name, _, folder = text.partition("=")
            if args.command == "unload":
                client.unload_lora(name)
            else:
                client.load_lora(name, folder)
            print(printable(f"adapter {name} of {args.model} is {_DONE[args.command]}"))
    return 0
