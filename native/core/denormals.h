// Flushing of denormal numbers, with which some processors calculate a hundred times slower.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ostinato {

// Guard that makes this thread treat denormal numbers as zero.
class FlushDenormals {
  public:
    FlushDenormals() : before_(read()) { write(before_ | FLAGS); }
    ~FlushDenormals() { write(before_); }
    FlushDenormals(const FlushDenormals&) = delete;
    FlushDenormals& operator=(const FlushDenormals&) = delete;

  private:
#if defined(__x86_64__)
    using Register = unsigned;
    static constexpr Register FLAGS = 0x8040;  // results and operands
    static Register read() { return _mm_getcsr(); }
    static void write(Register value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
    using Register = std::uint64_t;
    static constexpr Register FLAGS = 1 << 24;
    static Register read() {
        Register value;
        asm volatile("mrs %0, fpcr" : "=r"(value));
        return value;
    }
    static void write(Register value) { asm volatile("msr fpcr, %0" ::"r"(value)); }
#else
#error "how this processor flushes denormal numbers is not written down here"
#endif
    const Register before_;
};

}  // namespace ostinato
