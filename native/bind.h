// Binds a kernel twice: as a function that runs it now, and as a method of Program that notes it.
#pragma once

#include <nanobind/nanobind.h>

#include "program.h"

namespace ostinato {

namespace nb = nanobind;

struct Module {
    nb::module_& functions;
    nb::class_<Program>& program;
};

template <auto kernel>
struct Bound;

template <typename... Args, void (*kernel)(const Team&, std::int64_t, Args...)>
struct Bound<kernel> {
    static void run(std::int64_t tokens, Args... args) {
        in_team([&](const Team& team) { kernel(team, tokens, args...); });
    }

    static void define(Module& module, const char* name) {
        module.functions.def(name, &run, nb::call_guard<nb::gil_scoped_release>());
        module.program.def(name, [name](Program& program, std::int64_t tokens, Args... args) {
            program.add(name, tokens,
                        [=](const Team& team, std::int64_t real) { kernel(team, real, args...); });
        });
    }
};

// `kernel(team, tokens, arguments...)`, all arguments being numbers and addresses.
template <auto kernel>
inline void bind(Module& module, const char* name) {
    Bound<kernel>::define(module, name);
}

}  // namespace ostinato
