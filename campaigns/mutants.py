"""Mutation testing: insert small defects into the code one at a time, and check that a test fails.

    make mutants FILES="kernels/speculation/verify.py nanospec/engine/blocks.py" SAMPLE=40 SEED=0

SEED selects SAMPLE mutants of each file (0: all). A mutant is killed if a test in `TESTS` fails, or if the
tests take 20 s more than twice their normal CPU time. A surviving mutant shows a missing test, or is
equivalent to the original; `campaigns/mutants.json` has the reasons for the known equivalent ones.

Why not mutmut or cosmic-ray? mutmut 3.8 skips functions with decorators, and therefore all kernels and
properties. Cosmic-ray 8.7 mutates kernels, but 682 of its 1,046 mutants of verify.py replace an arithmetic
operator by each of eleven others. Most of these are type errors, which inflate the score; none deletes a
statement or swaps minimum and maximum. It does not sample, edits the checkout, and imports torch and Triton
for each mutant, while a process forked after the import starts immediately.

Mutants are written to a copy of the checkout. Files are rewritten, rather than functions patched, because
Triton's interpreter reads the source of a kernel from its file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from campaigns.defects import Defect, apply, defects

ROOT = Path(__file__).parent.parent
REASONS = Path(__file__).parent / "mutants.json"
CEILING = 12 << 30  # limit of the address space in bytes, as a mutant may allocate without bound

SIMULATED = "tests/test_simulate.py::test_seeds_pass_and_cover_their_features"
LAYER, SAMPLING = (f"tests/kernels/{name}/test_" for name in ("layer", "sampling"))
SPECULATION = "tests/kernels/speculation/test_"
ENGINE, DEVICE, DRAFTERS = (f"tests/nanospec/{name}/test_" for name in ("engine", "device", "drafters"))
GRAMMAR, SPLIT = (f"tests/nanospec/extras/{name}/test_" for name in ("grammar", "tensor_parallel"))
BATCH, SERVE = "tests/nanospec/apps/batch/test_", "tests/nanospec/apps/serve/test_"
CLI, CLUSTER = (f"tests/nanospec/apps/{name}/test_" for name in ("cli", "cluster"))
MODELS, TEXT = (f"tests/nanospec/{name}/test_" for name in ("models", "text"))
KERNELS, NATIVE = "tests/kernels/test_", "tests/kernels/native/test_"
TRACING = "tests/nanospec/extras/tracing/test_"
HOST = [ENGINE + "engine_edges.py", ENGINE + "engine.py"]
GUIDED = [
    GRAMMAR + "guided.py::test_" + name
    for name in (
        "grammar_drafts_respect_limits",
        "draft_model_runs_for_unguided_rows_only",
        "invalid_formats_are_rejected",
        "forced_tokens_are_accepted_in_one_step",
    )
]  # fmt: skip
GRAPHS = [DEVICE + "graphs.py"]
POLICY = [DRAFTERS + "policy.py", DRAFTERS + "auto.py"]
MEMORY, LOGPROBS = "campaigns/faults/test_memory.py", "tests/nanospec/test_logprobs.py"
# The tests of each file, fastest first.
TESTS: dict[str, list[str]] = {
    "kernels/layer/attention.py": [
        LAYER + "attention.py::test_naive_matches_simplest_form",
        LAYER + "attention.py::test_naive_avoids_small_products",
        LAYER + "attention.py::test_kernels_match_naive",
    ],
    "kernels/layer/paged_tree.py": [LAYER + "attention.py"],
    "kernels/layer/product.py": [LAYER + "parts.py", LAYER + "linear.py"],
    "kernels/speculation/verify.py": [SPECULATION + "verify.py"],
    "kernels/speculation/proposal.py": [
        SPECULATION + "proposal.py",
        "tests/kernels/test_batch.py",
        SPECULATION + "ngram.py",
    ],
    "kernels/speculation/ngram": [SPECULATION + "ngram.py"],
    "kernels/speculation/report.py": [SPECULATION + "report.py"],
    "kernels/sampling/accept.py": [SAMPLING + "accept.py"],
    "kernels/sampling/noise.py": [SAMPLING + "noise.py"],
    "kernels/sampling/": [SAMPLING + "sample.py"],
    "nanospec/engine/blocks.py": [ENGINE + "blocks.py", ENGINE + "scheduler.py"],
    "nanospec/engine/scheduler.py": [ENGINE + "scheduler.py", SIMULATED, HOST[0]],
    "nanospec/engine/request.py": [ENGINE + "request.py", HOST[0]],
    "nanospec/engine/engine.py": [*GUIDED, SIMULATED, MEMORY, *HOST, POLICY[1], DRAFTERS + "acceptance.py"],
    "nanospec/device/step.py": [DEVICE + "step.py", DEVICE + "compiled_step.py", *GUIDED[:2], POLICY[1]],
    "nanospec/device/worker.py": [
        DEVICE + "resources.py",
        DEVICE + "waiting.py",
        MEMORY,
        HOST[0],
        GRAMMAR + "guided.py::test_many_outputs_follow_format_with_and_without_speculation",
    ],
    "nanospec/device/messages.py": [DEVICE + "messages.py", ENGINE + "request.py", LOGPROBS, HOST[0]],
    "nanospec/device/timing.py": [DEVICE + "timing.py", *GRAPHS],
    "nanospec/device/graphs.py": [*GRAPHS, DEVICE + "step.py"],
    "nanospec/drafters/policy.py": POLICY,
    "nanospec/drafters/estimates.py": POLICY,
    "nanospec/drafters/medusa.py": [DRAFTERS + "heads.py", DRAFTERS + "drafters.py"],
    "nanospec/drafters/": [DRAFTERS + "simple_drafter.py", DRAFTERS + "drafters.py"],
    "nanospec/drafters/methods.py": [
        "tests/nanospec/test_config.py",
        DRAFTERS + "simple_drafter.py",
        DRAFTERS + "drafters.py",
    ],
    "nanospec/extras/grammar/response_format.py": [GRAMMAR + "response_format.py", GUIDED[2]],
    "nanospec/extras/grammar/grammar.py": [GRAMMAR + "grammar.py", GRAMMAR + "guided_rows.py"],
    "nanospec/extras/grammar/extension.py": [GRAMMAR + "guided_rows.py", *GUIDED],
    "nanospec/extras/tensor_parallel/shard.py": [LAYER + "parts.py", SPLIT + "shard.py"],
    "nanospec/extras/tensor_parallel/group.py": [
        SPLIT + "group.py",
        SPLIT + "launch.py::test_ranks_on_a_machine_share_cores_and_gpus",
        SPLIT + "launch.py::test_torchrun",
    ],
    "nanospec/extras/tensor_parallel/job.py": [SPLIT + "job.py", SPLIT + "launch.py"],
    "nanospec/extras/tensor_parallel/launch.py": [SPLIT + "launch.py"],
    "nanospec/extras/tensor_parallel/worker.py": [SPLIT + "worker.py", SPLIT + "launch.py::test_user_script"],
    "nanospec/apps/json_input.py": ["tests/nanospec/apps/test_json_input.py"],
    "nanospec/apps/tasks.py": [BATCH + "run.py", BATCH + "openai.py"],
    "nanospec/apps/batch/": [
        BATCH + "run.py",
        BATCH + "openai.py",
        CLI + "main.py::test_prompt_from_stdin",
        CLI + "generate.py::test_batch_writes_all_results_and_resumes",
    ],
    "nanospec/apps/serve/loop.py": [SERVE + "loop.py", SERVE + "faults.py"],
    "nanospec/apps/serve/requests.py": [SERVE + "api.py", SERVE + "security.py", SERVE + "loop.py"],
    "nanospec/apps/serve/gate.py": [SERVE + "security.py", SERVE + "api.py", SERVE + "faults.py"],
    "nanospec/apps/serve/": [SERVE + "api.py", SERVE + "security.py", SERVE + "loop.py", SERVE + "faults.py"],
    "nanospec/apps/serve/settings.py": [CLI + "serve.py", SERVE + "security.py"],
    "nanospec/apps/openai_format.py": [BATCH + "openai.py", SERVE + "api.py"],
    "nanospec/apps/options.py": [CLI + "main.py", CLI + "serve.py"],
    "nanospec/apps/training.py": ["tests/nanospec/apps/test_training.py"],
    "nanospec/apps/cli/": [CLI + "main.py", CLI + "generate.py"],
    "nanospec/apps/cli/chat.py": [CLI + "chat.py"],
    "nanospec/apps/cli/console.py": [CLI + "console.py"],
    "nanospec/apps/cli/demo.py": [CLI + "generate.py"],
    "nanospec/apps/cli/explain.py": [CLI + "explain.py"],
    "nanospec/apps/cli/fetch.py": [CLI + "fetch.py"],
    "nanospec/apps/cli/generate.py": [CLI + "generate.py"],
    "nanospec/apps/cli/serve.py": [CLI + "serve.py"],
    "nanospec/__main__.py": [CLI + "process.py", "tests/test_run.py::test_run_py_and_module_are_equivalent"],
    "nanospec/apps/cluster/": [CLUSTER + name for name in ("routing.py", "start.py", "front.py", "batch.py")],
    "nanospec/apps/cluster/front.py": [CLUSTER + "front.py"],
    "nanospec/apps/cluster/serve.py": [CLUSTER + "serve.py"],
    "nanospec/config.py": ["tests/nanospec/test_config.py"],
    "nanospec/llm.py": ["tests/nanospec/test_llm.py", "-k", "not smollm2"],
    "nanospec/outputs.py": [
        "tests/nanospec/test_outputs.py",
        "tests/nanospec/test_llm.py",
        "-k",
        "not smollm2",
    ],
    "nanospec/device/resources.py": [DEVICE + "resources.py", DEVICE + "memory.py"],
    "nanospec/engine/locking.py": [ENGINE + "locking.py"],
    "nanospec/extras/tracing/": [TRACING + "trace.py", TRACING + "recorder.py"],
    "nanospec/extras/": GUIDED,
    "nanospec/models/__init__.py": [MODELS + "names.py"],
    "nanospec/models/config.py": [MODELS + "config.py", MODELS + "decoder.py"],
    "nanospec/models/decoder.py": [MODELS + "decoder.py", MODELS + "families.py"],
    "nanospec/models/weights.py": [MODELS + "weights.py"],
    "nanospec/models/cpu.py": [MODELS + "cpu.py"],
    "nanospec/models/gguf.py": [MODELS + "gguf.py"],
    "nanospec/models/families/": [MODELS + "config.py", MODELS + "families.py", MODELS + "weights.py"],
    "nanospec/text/__init__.py": ["tests/nanospec/test_config.py", TEXT + "inputs.py", TEXT + "tokenizer.py"],
    "nanospec/text/": [TEXT + "tokenizer.py", TEXT + "chat.py", TEXT + "inputs.py"],
    "kernels/batch.py": ["tests/kernels/test_batch.py", SPECULATION + "proposal.py", MODELS + "cpu.py"],
    "kernels/launch.py": [
        "tests/kernels/native/test_native.py",
        LAYER + "residual.py",
        LAYER + "linear.py",
    ],
    "kernels/table.py": [SPECULATION + "ngram.py", KERNELS + "transfer.py"],
    "kernels/transfer.py": [KERNELS + "transfer.py"],
    "kernels/layer/linear.py": [LAYER + "parts.py", LAYER + "linear.py"],
    "kernels/layer/paged.py": [LAYER + "attention.py"],
    "kernels/layer/residual.py": [LAYER + name for name in ("residual.py", "parts.py", "linear.py")],
    "kernels/layer/rope_cache.py": [LAYER + "rope.py"],
    "kernels/layer/split_kv.py": [LAYER + "attention.py"],
    "kernels/speculation/kv_move.py": [SPECULATION + "kv_move.py"],
    "kernels/native/__init__.py": [NATIVE + "native.py"],
    "kernels/native/packed.py": [NATIVE + "packed.py", MODELS + "cpu.py"],
    "kernels/native/amx.h": [NATIVE + "packed.py"],
    "kernels/native/arithmetic.h": [NATIVE + "packed.py", MODELS + "cpu.py"],
    "kernels/native/product.h": [NATIVE + "packed.py", MODELS + "cpu.py"],
    "kernels/native/threads.h": [KERNELS + "threads.py", NATIVE + "packed.py"],
    "kernels/native/sampling.cpp": [SAMPLING + "sample.py", SAMPLING + "noise.py", GRAMMAR + "mask.py"],
    "kernels/native/ngram.cpp": [SPECULATION + "ngram.py"],
    "kernels/native/step": [SPECULATION + "verify.py", SPECULATION + "proposal.py", MODELS + "cpu.py"],
    "kernels/native/": [MODELS + "cpu.py", DEVICE + "compiled_step.py"],
}


class Result(NamedTuple):
    """The outcome of a mutant ("killed", "timeout", "survived", or "unknown" if the process failed but no
    test), the test that failed, and the CPU time in seconds."""

    outcome: str
    by: str
    seconds: float


class Failures:
    """A pytest plugin that records the first failure."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.file.exists():
            self.file.write_text(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.file.exists():
            self.file.write_text(f"{report.nodeid} (at import)")


def tests_of(file: str) -> list[str]:
    """Return the tests of the longest entry in `TESTS` that is a prefix of `file`."""
    entries = [name for name in TESTS if file.startswith(name)]
    if not entries:
        raise SystemExit(f"{file} has no tests; add it to TESTS in campaigns/mutants.py.")
    return TESTS[max(entries, key=len)]


def copy_checkout(to: Path) -> None:
    """Copy tracked and untracked (but not ignored) files. Link models."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in names.split("\0"):
        if name and (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)
    for model in (ROOT / "weights").iterdir():
        if not (to / "weights" / model.name).exists():
            (to / "weights" / model.name).symlink_to(model.resolve())


def prepare() -> None:
    """Import the modules that all runs need, except mutated ones, before forking."""
    import hypothesis
    import pytest  # noqa: F401
    import torch
    import triton.language  # noqa: F401
    from hypothesis import Phase

    torch.set_num_threads(1)
    sys.dont_write_bytecode = True  # consecutive mutants may have equal times and sizes
    phases = [Phase.explicit, Phase.generate]  # without shrinking
    fixed: dict[str, Any] = {"derandomize": True, "database": None, "deadline": None}
    hypothesis.settings.register_profile("mutants", phases=phases, **fixed)
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "nanospec", "bench")]:
        del sys.modules[name]


def run(tests: Sequence[str], folder: Path, limit: float) -> Result:
    """Run tests in a forked process with a limit of `limit` seconds of CPU time."""
    failed = folder / ".failed"
    failed.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.setsid()
        _be_pytest(tests, folder, failed, limit)
    code, usage, over = _wait(child, limit * 5 + 30)
    by = failed.read_text() if failed.exists() else ""
    seconds = usage.ru_utime + usage.ru_stime
    number = os.WTERMSIG(code) if os.WIFSIGNALED(code) else 0
    if over or number == signal.SIGXCPU:
        return Result("timeout", by, seconds)
    if code == 0:
        return Result("survived", "", seconds)
    crashed = number not in (0, signal.SIGKILL)  # SIGKILL: out of memory
    return Result("killed" if by or crashed else "unknown", by, seconds)


def _be_pytest(tests: Sequence[str], folder: Path, failed: Path, limit: float) -> None:
    """Run pytest in the child process. Never returns."""
    code = 70
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit) + 1, int(limit) + 3))
        resource.setrlimit(resource.RLIMIT_AS, (CEILING, CEILING))
        os.chdir(folder)
        sys.path[:] = [str(folder), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
        log = os.open(folder / ".log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(folder)]
        options += ["--hypothesis-profile", "mutants"]
        code = pytest.main([*options, *tests], plugins=[Failures(failed)])
    finally:
        os._exit(int(code))


def _wait(child: int, limit: float) -> tuple[int, Any, bool]:
    """Wait for a child and return (status, resource usage, whether it was killed after `limit` seconds)."""
    end, over = time.monotonic() + limit, False
    while True:
        pid, code, usage = os.wait4(child, os.WNOHANG)
        if pid:
            return code, usage, over
        if time.monotonic() > end:
            over = True
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.05)


def sampled(file: str, source: str, sample: int, seed: int) -> list[Defect]:
    """Return the sampled mutants of a file, in source order."""
    chosen = defects(source, file.endswith(".py"))
    if 0 < sample < len(chosen):
        chosen = sorted(random.Random(f"{seed} {file}").sample(chosen, sample))
    return chosen


def survivors(file: str, source: str, earlier: Sequence[dict[str, Any]]) -> list[Defect]:
    """Return the surviving mutants of an earlier run whose source lines still exist."""
    kept = [{name: line[name] for name in IDENTITY} for line in earlier if line["outcome"] in OPEN]
    return [
        defect for defect in defects(source, file.endswith(".py")) if identity(file, defect, source) in kept
    ]


OPEN = ("survived", "unknown")
IDENTITY = ("file", "column", "kind", "before", "after", "text")


def identity(file: str, defect: Defect, source: str) -> dict[str, Any]:
    described = {"file": file, **defect.described(source)}
    return {name: described[name] for name in IDENTITY}


def try_all(file: str, folder: Path, chosen: Sequence[Defect]) -> Iterator[dict[str, Any]]:
    """Run the chosen mutants of a file. Yield their descriptions, outcomes and reasons of equivalence."""
    source, tests, place = (ROOT / file).read_text(), tests_of(file), folder / file
    before = run(tests, folder, 1200)
    if before.outcome != "survived":
        log = (folder / ".log").read_text()[-2000:]
        raise SystemExit(f"The tests of {file} fail without a mutant: {before.by}\n{log}")
    reasons = json.loads(REASONS.read_text()).get(file, {}) if REASONS.exists() else {}
    for defect in chosen:
        place.write_text(apply(source, defect))
        try:
            result = run(tests, folder, 2 * before.seconds + 20)
        finally:
            place.write_text(source)
        line = {"file": file, **defect.described(source), **result._asdict()}
        if result.outcome == "survived":
            line["equivalent"] = reasons.get(f"{line['text']} | {line['before']} -> {line['after']}", "")
        words = "{file}:{line} {kind}: {before} -> {after}: {outcome} {by} {seconds:.0f} s"
        print(words.format(**line), flush=True)
        yield line


def summary(lines: Sequence[dict[str, Any]]) -> str:
    """Return a summary line per file and in total."""
    texts = []
    for file in [*dict.fromkeys(line["file"] for line in lines), "all"]:
        selected = [line for line in lines if file in (line["file"], "all")]
        counts = Counter("equivalent" if line.get("equivalent") else line["outcome"] for line in selected)
        killed, count = counts["killed"] + counts["timeout"], len(selected) - counts["equivalent"]
        rest = f"({counts['timeout']} by timeout), {counts['equivalent']} equivalent"
        texts.append(f"{file}: {killed} of {count} killed {rest}")
    return "\n".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser("python -m campaigns.mutants", description="Run mutation tests.")
    parser.add_argument("files", nargs="+", help="source files to mutate")
    parser.add_argument("--sample", type=int, default=0, help="number of mutants per file (0: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--again", type=Path, help="rerun only the survivors in an earlier results file")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    os.environ.update(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    os.environ.pop("PYTHONPATH", None)
    prepare()
    earlier = json.loads(args.again.read_text())["mutants"] if args.again else []
    lines = [line for line in earlier if line["outcome"] not in OPEN and line["file"] in args.files]
    with tempfile.TemporaryDirectory(prefix="mutants") as name:
        os.environ["XDG_CACHE_HOME"] = f"{name}/.cache"  # of compiled C++ mutants
        copy_checkout(Path(name))
        for file in args.files:
            source = (ROOT / file).read_text()
            again = survivors(file, source, earlier)
            chosen = again if args.again else sampled(file, source, args.sample, args.seed)
            for line in try_all(file, Path(name), chosen):
                lines.append(line)
                if args.out:
                    args.out.write_text(json.dumps({"seed": args.seed, "mutants": lines}, indent=1) + "\n")
    print(summary(lines))


if __name__ == "__main__":
    main()
