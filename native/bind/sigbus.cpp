// Explanation of a SIGBUS: the system sends it if a mapped file was shortened and cannot be read any more. No Python
// can run in its handler.

#include "bind/sigbus.h"

#include <csignal>
#include <cstddef>

#ifdef SIGBUS
#include <unistd.h>
#endif

namespace ostinato {

#ifdef SIGBUS
namespace {

constexpr std::size_t LONGEST = 2048;
char told[LONGEST];
volatile std::size_t length = 0;
struct sigaction before;
bool is_set = false;

// Write the message to stderr, restore the previous handler and raise the signal again.
void tell(int signal) {
    std::size_t at = 0;
    while (at < length) {
        const ssize_t written = write(STDERR_FILENO, told + at, length - at);
        if (written <= 0) break;
        at += static_cast<std::size_t>(written);
    }
    sigaction(signal, &before, nullptr);
    raise(signal);
}

}  // namespace

void explain_bus_error(const std::string& message) {
    length = 0;
    message.copy(told, LONGEST);
    length = message.size() < LONGEST ? message.size() : LONGEST;
    if (is_set) return;
    struct sigaction action {};
    action.sa_handler = tell;
    action.sa_flags = SA_NODEFER;
    sigemptyset(&action.sa_mask);
    is_set = sigaction(SIGBUS, &action, &before) == 0;
}
#else
void explain_bus_error(const std::string&) {}
#endif

}  // namespace ostinato
