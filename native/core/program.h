// Recorded kernel calls that run one after the other in one parallel region: what a tape replays.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/team.h"

namespace ostinato {

class Program {
  public:
    using Kernel = std::function<void(const ThreadGroup&, std::int64_t)>;

    void add(std::string name, std::int64_t tokens, Kernel kernel) {
        calls_.push_back({std::move(name), tokens, std::move(kernel)});
    }

    std::size_t size() const { return calls_.size(); }

    // Run all calls on `threads` threads, each for at most `tokens` tokens; tokens behind them are padding.
    void run(std::int64_t tokens, int threads) const {
        on_team(threads, [&](const ThreadGroup& group) {
            for (const Call& call : calls_) {
                if (&call != calls_.data()) group.barrier();
                call.kernel(group, std::min(call.tokens, tokens));
            }
        });
    }

    // Run all calls and return (name, seconds) of each.
    std::vector<std::pair<std::string, double>> profile(std::int64_t tokens, int threads) const {
        std::vector<std::pair<std::string, double>> times(calls_.size());
        on_team(threads, [&](const ThreadGroup& group) {
            // A call begins where the one before ended, so a thread's late start counts for its call.
            auto begin = std::chrono::steady_clock::now();
            for (std::size_t i = 0; i < calls_.size(); ++i) {
                calls_[i].kernel(group, std::min(calls_[i].tokens, tokens));
                group.barrier();
                if (group.rank == 0) {
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
