#pragma once

#include <string>

namespace ostinato {

// From now on a SIGBUS of this process writes `message` to stderr before it ends the process as it would have.
void explain_bus_error(const std::string& message);

}  // namespace ostinato
