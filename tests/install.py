"""What the README promises of the wheel, tried as a user would, in environments of its own:

    make wheels PYTHONS="python3.10 python3.13" WITH="torch==2.8.0 triton==3.4.0"

Builds the wheel, installs it into INTO/NAME for each Python and runs its commands in an empty folder. Prints
a table of what was installed, and the seconds that each command took or FAILED. The environments stay, so
that a second run is quick; PYTHONS may name an environment's python, to try the wheel with what is there.

    make wheel

builds it twice into dist/, and fails if the two differ by a byte.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = "smollm2-135m-instruct"
ASK = ["-m", "nanospec", "--prompt", "Name three colours.", "--max-tokens", "24"]
STRICT = ["-W", "error"]  # whoever imports us may run like this
QUIET = "import sys, nanospec; sys.exit(bool({'torch', 'triton', 'numpy'} & sys.modules.keys()))"
COMMANDS = {
    "import": [*STRICT, "-c", QUIET],
    "fetch": ["-m", "nanospec", "fetch", MODEL],
    "prompt": [*STRICT, *ASK],
    "float32": [*STRICT, *ASK, "--dtype", "float32"],
    "heads": [*STRICT, *ASK, "--spec", "ngram+medusa"],
    "demo": ["-m", "nanospec", "--demo"],
}
EPOCH = "1577836800"  # 2020-01-01: files in the wheel bear this time unless SOURCE_DATE_EPOCH names another
PACKAGES = ("torch", "triton", "tokenizers")
VERSIONS = f"from importlib.metadata import version; print(*map(version, {PACKAGES}))"


def built(into: Path, *options: str) -> Path:
    """A wheel in `into`, made from a copy of the sources: of nothing that earlier builds have left, and the
    same bytes wherever, whenever and by whomever it is built with one version of setuptools."""
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *options]
    with tempfile.TemporaryDirectory() as copy:
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, copy)
        for name in ("nanospec", "kernels", "weights/heads"):
            shutil.copytree(ROOT / name, Path(copy) / name, symlinks=True, ignore=ignored)
        for path in Path(copy).rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)  # else those of the checkout, which umask decides
        env = {"SOURCE_DATE_EPOCH": EPOCH, **os.environ}
        subprocess.run([*pip, "--wheel-dir", into, copy], check=True, env=env, umask=0o022)
    [wheel] = into.glob("nanospec-*.whl")
    return wheel


def built_twice(into: Path, *options: str) -> int:
    """Leaves a wheel in `into` and prints its hash; 1 if a second one differs."""
    for left in into.glob("nanospec-*.whl"):
        left.unlink()
    with tempfile.TemporaryDirectory() as other:
        wheels = built(into, *options), built(Path(other), *options)
        first, second = (hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels)
    print(f"{first}  {wheels[0].name}")
    if first != second:
        print(f"A second build differs: {second}", file=sys.stderr)
    return int(first != second)


def run(command: list[str], folder: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`, with nothing of the checkout in its environment."""
    ours = ("PYTHONPATH", "NANOSPEC_WEIGHTS", "NANOSPEC_KERNELS", "TRITON_INTERPRET")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    env["XDG_CACHE_HOME"] = str(cache)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def install(python: str, wheel: Path, into: Path, also: list[str]) -> str:
    """The python of an environment that has the wheel; that of `python` itself if it is in one."""
    asked = "import sys; print(sys.prefix != sys.base_prefix, '%d.%d' % sys.version_info[:2])"
    inside, version = subprocess.check_output([python, "-c", asked], text=True).split()
    own = Path(python).absolute() if inside == "True" else into / f"python{version}" / "bin" / "python"
    if not own.exists():
        subprocess.run([python, "-m", "venv", own.parent.parent], check=True)
    pip = [str(own), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    subprocess.run([*pip, f"{wheel}[gguf]", *also], check=True)
    subprocess.run([*pip, "--force-reinstall", "--no-deps", wheel], check=True)  # of the same version
    return str(own)


def tried(python: str, cache: Path) -> tuple[str, bool]:
    """A row of the table, and whether all went well."""
    for library in cache.glob("nanospec/native-*"):
        library.unlink()  # each compiles its own
    row, fine = [], True
    with tempfile.TemporaryDirectory() as empty:
        for name, command in COMMANDS.items():
            start = time.perf_counter()
            done = run([python, *command], Path(empty), cache)
            seconds = time.perf_counter() - start
            complaint = "Warning" in done.stderr or "  no  " in done.stdout  # of the demo: not equal
            fine &= (good := done.returncode == 0 and not complaint)
            row.append(f"{seconds:.1f}" if good else "FAILED")
            if not good:
                print(f"{python} {name}:\n{done.stdout[-1000:]}{done.stderr[-3000:]}", file=sys.stderr)
        versions = run([python, "-c", VERSIONS], Path(empty), cache).stdout.split()
        number = run([python, "--version"], Path(empty), cache).stdout.split()[-1]
    compiled = "yes" if any(cache.glob("nanospec/native-*.so")) else "no"
    return f"| {' | '.join((number, *versions, *row, compiled))} |", fine and compiled == "yes"


def main() -> int:
    """Command line; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON")
    parser.add_argument("--twice", type=Path, metavar="FOLDER", help="build there, twice, and compare")
    parser.add_argument("--into", type=Path, default=Path(".wheels"), help="where the environments are kept")
    parser.add_argument("--also", nargs="*", default=[], metavar="REQUIREMENT", help="installed with it")
    args = parser.parse_args()
    if args.twice:
        return built_twice(args.twice, "--no-build-isolation", "--no-index")
    into = args.into.absolute()
    into.mkdir(parents=True, exist_ok=True)
    wheel = built(into)
    columns = ["Python", *PACKAGES, *COMMANDS, "C++ in the cache"]
    rows, failed = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"], 0
    for python in args.pythons:
        row, fine = tried(install(python, wheel, into, args.also), into / "cache")
        failed += not fine
        rows.append(row)
        print(row, file=sys.stderr)
    print("\n".join(rows))
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
