"""`nanospec convert FILE.gguf [FOLDER]`: make a model folder of a GGUF file.

The folder is written under another name and renamed when whole: what fails or is interrupted changes
nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ...models.hub import new_models_folder, program
from .fetch import publish, scratch_folder
from .parser import Parser


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = Parser(
        prog=f"{program()} convert", description="Convert a GGUF file into a folder that can be loaded."
    )
    parser.add_argument("source", type=Path, metavar="FILE.gguf")
    parser.add_argument(
        "target", type=Path, nargs="?", metavar="FOLDER", help="default: as the file, among the models"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--force", action="store_true", help="replace FOLDER if it exists")
    args = parser.parse_args(argv)
    target = args.target or new_models_folder() / args.source.stem
    if target.exists() and not args.force:
        print(f"{target} exists already; give another folder or --force.", file=sys.stderr)
        return 1
    try:
        run(args.source, target, args.dtype)
    except (ImportError, ValueError, OSError) as error:
        print(f"Cannot convert {args.source}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; nothing was changed.", file=sys.stderr)
        return 130
    print(f"{target} is ready.")
    return 0


def run(source: Path, target: Path, dtype: str) -> None:
    """Convert `source` into the folder `target`, replacing what is there once the new one is whole."""
    from ...models.gguf import convert  # imports torch, which takes seconds

    with scratch_folder(target.parent) as scratch:
        convert(source, scratch / "model", dtype)
        publish(scratch, target)
