// Several threads go through the same phases, each phase cut into tasks that whoever is free takes.
//
// No thread waits for another to arrive, only for tasks to be done: one that the system has put to sleep beside
// a busy neighbour is overtaken, and skips what it finds done. Who waits spins briefly, then sleeps, so that a
// sleeper can have its core. Threads of OpenMP would have to meet at the end of every call, which beside such a
// neighbour takes as long as the scheduler likes, 4 ms and more.

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

struct Phase {
    alignas(64) std::atomic<int> taken{0};
    alignas(64) std::atomic<int> done{0};  // int is what the system can wait for
};

class Team {
    Phase *phase, *end;

  public:
    // Each thread has its own Team over the same phases, and goes through them in the same order.
    explicit Team(std::vector<Phase>& all) : phase(all.data()), end(phase + all.size()) {}

    // Runs task(i, next) for each i below count, once in all; when it returns, all have run. `next` is the task
    // that this thread will run after i, or not below count.
    template <class Task>
    void each(long count, Task task) {
        if (phase == end) abort();  // more phases than were said
        Phase& here = *phase++;
        for (long i = here.taken.fetch_add(1); i < count;) {
            const long next = here.taken.fetch_add(1);
            task(i, next);
            if (here.done.fetch_add(1) + 1 == count) here.done.notify_all();
            i = next;
        }
        for (int done; (done = here.done.load()) < count;) wait_for_change(here.done, done);
    }
};

// Threads that help whoever calls, one caller at a time. They live as long as the process.
class Helpers {
    std::atomic<bool> busy{false}, open{false};
    std::atomic<unsigned> jobs{0};
    std::atomic<int> inside{0};  // helpers that may be at work on the job
    std::function<void()> job;
    int wanted = 0, started = 0;

    void serve(int i) {
        for (unsigned seen = 0;;) {
            wait_for_change(jobs, seen);
            seen = jobs;
            inside++;
            if (open && i < wanted) job();
            if (--inside == 0) inside.notify_all();
        }
    }

  public:
    // Runs work() here and, as soon as they are awake, on threads - 1 helpers.
    template <class Work>
    void run(int threads, Work work) {
        if (threads < 2 || busy.exchange(true)) return work();  // alone, if they help somebody else
        try {
            for (; started < threads - 1; started++) std::thread(&Helpers::serve, this, started).detach();
        } catch (const std::system_error&) {  // so there are fewer
        }
        job = work;
        wanted = threads - 1;
        open = true;
        jobs++;
        jobs.notify_all();
        work();
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
    std::vector<Phase> all(phases);
    helpers().run(threads, [&] {
        Team team(all);
        work(team);
    });
}

// Runs task(i) for each i below count, on so many threads.
template <class Task>
void for_each(int threads, long count, Task task) {
    run(count > 1 ? threads : 1, 1, [&](Team& team) { team.each(count, [&](long i, long) { task(i); }); });
}
