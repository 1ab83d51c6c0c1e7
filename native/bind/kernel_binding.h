// Binding of kernels, each twice: as a function that runs it now, and as a method of Program that records it. Both take
// the number of tokens first, since a replay leaves out padding at the end, and then a dict of arguments.
#pragma once

#include <vector>

#include "bind/arguments.h"
#include "core/program.h"

namespace ostinato {

struct Module {
    nb::module_& functions;
    nb::class_<Program>& program;
};

// Tokens from which on a call releases the GIL.
constexpr std::int64_t GIL_RELEASE_TOKENS = 512;

template <auto kernel>
struct Bound;

template <typename Args, void (*kernel)(const ThreadGroup&, std::int64_t, const Args&)>
struct Bound<kernel> {
    static Args read(const char* name, const nb::dict& given) {
        Reader reader(name, given.ptr());
        Args args{reader};
        reader.finish();
        args.check(reader);
        return args;
    }

    static void run(std::int64_t tokens, int threads, const Args& args) {
        const auto call = [&] { on_team(threads, [&](const ThreadGroup& group) { kernel(group, tokens, args); }); };
        // Re-acquiring the GIL is slow under contention, so short calls keep it.
        if (tokens < GIL_RELEASE_TOKENS) {
            call();
        } else {
            nb::gil_scoped_release released;
            call();
        }
    }

    static void define(Module& module, const char* name) {
        module.functions.def(
            name,
            [name](std::int64_t tokens, const nb::dict& given, int threads) {
                run(tokens, thread_count(threads), read(name, given));
            },
            nb::arg("tokens"), nb::arg("arguments"), nb::arg("threads") = 0);
        module.program.def(name, [name](Program& program, std::int64_t tokens, const nb::dict& given) {
            program.add(name, tokens, [args = read(name, given)](const ThreadGroup& threads, std::int64_t real) {
                kernel(threads, real, args);
            });
        });
    }
};

// Return the registered binding functions of all kernels.
inline std::vector<void (*)(Module&)>& bindings() {
    static std::vector<void (*)(Module&)> all;
    return all;
}

// Bind `NAME(threads, tokens, arguments)`; the arguments are a struct of fields (bind/arguments.h).
#define KERNEL(NAME)                                                                      \
    [[maybe_unused]] const bool NAME##_is_bound = [] {                                    \
        bindings().push_back([](Module& module) { Bound<NAME>::define(module, #NAME); }); \
        return true;                                                                      \
    }()

}  // namespace ostinato
