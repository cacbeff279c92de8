# Writes a header with the commit that the sources are at, if it is not the one that the header has.
#   cmake -D SOURCE=DIR -D HEADER=FILE -P commit.cmake
set(commit "$Format:%h$")  # filled in by git archive
if(commit MATCHES "Format")
  set(commit "")
  if(EXISTS ${SOURCE}/.git)  # otherwise git would tell of a repository around it
    set(ENV{GIT_OPTIONAL_LOCKS} 0)
    execute_process(COMMAND git -C ${SOURCE} describe --always --dirty "--exclude=*" --abbrev=10
      OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
endif()
if(NOT commit)
  set(commit unknown)
endif()
file(CONFIGURE OUTPUT ${HEADER} CONTENT "#define GYRE_COMMIT \"${commit}\"\n" @ONLY)
