// The extension module: kernels as functions, and Program, which records and replays them.

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/kernel_binding.h"
#include "bind/sigbus.h"
#include "core/amx.h"
#include "core/team.h"

#ifndef OSTINATO_MODULE
#error "define OSTINATO_MODULE as the module's name, _native_ and the instruction set"
#endif

NB_MODULE(OSTINATO_MODULE, m) {
    using namespace ostinato;
#ifdef NDEBUG
    // Objects that an interpreter has not freed at exit, such as an engine in a thread's or a traceback's frame, are no
    // leak worth a warning.
    nb::set_leak_warnings(false);
#endif
#if defined(OSTINATO_TILES)
    m.attr("tiles") = OSTINATO_TILES;
#else
    m.attr("tiles") = nb::none();
#endif
    m.def("explain_bus_error", &explain_bus_error, nb::arg("message"),
          "Have a SIGBUS of this process write `message` to stderr before it ends the process as it would have.");
    m.def("set_spin_turns", &set_spin_turns, nb::arg("turns"),
          "Have threads spin for so many turns before they sleep, always; negative: as long as fits the machine.");
    nb::class_<Program> program(m, "Program");
    program.def(nb::init<>())
        .def("__len__", &Program::size)
        .def(
            "run",
            [](const Program& program, std::int64_t tokens, int threads) {
                const int count = thread_count(threads);
                nb::gil_scoped_release released;
                program.run(tokens, count);
            },
            nb::arg("tokens"), nb::arg("threads") = 0, "Run all calls, each for at most `tokens` tokens.")
        .def(
            "profile",
            [](const Program& program, std::int64_t tokens, int threads) {
                const int count = thread_count(threads);
                nb::gil_scoped_release released;
                return program.profile(tokens, count);
            },
            nb::arg("tokens"), nb::arg("threads") = 0, "Run all calls and return [(name, seconds)], one entry per call.");
    Module module{m, program};
    for (const auto bind : bindings()) bind(module);
}
