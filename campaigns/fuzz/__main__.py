"""Run the fuzz targets with atheris (`make fuzz`).

    python -m campaigns.fuzz [NAME ...] [--seconds 60]      run targets, each in its own process
    python -m campaigns.fuzz NAME --file FILE               run one input, without atheris

Atheris saves its corpus in .fuzz/NAME, from which the next run continues, and a failing input in
.fuzz/NAME-crash-..., which it prints. A target stops at its first bug, or at an input that takes more than
10 seconds or 2.5 GB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from random import Random

from . import NAMES, load

FOUND = Path(".fuzz")
LIMITS = ("-timeout=10", "-rss_limit_mb=2500", "-max_len=65536", "-print_final_stats=1", "-verbosity=0")
NOT_INSTRUMENTED = ("torch", "numpy", "jinja2", "tokenizers", "safetensors", "gguf")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m campaigns.fuzz", description="Run the fuzz targets.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)} (default: all)")
    parser.add_argument("--seconds", type=int, default=60, help="seconds per target (default: %(default)s)")
    parser.add_argument("--file", type=Path, help="run a single input, without atheris")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - set(NAMES)):
        parser.error(f"unknown target {unknown[0]!r}. Available: {', '.join(NAMES)}")
    if args.file is not None:
        for name in args.names:
            load(name).one(args.file.read_bytes())
        return 0
    if args.inside:
        fuzz(args.names[0], args.seconds)
    failed = [name for name in args.names or NAMES if not passes(name, args.seconds)]
    print(f"Failed: {', '.join(failed)}" if failed else "Found no bugs.")
    return bool(failed)


def passes(name: str, seconds: int) -> bool:
    """Run a target in a new process. Return whether it found no bug."""
    print(f"{name}: {seconds} seconds", flush=True)
    command = [sys.executable, "-m", "campaigns.fuzz", name, "--seconds", str(seconds), "--inside"]
    return subprocess.run(command, check=False).returncode == 0


def fuzz(name: str, seconds: int) -> None:
    """Run a target with atheris, which exits the process."""
    import atheris

    for module in NOT_INSTRUMENTED:
        import_module(module)
    with atheris.instrument_imports(include=["nanospec"]):
        target = load(name)
    corpus = FOUND / name
    corpus.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(target.seeds()):
        (corpus / f"seed-{i}").write_bytes(seed)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = Random(seed)
        if rng.random() < 0.3:
            return bytes(atheris.Mutate(data, max_size))
        return target.mutate(data, rng)[:max_size]

    crashes = f"-artifact_prefix={FOUND}/{name}-"
    arguments = [sys.argv[0], *LIMITS, f"-max_total_time={seconds}", crashes, str(corpus)]
    atheris.Setup(arguments, lambda data: target.one(data) and None, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
