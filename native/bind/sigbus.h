#pragma once

#include <string>

namespace ostinato {

// Have a SIGBUS of this process write `message` to stderr before it ends the process as it would have.
void explain_bus_error(const std::string& message);

}  // namespace ostinato
