// Waiting adapts to the machine. While the cores are ours, threads spin, since waking one takes longer than most waits.
// A core that runs another process too makes the others' spinning useless, and takes time from whoever would run there.
// The signs are a thread that lost its core (involuntary context switches), looked at once per region, and a wait within
// a region that outlasts the spinning.

#include "core/team.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <linux/futex.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ostinato {
namespace {

constexpr std::int64_t OWN_SPIN = 2'000'000, SHARED_SPIN = 2'000, SHARED_FOR = 100'000'000;  // nanoseconds
constexpr int TURNS_PER_LOOK = 8;  // turns between two looks at the clock

std::atomic<std::int64_t> fixed_turns{-1};

std::int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");  // `yield` takes no time on most cores
#endif
}

void futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value) {
    static_assert(sizeof(word) == sizeof(value) && std::atomic<std::uint32_t>::is_always_lock_free);
    syscall(SYS_futex, &word, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

// A word that threads wait for to change: they spin, then sleep in the kernel.
class Gate {
  public:
    std::uint32_t value() const { return word_.load(std::memory_order_acquire); }

    // Change the word and wake all that sleep.
    void open() {
        word_.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) > 0) futex(word_, FUTEX_WAKE, INT_MAX);
    }

    // Wait while the word is `old`: spin for `nanoseconds`, then sleep. -> true if it slept
    bool wait(std::uint32_t old, std::int64_t nanoseconds) {
        const std::int64_t turns = fixed_turns.load(std::memory_order_relaxed);
        std::int64_t until = 0;
        for (std::int64_t turn = 0; turns < 0 || turn < turns; ++turn) {
            if (value() != old) return false;
            pause();
            if (turns >= 0 || turn % TURNS_PER_LOOK != TURNS_PER_LOOK - 1) continue;
            const std::int64_t time = now();
            if (until == 0) until = time + nanoseconds;
            if (time >= until) break;
        }
        // Whoever opens the gate either sees this sleeper, or this sleeper sees the new word: the kernel compares it
        // once more before the thread sleeps.
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        while (word_.load(std::memory_order_seq_cst) == old) futex(word_, FUTEX_WAIT, old);
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
        return true;
    }

  private:
    alignas(64) std::atomic<std::uint32_t> word_{0};
    std::atomic<std::uint32_t> sleepers_{0};
};

// Thrown in a thread whose team has failed, to leave its kernels.
struct TeamFailed {};

}  // namespace

// A caller's thread and `size - 1` threads of its own. It is never freed: its threads sleep until the process ends.
class Team {
  public:
    const int size;
    Scratch scratch;
    alignas(64) std::atomic<std::uint64_t> claims{0};  // loop in the high half, next number of it in the low half

    explicit Team(int size) : size(size) {}

    void start_threads() {
        for (int rank = 1; rank < size; ++rank) {
            try {
                std::thread([this, rank] { work(rank); }).detach();
            } catch (const std::system_error& error) {
                // Those that were started sleep on, and keep this team.
                throw std::runtime_error("can't start new thread, the kernels' number " + std::to_string(rank + 1) +
                                         " of " + std::to_string(size) + ": " + error.what());
            }
        }
    }

    void run(void (*invoke)(void*, const ThreadGroup&), void* body) {
        claims.store(0, std::memory_order_relaxed);
        if (size == 1) return invoke(body, ThreadGroup(0, 1, *this, scratch));
        invoke_ = invoke;
        body_ = body;
        arrived_.store(0, std::memory_order_relaxed);
        failed_.store(false, std::memory_order_relaxed);
        running_.store(size - 1, std::memory_order_relaxed);
        if (spin_ == SHARED_SPIN && now() > shared_until_) spin_ = OWN_SPIN;
        const std::uint32_t before = done_.value();
        start_.open();
        perform(0);
        wait_in_region(done_, before);
        if (failed_) std::rethrow_exception(std::exchange(error_, nullptr));
    }

