// Every kernel file's bindings.
#pragma once

#include "bind.h"

namespace ostinato {

void bind_norm(Module& module);

inline void bind_kernels(Module& module) {
    bind_norm(module);
}

}  // namespace ostinato
