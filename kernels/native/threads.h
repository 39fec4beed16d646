// Several threads go through the same phases, each phase cut into tasks that whoever is free takes.
//
// No thread waits for another to arrive, only for tasks to be done: one that the system has put to sleep beside
// a busy neighbour is overtaken, and skips what it finds done. Who waits spins briefly, then sleeps, so that a
// sleeper can have its core.

#pragma once
#include <atomic>
#include <vector>

static inline void relax() {
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

struct Phase {
    alignas(64) std::atomic<int> taken{0};
    alignas(64) std::atomic<int> done{0};
};

class Team {
    Phase* phase;

  public:
    // Each thread has its own Team over the same phases, and goes through them in the same order.
    explicit Team(Phase* first) : phase(first) {}

    // Runs task(i, next) for each i below count, once in all; when it returns, all have run. `next` is the task
    // that this thread will run after i, or not below count.
    template <class Task>
    void each(int count, Task task) {
        Phase& here = *phase++;
        int i = here.taken.fetch_add(1, std::memory_order_relaxed);
        while (i < count) {
            int next = here.taken.fetch_add(1, std::memory_order_relaxed);
            task(i, next);
            if (here.done.fetch_add(1, std::memory_order_acq_rel) + 1 == count) here.done.notify_all();
            i = next;
        }
        constexpr int SPINS = 2000;
        for (int spin = 0;; spin++) {
            int done = here.done.load(std::memory_order_acquire);
            if (done >= count) return;
            if (spin < SPINS)
                relax();
            else
                here.done.wait(done, std::memory_order_acquire);
        }
    }
};

// Runs work(team) on so many threads, which go through at most so many phases.
template <class Work>
void run(int threads, int phases, Work work) {
    std::vector<Phase> all(phases);
#pragma omp parallel num_threads(threads)
    {
        Team team(all.data());
        work(team);
    }
}