    void barrier() {
        const std::uint32_t phase = phase_.value();
        if (failed_) throw TeamFailed{};
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.open();
        } else {
            wait_in_region(phase_, phase);
        }
        if (failed_) throw TeamFailed{};
    }

  private:
    void work(int rank) {
        for (std::uint32_t seen = 0;; ++seen) {  // every region has all threads, so none passes unseen
            start_.wait(seen, spin_.load(std::memory_order_relaxed));
            perform(rank);
            if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) done_.open();
        }
    }

    void perform(int rank) {
        try {
            invoke_(body_, ThreadGroup(rank, size, *this, scratch));
        } catch (const TeamFailed&) {
        } catch (...) {
            if (!failed_.exchange(true)) error_ = std::current_exception();
            phase_.open();
        }
        note_switches();
    }

    void wait_in_region(Gate& gate, std::uint32_t old) {
        const std::int64_t spin = spin_.load(std::memory_order_relaxed);
        if (gate.wait(old, spin) && spin == OWN_SPIN) note_shared();
    }

    void note_switches() {
        thread_local long before = -1;
        rusage usage;
        if (getrusage(RUSAGE_THREAD, &usage) != 0) return;
        if (before >= 0 && usage.ru_nivcsw > before) note_shared();
        before = usage.ru_nivcsw;
    }

    void note_shared() {
        shared_until_ = now() + SHARED_FOR;
        spin_ = SHARED_SPIN;
    }

    void (*invoke_)(void*, const ThreadGroup&) = nullptr;
    void* body_ = nullptr;
    Gate start_, phase_, done_;
    alignas(64) std::atomic<int> arrived_{0};
    std::atomic<int> running_{0};
    std::atomic<bool> failed_{false};
    std::exception_ptr error_;
    std::atomic<std::int64_t> spin_{OWN_SPIN}, shared_until_{0};  // nanoseconds
};

namespace {

// Teams that no caller has.
struct IdleTeams {
    std::mutex mutex;
    std::vector<Team*> teams;
};

// Only the thread that forks lives on in the child, which makes teams anew.
IdleTeams* idle = [] {
    pthread_atfork(nullptr, nullptr, [] { idle = new IdleTeams; });
    return new IdleTeams;
}();

// A team that no other caller has, for as long as this object lives.
struct TakenTeam {
    Team* team = nullptr;

    explicit TakenTeam(int size) {
        {
            const std::lock_guard lock(idle->mutex);
            auto& teams = idle->teams;
            const auto found = std::find_if(teams.begin(), teams.end(), [&](Team* each) { return each->size == size; });
            if (found != teams.end()) {
                team = *found;
                teams.erase(found);
                return;
            }
        }
        team = new Team(size);
        team->start_threads();
    }

    ~TakenTeam() {
        const std::lock_guard lock(idle->mutex);
        idle->teams.push_back(team);
    }
};

}  // namespace

void free_idle_scratch() {
    const std::lock_guard lock(idle->mutex);
    for (Team* team : idle->teams) team->scratch = Scratch();
}

void set_spin_turns(std::int64_t turns) { fixed_turns = turns; }

void run_on_team(int threads, void (*invoke)(void* body, const ThreadGroup&), void* body) {
    TakenTeam(threads).team->run(invoke, body);
}

void ThreadGroup::wait_for_all() const { team_.barrier(); }

Range ThreadGroup::next_claim(std::uint64_t loop, std::int64_t n) const {
    std::uint64_t state = team_.claims.load(std::memory_order_relaxed);
    for (;;) {
        // A thread leaves a loop when all of it is claimed, so nothing is left of a loop that another is behind.
        const std::int64_t begin = state >> 32 == loop ? state & UINT32_MAX : 0;
        if (state >> 32 > loop || begin >= n) return {n, n};
        const std::int64_t end = begin + std::max<std::int64_t>(1, (n - begin) / (2 * size));
        if (team_.claims.compare_exchange_weak(state, loop << 32 | end, std::memory_order_relaxed)) return {begin, end};
    }
}

}  // namespace ostinato

