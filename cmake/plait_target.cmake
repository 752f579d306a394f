# One place for what every target of the project is compiled with.
# Called by each CMakeLists.txt: plait_target(name) after add_library or add_executable.
function(plait_target name)
  target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wshadow>
                                         $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>)
  if(PLAIT_WERROR)
    # ptxas warns of spills and local memory, which cost speed in silence; of serialised wgmma it informs (.ci/run looks).
    target_compile_options(
      ${name} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Werror>
                      $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;-Xptxas=--warn-on-spills,--warn-on-local-memory-usage,--warning-as-error>)
  endif()
  if(PLAIT_SANITIZE)
    target_compile_options(${name} PRIVATE -fsanitize=${PLAIT_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_link_options(${name} PRIVATE -fsanitize=${PLAIT_SANITIZE})
  endif()
endfunction()
