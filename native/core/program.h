// Recorded kernel calls that run one after the other in one parallel region: what a tape replays.
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

// Call `body(threads)` on every thread of an OpenMP region. Kernels throw only bad_alloc, which ends the process if
// there is more than one thread. A process that was forked after a parallel region cannot open one: OpenMP's threads do
// not survive a fork.
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

    // Run all calls, each for at most `tokens` tokens; tokens behind them are padding.
    void run(std::int64_t tokens) const {
        parallel_region([&](const ThreadGroup& threads) {
            for (const Call& call : calls_) {
                call.kernel(threads, std::min(call.tokens, tokens));
                threads.barrier();
            }
        });
    }

    // Run all calls and return (name, seconds) of each.
    std::vector<std::pair<std::string, double>> profile(std::int64_t tokens) const {
        std::vector<std::pair<std::string, double>> times(calls_.size());
        parallel_region([&](const ThreadGroup& threads) {
            // A call begins where the one before ended, so a thread's late start counts for its call.
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
