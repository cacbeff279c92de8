# Read by cpack for each kind of package: an archive has a folder of its own, and the libraries that other systems lack.
if(CPACK_GENERATOR STREQUAL "TGZ")
  set(CPACK_COMPONENT_INCLUDE_TOPLEVEL_DIRECTORY ON)
  list(APPEND CPACK_COMPONENTS_ALL bundle)
endif()
