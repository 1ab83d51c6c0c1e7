// The thread group that runs a kernel, with its scratch memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace ostinato {

struct Range {
    std::int64_t begin, end;
};

// Memory that is kept from kernel to kernel and only grows. With OSTINATO_EXACT_SCRATCH each kernel's is new.
class Scratch {
  public:
    // Return at least `bytes` bytes; 0 returns the memory as it is.
    std::byte* reserve(std::size_t bytes) {
#if defined(OSTINATO_EXACT_SCRATCH)
        const bool fits = bytes == 0;
#else
        const bool fits = bytes <= size_;
#endif
        if (!fits) {
            memory_.reset(static_cast<std::byte*>(::operator new(bytes, ALIGNMENT)));
            held() += bytes - size_;
            size_ = bytes;
        }
        return memory_.get();
    }

    // Return the bytes that all scratch memory holds which this thread has made.
    static std::size_t& held() {
        static thread_local std::size_t bytes = 0;
        return bytes;
    }

  private:
    static constexpr std::align_val_t ALIGNMENT{64};
    struct Free {
        void operator()(std::byte* memory) const { ::operator delete(memory, ALIGNMENT); }
    };
    std::unique_ptr<std::byte, Free> memory_;
    std::size_t size_ = 0;
};

class Claims;
class Team;

constexpr std::int64_t PARTS_PER_THREAD = 4, MIN_PART = 64;  // parts that threads claim, and the outputs of a part

// One thread's view of the threads that run a kernel together: all of them call it with the same arguments.
class ThreadGroup {
  public:
    const int rank, size;

    ThreadGroup(int rank, int size, Team& team, Scratch& shared, bool is_alone = false)
        : rank(rank), size(size), team_(team), shared_(shared), is_alone_(is_alone) {}

    // Return a view in which this thread computes part `part` of `parts` of a kernel's outputs, and waits for nobody.
    ThreadGroup alone(int part, int parts) const {
        thread_local Scratch scratch;
        return {part, parts, team_, scratch, true};
    }

    // Return this thread's part of n outputs; parts begin at multiples of `grain`.
    Range split(std::int64_t n, std::int64_t grain = 1) const {
        const std::int64_t grains = (n + grain - 1) / grain;
        return {std::min(n, grains * rank / size * grain), std::min(n, grains * (rank + 1) / size * grain)};
    }

    // Return this thread's part of n items that all threads of the view read afterwards.
    Range split_shared(std::int64_t n) const { return is_alone_ ? Range{0, n} : split(n); }

    // Return the numbers below n that this thread claims, in order, for a loop over them; the threads together get each
    // once. A thread that lost its core leaves its rest to others.
    Claims claims(std::int64_t n) const;

    // Call body(view) for the parts of n outputs that this thread claims; in each view it is alone with a part.
    template <typename Body>
    void each_part(std::int64_t n, Body&& body, std::int64_t min_part = MIN_PART) const;

    // Wait until all threads are here. Afterwards each can read what the others wrote before.
    void barrier() const {
        if (size > 1 && !is_alone_) wait_for_all();
    }

    // Return scratch memory of this thread alone. Another call with the same T reuses it, and no kernel keeps it.
    template <typename T>
    T* thread_scratch(std::int64_t count) const {
        thread_local Scratch scratch;
        return reinterpret_cast<T*>(scratch.reserve(sizeof(T) * count));
    }

    // Return scratch memory of all threads, apart from their own. Another call, with any T, reuses it. Waits for all
    // threads.
    template <typename T>
    T* group_scratch(std::int64_t count) const {
        barrier();
        if (rank == 0 || is_alone_) shared_.reserve(sizeof(T) * count);
        barrier();
        return reinterpret_cast<T*>(shared_.reserve(0));
    }

  private:
    friend class Claims;
    void wait_for_all() const;
    Range next_claim(std::uint64_t loop, std::int64_t n) const;

    Team& team_;
    Scratch& shared_;
    mutable std::uint64_t loops_ = 0;  // in which this thread claimed; all threads enter the same
    const bool is_alone_;
};

// A loop over the numbers that a thread claims. It claims ranges, which get shorter towards the end.
class Claims {
  public:
    struct End {};
    struct Iterator {
        const Claims& of;
        Range range;

        std::int64_t operator*() const { return range.begin; }
        bool operator!=(End) const { return range.begin < range.end; }
        void operator++() {
            if (++range.begin == range.end) range = of.next();
        }
    };

    Claims(const ThreadGroup& threads, std::int64_t n) : threads_(threads), loop_(++threads.loops_), n_(n) {}
    Iterator begin() const { return {*this, threads_.is_alone_ ? threads_.split(n_) : next()}; }
    End end() const { return {}; }

  private:
    Range next() const { return threads_.is_alone_ ? Range{n_, n_} : threads_.next_claim(loop_, n_); }

    const ThreadGroup& threads_;
    const std::uint64_t loop_;
    const std::int64_t n_;
};

inline Claims ThreadGroup::claims(std::int64_t n) const { return {*this, n}; }

template <typename Body>
void ThreadGroup::each_part(std::int64_t n, Body&& body, std::int64_t min_part) const {
    if (size == 1 || is_alone_) return body(*this);
    const auto parts = static_cast<int>(std::clamp<std::int64_t>(n / min_part, size, size * PARTS_PER_THREAD));
    for (const std::int64_t part : claims(parts)) body(alone(static_cast<int>(part), parts));
}

}  // namespace ostinato
