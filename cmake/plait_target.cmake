# One place for what every target of the project is compiled with.
# Called by each CMakeLists.txt: plait_target(name) after add_library or add_executable.
function(plait_target name)
  target_compile_options(${name} PRIVATE -Wall -Wextra -Wshadow)
  if(PLAIT_WERROR)
    target_compile_options(${name} PRIVATE -Werror)
  endif()
  if(PLAIT_SANITIZE)
    target_compile_options(${name} PRIVATE -fsanitize=${PLAIT_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_link_options(${name} PRIVATE -fsanitize=${PLAIT_SANITIZE})
  endif()
endfunction()
