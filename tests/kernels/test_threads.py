"""threads.h: every task runs once despite slow threads and several callers, and idle threads help others."""

import subprocess
from pathlib import Path

import pytest

from nanospec.kernels import native
from nanospec.kernels.native import find_compiler, library

PROGRAM = r"""
#include "threads.h"
#include <cstdio>
#include <random>

void expect(bool right, const char* what) {
    if (!right) std::printf("FAILED: %s\n", what), std::fflush(stdout), abort();
}

void pause(int microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

void every_task_runs_once() {
    std::mt19937 random(1);
    for (int turn = 0; turn < 40; turn++) {
        const int threads = 1 + random() % 5, phases = 1 + random() % 20;
        std::vector<long> counts(phases);
        for (long& count : counts) count = random() % 4 ? random() % 200 : random() % 4;
        std::vector<std::vector<std::atomic<int>>> ran;
        for (long count : counts) ran.emplace_back(count);
        const int late = random() % 3 ? -1 : random() % threads;
        std::atomic<int> next_id{0};
        run(threads, phases, [&](Team& team) {
            const int me = next_id++;
            for (int p = 0; p < phases; p++) {
                team.each(counts[p], [&](long i, long next) {
                    expect(i >= 0 && i < counts[p] && next >= 0 && next < counts[p], "index is out of range");
                    expect(threads > 1 || next == std::min(i + 1, counts[p] - 1), "tasks are not in order");
                    ran[p][i]++;
                    if (me == late) pause(200);
                });
                for (auto& times : ran[p]) expect(times == 1, "a task did not run exactly once");
            }
        });
    }
}

// While helper threads run the tasks of one caller, other callers run theirs alone.
void several_callers() {
    std::vector<std::thread> callers;
    for (int c = 0; c < 3; c++)
        callers.emplace_back([] {
            for (int turn = 0; turn < 30; turn++) {
                std::vector<std::atomic<int>> ran(20);
                run(3, 2, [&](Team& team) {
                    for (int phase : {0, 1}) team.each(20, [&](long i, long) { ran[i] += 1 + phase; });
                });
                for (auto& times : ran) expect(times == 3, "a caller's task did not run exactly once");
            }
        });
    for (auto& caller : callers) caller.join();
}

int main() { every_task_runs_once(), several_callers(); }
"""


@pytest.mark.slow
@pytest.mark.skipif(library() is None, reason="needs a C++ compiler: install g++")
def test_every_task_runs_once_without_data_races(tmp_path: Path) -> None:
    """Data races are detected if the compiler has ThreadSanitizer."""
    source, program = tmp_path / "threads.cpp", tmp_path / "threads"
    source.write_text(PROGRAM)
    command = [*find_compiler(), "-std=c++20", "-O1", "-pthread", "-I", str(Path(native.__file__).parent)]
    for sanitize in (["-fsanitize=thread"], []):
        compiler = subprocess.run([*command, *sanitize, str(source), "-o", str(program)], capture_output=True)
        if sanitize and compiler.returncode:
            continue
        assert compiler.returncode == 0, compiler.stderr
        result = subprocess.run([program], capture_output=True, text=True, timeout=120)
        if "unexpected memory mapping" not in result.stderr:  # ThreadSanitizer on some kernels
            break
    assert result.returncode == 0, result.stdout + result.stderr
