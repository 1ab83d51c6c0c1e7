# The instruction sets of each architecture, worst first, with the compiler's flags for each. The names and what a CPU
# must have for them stand in src/ostinato/plan/native.py, too.
include(CheckCXXCompilerFlag)
include(CheckCXXSourceCompiles)

set(isas_of_x86_64 x86_64_v3 x86_64_v4 x86_64_v4_bf16)
set(isas_of_aarch64 aarch64)

# Vectors of 512 bits where there are any: CPUs that run slower with them have become rare.
set(flags_of_x86_64_v3 -march=x86-64-v3)
set(flags_of_x86_64_v4 -march=x86-64-v4 -mprefer-vector-width=512)
set(flags_of_x86_64_v4_bf16 ${flags_of_x86_64_v4} -mavx512bf16 -mavx512vnni)
set(flags_of_aarch64)

# What the compiler defines for `-march=native` on a CPU that runs the instruction set.
set(macros_of_x86_64_v3 __AVX2__ __FMA__ __F16C__ __BMI2__ __LZCNT__ __MOVBE__)
set(macros_of_x86_64_v4 ${macros_of_x86_64_v3}
    __AVX512F__ __AVX512BW__ __AVX512CD__ __AVX512DQ__ __AVX512VL__)
set(macros_of_x86_64_v4_bf16 ${macros_of_x86_64_v4} __AVX512BF16__ __AVX512VNNI__)
set(macros_of_aarch64 __ARM_NEON)

function(compiler_takes isa result)
  string(JOIN " " CMAKE_REQUIRED_FLAGS ${flags_of_${isa}})
  check_cxx_source_compiles("int main() { return 0; }" compiler_takes_${isa})
  set(${result} ${compiler_takes_${isa}} PARENT_SCOPE)
endfunction()

function(machine_runs isa result)
  set(source "int main() { return 0; }\n")
  foreach(macro IN LISTS macros_of_${isa})
    string(PREPEND source "#ifndef ${macro}\n#error this CPU lacks it\n#endif\n")
  endforeach()
  set(CMAKE_REQUIRED_FLAGS -march=native)
  check_cxx_source_compiles("${source}" machine_runs_${isa})
  set(${result} ${machine_runs_${isa}} PARENT_SCOPE)
endfunction()

# What OSTINATO_ISA asks for. An instruction set that is asked for by name and cannot be built is an error; one that
# `all` or `native` would include is left out, and the check's line in CMake's output says so.
function(instruction_sets_to_build result)
  set(known ${isas_of_${CMAKE_SYSTEM_PROCESSOR}})
  set(chosen)
  if(OSTINATO_ISA STREQUAL "all" OR OSTINATO_ISA STREQUAL "native")
    foreach(isa IN LISTS known)
      compiler_takes(${isa} buildable)
      if(buildable AND OSTINATO_ISA STREQUAL "native")
        machine_runs(${isa} runs)
        if(runs)
          set(chosen ${isa})
        endif()
      elseif(buildable)
        list(APPEND chosen ${isa})
      endif()
    endforeach()
  else()
    foreach(isa IN LISTS OSTINATO_ISA)
      if(NOT isa IN_LIST known)
        message(FATAL_ERROR "OSTINATO_ISA: ${isa} is not known on ${CMAKE_SYSTEM_PROCESSOR}; all, native or: ${known}")
      endif()
      compiler_takes(${isa} buildable)
      if(NOT buildable)
        message(FATAL_ERROR "OSTINATO_ISA: ${CMAKE_CXX_COMPILER} does not take ${flags_of_${isa}}, the flags of ${isa}")
      endif()
      list(APPEND chosen ${isa})
    endforeach()
  endif()
  set(${result} ${chosen} PARENT_SCOPE)
endfunction()
