"""`nanospec convert FILE.gguf [FOLDER]`: make a model folder of a GGUF file.

The folder is written under another name and renamed when whole: what fails or is interrupted changes nothing.
"""

from __future__ import annotations

from pathlib import Path

from ...models.hub import new_models_folder, program
from .fetch import publish, scratch_folder
from .parser import Parser


def main(argv: list[str]) -> int:
    """Run `nanospec convert`. Raises ValueError, ImportError (gguf is missing) or OSError."""
    description = "Convert a GGUF file into a folder that can be loaded."
    parser = Parser(prog=f"{program()} convert", description=description)
    parser.add_argument("source", type=Path, metavar="FILE.gguf")
    where = "default: named like the file, among the models"
    parser.add_argument("target", type=Path, nargs="?", metavar="FOLDER", help=where)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--force", action="store_true", help="replace FOLDER if it exists")
    args = parser.parse_args(argv)
    target = args.target or new_models_folder() / args.source.stem
    if target.exists() and not args.force:
        raise ValueError(f"{target} exists already; give another folder or --force.")
    from ...models.gguf import convert  # imports torch, which takes seconds

    with scratch_folder(target.parent) as scratch:
        convert(args.source, scratch / "model", args.dtype)
        publish(scratch, target)
    print(f"{target} is ready.")
    return 0
