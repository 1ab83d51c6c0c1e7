// Kernels with their arguments, to be run one after the other in one parallel region: what a tape replays.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <omp.h>

#include "core/thread_group.h"

namespace ostinato {

inline Scratch& shared_scratch() {
    static thread_local Scratch scratch;  // of the thread that opens the parallel region
    return scratch;
}

// Calls `body(team)` on every thread. Kernels throw nothing but bad_alloc, which ends the process where there is more
// than one thread. A process that was forked after a parallel region cannot open one: OpenMP's threads stay behind.
template <typename Body>
inline void parallel_region(Body&& body) {
    Scratch& scratch = shared_scratch();
    const int count = omp_get_max_threads();
    if (count == 1) {
        body(ThreadGroup(0, 1, scratch));
        return;
    }
#pragma omp parallel num_threads(count)
    body(ThreadGroup(omp_get_thread_num(), omp_get_num_threads(), scratch));
}

class Program {
  public:
    using Kernel = std::function<void(const ThreadGroup&, std::int64_t)>;

    void add(std::string name, std::int64_t tokens, Kernel kernel) {
        calls_.push_back({std::move(name), tokens, std::move(kernel)});
    }

    std::size_t size() const { return calls_.size(); }

    // Makes all calls, each for at most `tokens` tokens: those behind them are padding.
    void run(std::int64_t tokens) const {
        parallel_region([&](const ThreadGroup& threads) {
            for (const Call& call : calls_) {
                call.kernel(threads, std::min(call.tokens, tokens));
                threads.barrier();
            }
        });
    }

    // As `run`, and (name, seconds) of every call.
    std::vector<std::pair<std::string, double>> profile(std::int64_t tokens) const {
        std::vector<std::pair<std::string, double>> times(calls_.size());
        parallel_region([&](const ThreadGroup& threads) {
            // A call begins where the one before ended: a thread that is late for it finds the others' work done.
            auto begin = std::chrono::steady_clock::now();
            for (std::size_t i = 0; i < calls_.size(); ++i) {
                calls_[i].kernel(threads, std::min(calls_[i].tokens, tokens));
                threads.barrier();
                if (threads.rank == 0) {
                    const auto end = std::chrono::steady_clock::now();
                    times[i] = {calls_[i].name, std::chrono::duration<double>(end - begin).count()};
                    begin = end;
                }
            }
        });
        return times;
    }

  private:
    struct Call {
        std::string name;
        std::int64_t tokens;
        Kernel kernel;
    };
    std::vector<Call> calls_;
};

}  // namespace ostinato
