# What `cmake --install` puts where: the program with its pages; the library with its headers and a CMake package.
#   cmake --install build --prefix DIR [--component program]
# And packages: cpack --config build/CPackConfig.cmake -G DEB (or TGZ).
# An installed tree may be moved, as nothing in it names its place.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# Component `program`.
install(TARGETS gyre RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT program)
# The same RPATH in both places: CMake would pad one of them with empty entries, which stand for the current folder.
set_target_properties(gyre PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH_USE_LINK_PATH ON
  INSTALL_RPATH "$ORIGIN/comm;$ORIGIN/../lib/gyre")
foreach(module gyre_mpi_abi gyre_mpi)
  if(TARGET ${module})
    install(TARGETS ${module} LIBRARY DESTINATION lib/gyre COMPONENT program)
    set_target_properties(${module} PROPERTIES INSTALL_RPATH "$ORIGIN")
  endif()
endforeach()
install(PROGRAMS scripts/get-mnist.sh RENAME gyre-get-mnist DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT program)
install(FILES README.md CHANGELOG.md SECURITY.md LICENSE NOTICE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT program)
install(DIRECTORY docs examples DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT program)

# The manual page and the shells' completions, which the program's own settings are the source of.
find_package(Python3 COMPONENTS Interpreter QUIET)
if(Python3_FOUND)
  set(pages ${PROJECT_BINARY_DIR}/pages)
  add_custom_command(OUTPUT ${pages}/gyre.1
    COMMAND ${Python3_EXECUTABLE} scripts/reference.py $<TARGET_FILE:gyre> --pages ${pages}
    DEPENDS gyre scripts/reference.py docs/running.md docs/install.md
    WORKING_DIRECTORY ${PROJECT_SOURCE_DIR} VERBATIM)
  add_custom_target(gyre_pages ALL DEPENDS ${pages}/gyre.1)
  install(FILES ${pages}/gyre.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT program)
  install(FILES ${pages}/gyre.bash RENAME gyre COMPONENT program
    DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
  foreach(folder IN ITEMS site-functions vendor-completions)  # elsewhere and Debian's
    install(FILES ${pages}/_gyre DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/${folder} COMPONENT program)
  endforeach()
  install(FILES ${pages}/gyre.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d COMPONENT program)
else()
  message(STATUS "Python 3 was not found: the manual page and the shells' completions are not built (${GYRE_HINT})")
endif()

# Component `library`: find_package(gyre), and gyre::train with what it needs.
foreach(library IN ITEMS options base train comm data model kernels choices emulated cuda)
  if(TARGET gyre_${library})
    set_target_properties(gyre_${library} PROPERTIES EXPORT_NAME ${library})
    install(TARGETS gyre_${library} EXPORT gyre ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}/gyre COMPONENT library)
  endif()
endforeach()
if(GYRE_EMULATION)
  install(TARGETS simt_emulator simt_options EXPORT gyre
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}/gyre COMPONENT library)
endif()
foreach(room IN ITEMS base comm data kernels model train)
  install(DIRECTORY ${room} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/gyre COMPONENT library
    FILES_MATCHING PATTERN "*.hpp" PATTERN cli EXCLUDE PATTERN example EXCLUDE PATTERN missing EXCLUDE)
endforeach()
set(package ${CMAKE_INSTALL_LIBDIR}/cmake/gyre)
install(EXPORT gyre NAMESPACE gyre:: FILE gyre-targets.cmake DESTINATION ${package} COMPONENT library)
configure_package_config_file(scripts/gyre-config.cmake.in ${PROJECT_BINARY_DIR}/gyre-config.cmake
  INSTALL_DESTINATION ${package})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/gyre-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/gyre-config.cmake ${PROJECT_BINARY_DIR}/gyre-config-version.cmake
  DESTINATION ${package} COMPONENT library)

# Component `bundle`, in the archive only: the libraries whose versions differ from one system to another, where the
# program looks first. Open MPI stays the system's, as its parts and its mpirun belong together, and so do the
# libraries of C and C++.
install(CODE [[
  file(GET_RUNTIME_DEPENDENCIES EXECUTABLES $<TARGET_FILE:gyre> RESOLVED_DEPENDENCIES_VAR libraries
    PRE_INCLUDE_REGEXES "^lib(fmt|crypto|png16|jpeg|webp|sharpyuv|z|lzma|gloo|hiredis|ibverbs|nl-3|nl-route-3|boost_context)[.]so"
    PRE_EXCLUDE_REGEXES ".")
  file(INSTALL ${libraries} DESTINATION ${CMAKE_INSTALL_PREFIX}/lib/gyre FOLLOW_SYMLINK_CHAIN)
  # Their licences, by the Debian packages that they are from, and those of the headers that are compiled in.
  set(packages libcli11-dev nlohmann-json3-dev)
  foreach(library IN LISTS libraries)
    get_filename_component(name ${library} NAME)
    execute_process(COMMAND dpkg-query -S */${name} OUTPUT_VARIABLE owner COMMAND_ERROR_IS_FATAL ANY)
    string(REGEX MATCH "^[^:]+" package ${owner})
    list(APPEND packages ${package})
  endforeach()
  foreach(package IN LISTS packages)
    file(INSTALL /usr/share/doc/${package}/copyright DESTINATION ${CMAKE_INSTALL_PREFIX}/lib/gyre/licences RENAME ${package})
  endforeach()
]] COMPONENT bundle EXCLUDE_FROM_ALL)

string(TOLOWER ${CMAKE_SYSTEM_NAME} system)
set(CPACK_PACKAGE_NAME gyre)
set(CPACK_PACKAGE_VENDOR "The gyre authors")
set(CPACK_PACKAGE_CONTACT "The gyre authors")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_PACKAGE_FILE_NAME gyre-${PROJECT_VERSION}-${system}-${CMAKE_SYSTEM_PROCESSOR})
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_COMPONENTS_GROUPING ALL_COMPONENTS_IN_ONE)
set(CPACK_STRIP_FILES ON)
set(CPACK_ARCHIVE_COMPONENT_INSTALL ON)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "openmpi-bin, dataset-fashion-mnist")
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "gnuplot-nox, libarchive13")
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_PROJECT_CONFIG_FILE ${PROJECT_SOURCE_DIR}/scripts/cpack.cmake)
set(CPACK_COMPONENTS_ALL program)
include(CPack)
