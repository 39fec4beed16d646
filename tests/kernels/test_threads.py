"""threads.h: every task runs once despite slow threads, and idle threads take over tasks of others."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from nanospec.kernels import native
from nanospec.kernels.native import find_compiler, library

PROGRAM = r"""
#include "threads.h"
#include <cstdio>
#include <mutex>
#include <random>
#include <set>

void expect(bool right, const char* what) {
    if (!right) std::printf("not so: %s\n", what), std::fflush(stdout), abort();
}

void pause(int microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

void every_task_runs_once() {
    std::mt19937 random(1);
    for (int turn = 0; turn < 100; turn++) {
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
                    expect(i >= 0 && i < counts[p] && next >= 0 && next < counts[p], "tasks are below count");
                    ran[p][i]++;
                    if (me == late) pause(200);
                });
                for (auto& times : ran[p]) expect(times == 1, "every task runs once");
            }
        });
    }
}

void alone_in_order() {
    long expected = 0;
    run(1, 1, [&](Team& team) {
        team.each(30, [&](long i, long next) {
            expect(i == expected++, "one thread runs tasks in order");
            expect(next == std::min(i + 1, 29L), "and gets the next index");
        });
    });
    expect(expected == 30, "all of them");
}

// Helper threads are asleep when it begins, except the first time.
void others_help(bool caller_is_slow) {
    const auto caller = std::this_thread::get_id();
    std::atomic<int> taken_over{0};
    run(2, 1, [&](Team& team) {
        team.each(40, [&](long i, long) {
            const bool own = std::this_thread::get_id() == caller;
            taken_over += own != caller_is_slow && own == (i >= 20);
            pause(own == caller_is_slow ? 2000 : 10);
        });
    });
    expect(taken_over > 0, "idle threads help others");
    pause(5000);
}

void no_more_than_wanted() {
    std::set<std::thread::id> ids;
    std::mutex lock;
    const auto note = [&](Team& team) {
        team.each(20, [&](long, long) {
            pause(1000);
            std::lock_guard guard(lock);
            ids.insert(std::this_thread::get_id());
        });
    };
    run(5, 1, note);
    ids.clear();
    run(2, 1, note);
    expect(ids.size() <= 2, "at most two threads were requested");
}

int main() {
    every_task_runs_once();
    alone_in_order();
    for (bool slow : {true, false, true, false}) others_help(slow);
    no_more_than_wanted();
}
"""


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
def test_threads(tmp_path: Path) -> None:
    source, program = tmp_path / "threads.cpp", tmp_path / "threads"
    source.write_text(PROGRAM)
    options = ["-std=c++20", "-O1", "-pthread", "-I", str(Path(native.__file__).parent)]
    subprocess.run([*find_compiler(), *options, str(source), "-o", str(program)], check=True)
    result = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
