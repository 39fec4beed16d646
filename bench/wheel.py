"""Build the wheel, and test it as a user would install it, in new virtual environments:

    make wheels PYTHONS="python3.10 python3.13" ALSO="torch==2.8.0 triton==3.4.0"

Builds the wheel, installs it into .wheels/NAME for each Python, runs its commands in an empty folder, and
prints the seconds of each, and FAILED. Environments are kept for later runs; PYTHONS may name an
environment's python, to test the wheel with its packages.

    make wheel

builds it twice into dist/, and fails if the two wheels differ.
"""

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
STRICT = ["-W", "error"]  # importing programs may run with this option
QUIET = "import sys, nanospec; sys.exit(bool({'torch', 'triton', 'numpy'} & sys.modules.keys()))"
COMMANDS = {
    "import": [*STRICT, "-c", QUIET],
    "fetch": ["-m", "nanospec", "fetch", MODEL],
    "prompt": [*STRICT, *ASK],
    "float32": [*STRICT, *ASK, "--dtype", "float32"],
    "drafter": [*STRICT, *ASK, "--spec", "ngram+eagle3"],
    "demo": ["-m", "nanospec", "--demo"],
}
EPOCH = "1577836800"  # 2020-01-01: time stamp of files in the wheel unless SOURCE_DATE_EPOCH is set


def build_wheel(into: Path, *options: str) -> Path:
    """Build a wheel in `into` from a copy of the sources, reproducibly with one version of setuptools."""
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *options]
    with tempfile.TemporaryDirectory() as copy:
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, copy)
        for name in ("nanospec", "weights/drafters"):
            shutil.copytree(ROOT / name, Path(copy) / name, symlinks=True, ignore=ignored)
        for path in Path(copy).rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)  # otherwise as in the checkout, depending on umask
        env = {"SOURCE_DATE_EPOCH": EPOCH, **os.environ}
        subprocess.run([*pip, "--wheel-dir", into, copy], check=True, env=env, umask=0o022)
    [wheel] = into.glob("nanospec-*.whl")
    return wheel


def build_twice(into: Path, *options: str) -> int:
    """Build a wheel in `into` and print its hash; return 1 if a second build differs."""
    for left in into.glob("nanospec-*.whl"):
        left.unlink()
    with tempfile.TemporaryDirectory() as other:
        wheels = build_wheel(into, *options), build_wheel(Path(other), *options)
        first, second = (hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels)
    print(f"{first}  {wheels[0].name}")
    if first != second:
        print(f"A second build differs: {second}", file=sys.stderr)
    return int(first != second)


def run(command: list[str], folder: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`, with the checkout's variables removed from the environment."""
    ours = ("PYTHONPATH", "NANOSPEC_WEIGHTS", "NANOSPEC_KERNELS", "TRITON_INTERPRET")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    env["XDG_CACHE_HOME"] = str(cache)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def install(python: str, wheel: Path, into: Path, also: list[str]) -> str:
    """Install the wheel into a virtual environment, that of `python` if it is in one; return its python."""
    code = "import sys; print(sys.prefix != sys.base_prefix, '%d.%d' % sys.version_info[:2])"
    inside, version = subprocess.check_output([python, "-c", code], text=True).split()
    own = Path(python).absolute() if inside == "True" else into / f"python{version}" / "bin" / "python"
    if not own.exists():
        subprocess.run([python, "-m", "venv", own.parent.parent], check=True)
    pip = [str(own), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    subprocess.run([*pip, wheel, *also], check=True)
    subprocess.run([*pip, "--force-reinstall", "--no-deps", wheel], check=True)  # also the same version
    return str(own)


def try_wheel(python: str, cache: Path) -> bool:
    """Run the commands, print the seconds of each, and return whether all succeeded."""
    for library in cache.glob("nanospec/native-*"):
        library.unlink()  # each environment compiles its own
    succeeded = True
    with tempfile.TemporaryDirectory() as empty:
        for name, command in COMMANDS.items():
            start = time.perf_counter()
            done = run([python, *command], Path(empty), cache)
            print(f"{python} {name}: {time.perf_counter() - start:.1f} s")
            equal = " NO\n" not in done.stdout  # in the table of the demo
            if done.returncode or "Warning" in done.stderr or not equal:
                print(f"FAILED: {done.stdout[-1000:]}{done.stderr[-3000:]}")
                succeeded = False
    if not any(cache.glob("nanospec/native-*.so")):
        print("FAILED to compile C++ into the cache")
        succeeded = False
    return succeeded


def main() -> int:
    """Run the command line and return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON")
    parser.add_argument("--twice", type=Path, metavar="FOLDER", help="build there, twice, and compare")
    parser.add_argument("--also", nargs="*", default=[], metavar="REQUIREMENT", help="installed with it")
    args = parser.parse_args()
    if args.twice:
        return build_twice(args.twice, "--no-build-isolation", "--no-index")
    into = Path(".wheels").absolute()
    into.mkdir(parents=True, exist_ok=True)
    wheel = build_wheel(into)
    passed = [try_wheel(install(python, wheel, into, args.also), into / "cache") for python in args.pythons]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
