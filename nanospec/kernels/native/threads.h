// A thread pool in which all threads execute the same phases with work stealing: each thread runs its own tasks of a
// phase first, then those of other threads.
//
// Threads wait for tasks to be completed, not for other threads to arrive. A thread that the system has not woken yet,
// because the machine is busy, delays nothing, and skips the tasks already completed. Waiting threads spin briefly and
// then sleep, so that others can use the core. OpenMP, in contrast, needs all threads in every parallel region, which
// takes 4 ms or more on a busy machine.

#pragma once
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <system_error>
#include <thread>
#include <vector>

// Returns when `value` is no longer `old`. Writers must call notify_all.
template <class T>
void wait_for_change(const std::atomic<T>& value, T old) {
    for (int spin = 0; spin < 2000; spin++) {  // about 50 microseconds
        if (value.load() != old) return;
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
    }
    value.wait(old);
}

struct alignas(64) Count {
    std::atomic<uint64_t> taken{0};  // tasks taken from the front (low half) and from the back (high half) of a run
    std::atomic<int> done{0};        // completed tasks of a phase; an int because that is what a futex can wait for
};

class Team {
    const long index;
    Count *phase, *end;

    // Runs the remaining tasks of a run, first .. first + size - 1, and returns how many this call ran.
    template <class Task>
    static int finish(std::atomic<uint64_t>& taken, long first, long size, bool forwards, Task& task) {
        const auto left = [size](uint64_t t) { return long(uint32_t(t)) + long(t >> 32) < size; };
        int ran = 0;
        while (left(taken.load())) {
            const uint64_t was = taken.fetch_add(forwards ? 1 : uint64_t(1) << 32);
            if (!left(was)) break;
            const long i = forwards ? uint32_t(was) : size - 1 - long(was >> 32), next = forwards ? i + 1 : i - 1;
            task(first + i, first + (0 <= next && next < size ? next : i));
            ran++;
        }
        return ran;
    }

  public:
    const long threads;

    // Each thread has its own Team over shared counts. All threads must execute the same phases in the same order.
    Team(std::vector<Count>& all, long threads, long index)
        : index(index), phase(all.data()), end(phase + all.size()), threads(threads) {}

    // Runs task(i, next) once for each i < count, and returns when all tasks have been completed. `next` is the task
    // that this thread will probably run after i, or i. The tasks of a thread are consecutive, because sequential reads
    // are fastest; other threads steal from their end.
    template <class Task>
    void each(long count, Task task) {
        if (phase == end) abort();  // more phases than declared
        Count* runs = phase;
        std::atomic<int>& done = runs[threads].done;
        phase += threads + 1;
        for (long n = 0; n < threads && done.load() < count; n++) {
            const long k = (index + n) % threads;
            const auto first = [&](long k) { return (count * k + threads - 1) / threads; };
            const int ran = finish(runs[k].taken, first(k), first(k + 1) - first(k), k == index, task);
            if (ran && done.fetch_add(ran) + ran == count) done.notify_all();
        }
        for (int so_far; (so_far = done.load()) < count;) wait_for_change(done, so_far);
    }
};

// Helper threads, which serve one caller at a time and live until the process ends.
class ThreadPool {
    std::atomic<bool> busy{false}, open{false};
    std::atomic<unsigned> jobs{0};
    std::atomic<int> inside{0};  // helpers that may be executing the job
    std::function<void(int)> job;  // called with the index of a thread; that of the caller is 0
    int num_active = 0, started = 0;

    void serve(int i) {
        for (unsigned seen = 0;;) {
            wait_for_change(jobs, seen);
            seen = jobs;
            inside++;
            if (open && i < num_active) job(i + 1);
            if (--inside == 0) inside.notify_all();
        }
    }

  public:
    // Runs work(0) in the calling thread and work(i) on helpers 1 .. threads - 1 as they wake up.
    template <class Work>
    void run(int threads, Work work) {
        if (threads < 2 || busy.exchange(true)) return work(0);  // the helpers serve another caller
        try {
            for (; started < threads - 1; started++) std::thread(&ThreadPool::serve, this, started).detach();
        } catch (const std::system_error&) {  // continue with fewer threads
        }
        job = work;
        num_active = threads - 1;
        open = true;
        jobs++;
        jobs.notify_all();
        work(0);
        open = false;
        for (int left; (left = inside.load());) wait_for_change(inside, left);
        busy = false;
    }
};

inline ThreadPool& thread_pool() {
    static ThreadPool* all = new ThreadPool;  // never deleted: helpers may be waiting in it at process exit
    // After a fork, the child process has no helper threads.
    [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, [] { all = new ThreadPool; });
    return *all;
}

// Runs work(team) on `threads` threads, with at most `phases` phases.
template <class Work>
void run(int threads, int phases, Work work) {
    std::vector<Count> all(phases * (threads + 1));
    thread_pool().run(threads, [&](int index) {
        Team team(all, threads, index);
        work(team);
    });
}

// Runs task(i) for each i < count on `threads` threads.
template <class Task>
void for_each(int threads, long count, Task task) {
    run(count > 1 ? threads : 1, 1, [&](Team& team) { team.each(count, [&](long i, long) { task(i); }); });
}
