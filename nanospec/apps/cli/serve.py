"""`nanospec serve`: the command line of the server."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...config import EngineConfig, SpecConfig
from ...models.folders import program, resolve_model
from ...text.validation import shown
from ..options import Parser, add_settings, base_parser, fields_set
from ..serve.settings import ServeConfig

DEFAULTS = {"max_num_batched_tokens": 512}  # limits how long a prompt delays other requests
REQUIRED = ("starlette", "uvicorn", "prometheus_client", "h11")
SETTINGS = ((ServeConfig, "server"), (SpecConfig, "speculation"), (EngineConfig, "engine"))


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C and return the exit status. Raises ValueError."""
    parser = build_parser("--help-all" in argv)
    args = parser.parse_args(argv)
    options = fields_set(args, "ServeConfig")
    for name in {"write_timeout", "max_connections"} & options.keys() if args.replicas else ():
        flag = f"--{name.replace('_', '-')}"
        parser.error(f"{flag} is not supported with --replicas, as Ray owns the connections")
    args.model = args.positional or args.model
    keys = filter(None, os.environ.get("NANOSPEC_API_KEY", "").split(","))
    config = ServeConfig(**{**options, "api_key": (*options.get("api_key", ()), *keys)})
    folder = resolve_model(args.model)
    # Not folder.name, which is a hash for models from the hub.
    name = config.served_model_name or Path(args.model).name.removesuffix(".gguf") or folder.name
    try:
        return _serve(args, replace(config, served_model_name=name), folder)
    except ModuleNotFoundError as error:
        if error.name not in REQUIRED:
            raise
        message = f"serve requires {error.name}: pip install 'nanospec[serve]', or `make run` in a checkout."
        raise ValueError(message) from None


def build_parser(full: bool = False) -> Parser:
    """Return the parser. With `full`, its help lists every option of speculation and the engine."""
    text = "Start an OpenAI-compatible server (/v1/chat/completions, ...) with a chat page."
    parser = base_parser(full, prog=f"{program()} serve", description=text)
    parser.add_argument("positional", nargs="?", metavar="MODEL", help=argparse.SUPPRESS)  # as in vLLM
    parser.add_argument(
        "--replicas", type=replicas, metavar="N|MIN:MAX", help="number of engines (Ray); MIN:MAX autoscales"
    )
    levels = ("debug", "info", "warning", "error")
    parser.add_argument("--log-level", default="info", choices=levels, help="minimum level of log lines")
    for settings, title in SETTINGS:
        add_settings(parser, settings, title, full or settings is ServeConfig, DEFAULTS)
    return parser


def replicas(text: str) -> tuple[int, int]:
    """Parse "2" or "1:4" to (minimum, maximum)."""
    minimum, colon, maximum = text.partition(":")
    numbers = [int(part) if part.isdecimal() else 0 for part in (minimum, maximum if colon else minimum)]
    if not 1 <= numbers[0] <= numbers[1]:
        raise argparse.ArgumentTypeError(f"{shown(text)} must be at least 1, or MIN:MAX such as 1:4")
    return numbers[0], numbers[1]


def _serve(args: argparse.Namespace, config: ServeConfig, folder: Path) -> int:
    from ...llm import LLM
    from ..serve.app import App
    from ..serve.logs import log_to_stderr
    from ..serve.server import listen, run

    log_to_stderr(args.log_level)
    spec = SpecConfig(**fields_set(args, "SpecConfig"))
    options = {"spec": spec, **DEFAULTS, **fields_set(args, "EngineConfig")}
    if args.replicas is not None:
        from ..cluster.start import need_ray

        need_ray("ray.serve")
        from ..cluster.serve import run as deploy

        return deploy(config, folder, args.model, options, args.replicas, args.log_level)
    listener = listen(config)  # before the model is loaded, as the port may be in use
    llm = LLM(folder, **options)
    app = App(llm, config, str(config.served_model_name))
    return asyncio.run(run(app, listener))
