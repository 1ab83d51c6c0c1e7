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

// Tokens from which on a call lets other Python threads run meanwhile.
constexpr std::int64_t LONG_CALL = 512;

template <auto kernel>
struct Bound;

template <typename... Args, void (*kernel)(const Team&, std::int64_t, Args...)>
struct Bound<kernel> {
    static void run(std::int64_t tokens, Args... args) {
        const auto call = [&] { in_team([&](const Team& team) { kernel(team, tokens, args...); }); };
        // Among busy threads the interpreter's lock is had back only after a while, which a short call does not repay.
        if (tokens < LONG_CALL) {
            call();
        } else {
            nb::gil_scoped_release released;
            call();
        }
    }

    static void define(Module& module, const char* name) {
        module.functions.def(name, &run);
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
