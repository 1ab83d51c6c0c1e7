# Which instruction sets are built. Their names and flags stand in src/ostinato/plan/device/isa_table.py.
include(CheckCXXSourceCompiles)

set(isa_table "${package_dir}/plan/device/isa_table.py")
set(write_isas "${CMAKE_CURRENT_SOURCE_DIR}/cmake/write_instruction_sets.py")
set(written_isas "${CMAKE_CURRENT_BINARY_DIR}/generated/instruction_sets.cmake")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${isa_table}" "${write_isas}")
execute_process(
  COMMAND "${Python_EXECUTABLE}" -B -s "${write_isas}" "${CMAKE_CURRENT_SOURCE_DIR}/src" "${CMAKE_SYSTEM_PROCESSOR}"
    "${written_isas}"
  COMMAND_ERROR_IS_FATAL ANY)
# known_isas, worst first; stand_ins, which are built where they are named; runnable_isas, of both, on this machine; and
# flags_of_<isa>.
include("${written_isas}")

function(compiler_takes isa result)
  string(JOIN " " CMAKE_REQUIRED_FLAGS ${flags_of_${isa}})
  check_cxx_source_compiles("int main() { return 0; }" compiler_takes_${isa})
  set(${result} ${compiler_takes_${isa}} PARENT_SCOPE)
endfunction()

# What OSTINATO_ISA asks for. An instruction set that is asked for by name and cannot be built is an error; one that
# `all` or `native` would include is left out, and the check's line in CMake's output says so.
function(instruction_sets_to_build result)
  set(known ${known_isas} ${stand_ins})
  set(chosen)
  foreach(wish IN LISTS OSTINATO_ISA)
    if(wish STREQUAL "all" OR wish STREQUAL "native")
      set(best)
      foreach(isa IN LISTS known_isas)
        compiler_takes(${isa} buildable)
        if(buildable AND wish STREQUAL "all")
          list(APPEND chosen ${isa})
        elseif(buildable AND isa IN_LIST runnable_isas)
          set(best ${isa})
        endif()
      endforeach()
      list(APPEND chosen ${best})
    elseif(wish STREQUAL "stand_ins")
      foreach(isa IN LISTS stand_ins)
        if(isa IN_LIST runnable_isas)
          list(APPEND chosen ${isa})
        endif()
      endforeach()
    else()
      if(NOT wish IN_LIST known)
        message(FATAL_ERROR "OSTINATO_ISA: ${wish} is not known on ${CMAKE_SYSTEM_PROCESSOR}; all, native, stand_ins or: ${known}")
      endif()
      compiler_takes(${wish} buildable)
      if(NOT buildable)
        message(FATAL_ERROR "OSTINATO_ISA: ${CMAKE_CXX_COMPILER} does not take ${flags_of_${wish}}, the flags of ${wish}")
      endif()
      list(APPEND chosen ${wish})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES chosen)
  set(${result} ${chosen} PARENT_SCOPE)
endfunction()
