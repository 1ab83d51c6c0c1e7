// Threads of our own that run kernels together.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/thread_group.h"

namespace ostinato {

// Have threads spin for so many turns before they sleep, always; negative: as long as fits the machine (team.cpp).
void set_spin_turns(std::int64_t turns);

// Call invoke(body, group) on `threads` threads. std::runtime_error if the system refuses a thread.
void run_on_team(int threads, void (*invoke)(void* body, const ThreadGroup&), void* body);

// Free the scratch memory of the teams that compute nothing now.
void free_idle_scratch();

// Call `body(group)` on `threads` threads, of which the caller's is the first. Several callers may do so at once, each
// with threads of its own. What one thread throws ends the others at their next barrier, and is thrown here.
template <typename Body>
inline void on_team(int threads, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run_on_team(threads, [](void* of, const ThreadGroup& group) { (*static_cast<Plain*>(of))(group); }, &body);
}

}  // namespace ostinato
