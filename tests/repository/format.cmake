# Fails where a source file is not as clang-format 14 would write it (versions differ in details).
find_program(CLANG_FORMAT NAMES clang-format-14 clang-format)
if(CLANG_FORMAT)
  execute_process(COMMAND ${CLANG_FORMAT} --version OUTPUT_VARIABLE version)
endif()
if(NOT version MATCHES "version 14")
  message(STATUS "skipped: clang-format-14 was not found")
  return()
endif()
file(GLOB_RECURSE sources ${ROOT}/base/*.?pp ${ROOT}/kernels/*.?pp ${ROOT}/comm/*.?pp ${ROOT}/data/*.?pp
  ${ROOT}/model/*.?pp ${ROOT}/train/*.?pp ${ROOT}/tests/*.?pp ${ROOT}/bench/*.?pp
  ${ROOT}/kernels/*.cu ${ROOT}/kernels/*.cuh ${ROOT}/tests/*.cu ${ROOT}/bench/*.cu)
execute_process(COMMAND ${CLANG_FORMAT} --dry-run --Werror ${sources} RESULT_VARIABLE result)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "run clang-format-14 -i on the files above")
endif()
message(STATUS "every source file is formatted")
