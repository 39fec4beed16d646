"""`nanospec serve`: the command line of the server."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from ...config import EngineConfig, SpecConfig
from ...models.hub import program, resolve_model
from ...text.checks import shown
from ..cli.options import add_further, add_settings, given, in_flags, spec_config
from ..cli.parser import Parser
from .settings import ServeConfig

MISSING = "serving needs {}: pip install 'nanospec[serve]', or `make run` in a checkout."
CHUNK = 512  # default of --max-num-batched-tokens: how long a prompt holds up the others
KEYS = "NANOSPEC_API_KEY"
LOOK = 0.5  # seconds between looks at whether there still is an engine
SETTINGS = ((ServeConfig, "server"), (SpecConfig, "speculation"), (EngineConfig, "engine"))


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit status."""
    args = _parse(argv)
    try:
        keys = tuple(filter(None, os.environ.get(KEYS, "").split(",")))
        options = given(args, "ServeConfig")
        config = ServeConfig(**{**options, "api_key": (*options.get("api_key", ()), *keys)})
        folder = resolve_model(args.model)
        return _serve(args, config, folder)
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn", "prometheus_client", "h11"):
            raise
        print(f"{program()}: {MISSING.format(error.name)}", file=sys.stderr)
    except (ValueError, TypeError, OSError, MemoryError) as error:
        text = str(error)
        text = text if isinstance(error, OSError) else in_flags(text, [each for each, _ in SETTINGS])
        print(f"{program()}: {text}", file=sys.stderr)
    return 2


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        add_further(parser)
        args = parser.parse_args(argv)
    args.model = args.positional or args.model
    if args.help_all:
        build_parser(full=True).print_help()
        parser.exit()
    if args.replicas is not None and "write_timeout" in given(args, "ServeConfig"):
        parser.error("--write-timeout cuts off connections, and with --replicas they are Ray's; leave it out")
    return args


def build_parser(full: bool = False) -> Parser:
    """The parser; `full`: its help names the options of the engine too."""
    name = f"{program()} serve"
    parser = Parser(
        prog=name,
        description="Answer OpenAI's requests over HTTP (/v1/chat/completions, ...), with a page to try it.",
        epilog="" if full else "--help-all names all options of speculation and the engine.",
    )
    parser.add_argument("--help-all", action="store_true", help="show every option and exit")
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="a folder, the name of a fetched model, or a hub id"
    )
    parser.add_argument("positional", nargs="?", metavar="MODEL", help=argparse.SUPPRESS)  # as vLLM has it
    parser.add_argument(
        "--replicas", type=replicas, metavar="N|MIN:MAX", help="so many engines, by Ray, or as are needed"
    )
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    for settings, title in SETTINGS:
        add_settings(parser, settings, title, full or settings is ServeConfig)
    if full:
        chunk = parser._option_string_actions["--max-num-batched-tokens"]
        chunk.help = str(chunk.help).replace(f"{EngineConfig.max_num_batched_tokens})", f"{CHUNK})")
        add_further(parser)
    return parser


def replicas(text: str) -> tuple[int, int]:
    """(least, most) of "2" or "1:4"."""
    least, colon, most = text.partition(":")
    numbers = [int(part) if part.isdecimal() else 0 for part in (least, most if colon else least)]
    if not 1 <= numbers[0] <= numbers[1]:
        raise argparse.ArgumentTypeError(f"{shown(text)} must be a number from 1, or MIN:MAX, as in 1:4")
    return numbers[0], numbers[1]


def _serve(args: argparse.Namespace, config: ServeConfig, folder: Any) -> int:
    from ...llm import LLM
    from ..cli.main import announce, announce_ranks
    from .app import App
    from .http import listen
    from .logs import log_to

    log_to(level=args.log_level)
    spec, options = spec_config(args), {"max_num_batched_tokens": CHUNK, **given(args, "EngineConfig")}
    if args.replicas is not None:
        from ..cluster.start import need_ray

        need_ray("ray.serve")
        from ..cluster.serve import run as deploy

        return deploy(config, folder, args.model, spec, options, args.replicas, args.log_level)
    listener = listen(config)  # first, as it may not be had
    announce(args.model, folder)
    llm = LLM(folder, spec=spec, **options)
    announce_ranks(llm)
    app = App(llm, config, config.served_model_name or folder.name)
    return asyncio.run(run(app, listener))


async def run(app: Any, listener: socket.socket) -> int:
    """Serve until told to end."""
    from .http import Server
    from .logs import log

    config = app.config
    server = Server(app.asgi(), config, app.drain)
    app.engine.start()
    try:
        host, port = listener.getsockname()[:2]
        where = f"http://{'[' + host + ']' if ':' in host else host}:{port}"
        facts = {"page": f"{where}/", "api": f"{where}/v1", "model": app.model, "keys": len(config.api_key)}
        log.info("ready", extra={"facts": {**facts, **app.runs()}})
        if not config.is_local and not config.api_key:
            log.warning("anyone who reaches this address may use it; --api-key asks them for a key")
        server.end_at_hangup()
        watch = asyncio.create_task(_end_with(app.engine, server))
        await server.serve(sockets=[listener])
        watch.cancel()
    finally:
        await app.engine.stop()
        await server.say_farewell()
        log.info("ended")
    return 0 if app.engine.end is None else 1


async def _end_with(engine: Any, server: Any) -> None:
    """Serve no longer than there is an engine: whoever started the server can start another one."""
    from .logs import log

    while engine.end is None:
        await asyncio.sleep(LOOK)
    log.error(engine.end)
    server.should_exit = True
