// Several threads go through the same phases. Each begins with tasks of its own, then takes over those of others.
//
// No thread waits for another to arrive, only for tasks to be done: one that the system has not woken yet, beside
// a busy neighbour, is not missed, and skips what it finds done. Who waits spins briefly, then sleeps, so that a
// sleeper can have its core. Threads of OpenMP would all have to come to every call, which beside such a neighbour
// takes as long as the scheduler likes, 4 ms and more.

#pragma once
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <system_error>
#include <thread>
#include <vector>

// Returns when `value` is no longer `old`. Whoever changes it calls notify_all.
template <class T>
void wait_for_change(const std::atomic<T>& value, T old) {
    for (int spin = 0; spin < 2000; spin++) {  // some 50 microseconds
        if (value.load() != old) return;
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
    }
    value.wait(old);
}

struct alignas(64) Count {
    std::atomic<uint64_t> taken{0};  // tasks of a run: low half from its front, high half from its back
    std::atomic<int> done{0};        // tasks of a phase; int is what the system can wait for
};

class Team {
    const long own;
    Count *phase, *end;

    // Runs what is left of a run of tasks, first .. first + size - 1, and returns how many that were.
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

    // Each thread has its own Team over the same counts, and goes through the phases in the same order.
    Team(std::vector<Count>& all, long threads, long own)
        : own(own), phase(all.data()), end(phase + all.size()), threads(threads) {}

    // Runs task(i, next) for each i below count, once in all; when it returns, all have run. `next` is the task
    // that this thread will probably run after i, or i. A thread's own tasks follow each other, as memory is read
    // fastest in order; those of others it takes from their end.
    template <class Task>
    void each(long count, Task task) {
        if (phase == end) abort();  // more phases than were said
        Count* runs = phase;
        std::atomic<int>& done = runs[threads].done;
        phase += threads + 1;
        for (long n = 0; n < threads && done.load() < count; n++) {
            const long k = (own + n) % threads;
            const auto border = [&](long k) { return (count * k + threads - 1) / threads; };
            const int ran = finish(runs[k].taken, border(k), border(k + 1) - border(k), k == own, task);
            if (ran && done.fetch_add(ran) + ran == count) done.notify_all();
        }
        for (int so_far; (so_far = done.load()) < count;) wait_for_change(done, so_far);
    }
};

// Threads that help whoever calls, one caller at a time. They live as long as the process.
class Helpers {
    std::atomic<bool> busy{false}, open{false};
    std::atomic<unsigned> jobs{0};
    std::atomic<int> inside{0};  // helpers that may be at work on the job
    std::function<void(int)> job;  // given the number of a thread, 0 of who calls
    int wanted = 0, started = 0;

    void serve(int i) {
        for (unsigned seen = 0;;) {
            wait_for_change(jobs, seen);
            seen = jobs;
            inside++;
            if (open && i < wanted) job(i + 1);
            if (--inside == 0) inside.notify_all();
        }
    }

  public:
    // Runs work(0) here and, as soon as they are awake, work(i) on helpers 1 .. threads - 1.
    template <class Work>
    void run(int threads, Work work) {
        if (threads < 2 || busy.exchange(true)) return work(0);  // alone, if they help somebody else
        try {
            for (; started < threads - 1; started++) std::thread(&Helpers::serve, this, started).detach();
        } catch (const std::system_error&) {  // so there are fewer
        }
        job = work;
        wanted = threads - 1;
        open = true;
        jobs++;
        jobs.notify_all();
        work(0);
        open = false;
        for (int left; (left = inside.load());) wait_for_change(inside, left);
        busy = false;
    }
};

inline Helpers& helpers() {
    static Helpers* all = new Helpers;  // never deleted: they may be asleep in it when the process ends
    // A forked process has no thread but the one that forked.
    [[maybe_unused]] static const int known = pthread_atfork(nullptr, nullptr, [] { all = new Helpers; });
    return *all;
}

// Runs work(team) on so many threads, which go through at most so many phases.
template <class Work>
void run(int threads, int phases, Work work) {
    std::vector<Count> all(phases * (threads + 1));
    helpers().run(threads, [&](int own) {
        Team team(all, threads, own);
        work(team);
    });
}

// Runs task(i) for each i below count, on so many threads.
template <class Task>
void for_each(int threads, long count, Task task) {
    run(count > 1 ? threads : 1, 1, [&](Team& team) { team.each(count, [&](long i, long) { task(i); }); });
}
