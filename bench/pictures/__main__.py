"""Draw all pictures of the documents from the results that are there.

python -m bench.pictures [--results bench/results] [--out docs/pictures] [--format svg] [--only guessing]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.pictures import guessing, over_k, peers, style

ROOT = Path(__file__).resolve().parent.parent.parent
PICTURES: dict[str, Any] = {
    "guessing": guessing,
    "over_k": over_k,
    "peers": peers,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=[*PICTURES])
    args = parser.parse_args(argv)
    for name in args.only:
        picture, file = PICTURES[name], args.out / f"{name}.{args.format}"
        data = picture.read(args.results)
        if data is None:
            print(f"{file.name} is not drawn: its results are not in {args.results}.")
            continue
        style.save(picture.draw(data), file, picture.title(data))
        print(f"{file}: {picture.title(data)}")


if __name__ == "__main__":
    main()
