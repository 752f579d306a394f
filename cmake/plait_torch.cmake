# Finds the headers of torch >= 2.10 without importing it, and decides whether the torch shim is built.
# Called by the root CMakeLists.txt; sets PLAIT_WITH_TORCH, PLAIT_TORCH_DIR (the torch package) and PLAIT_TORCH_VERSION.
set(PLAIT_WITH_TORCH OFF)
if(PLAIT_TORCH)
  find_package(Python 3.10 COMPONENTS Interpreter)
  # pip's build isolation hides the packages of the environment; the folder that sysconfig names still has them.
  set(find_torch "
import importlib.util, pathlib, sysconfig
spec = importlib.util.find_spec('torch')
folders = list(spec.submodule_search_locations) if spec else [pathlib.Path(sysconfig.get_path('platlib'), 'torch')]
version = pathlib.Path(folders[0], 'version.py')
if version.is_file():
    scope = {}
    exec(version.read_text(), scope)
    print(folders[0], str(scope['__version__']).split('+')[0], sep=';', end='')
")
  set(found "")
  if(Python_FOUND)
    execute_process(COMMAND ${Python_EXECUTABLE} -c "${find_torch}" OUTPUT_VARIABLE found ERROR_QUIET)
  endif()
  if(found)
    list(GET found 0 PLAIT_TORCH_DIR)
    list(GET found 1 PLAIT_TORCH_VERSION)
    if(PLAIT_TORCH_VERSION VERSION_GREATER_EQUAL 2.10 AND EXISTS "${PLAIT_TORCH_DIR}/include/torch/csrc/stable")
      set(PLAIT_WITH_TORCH ON)
    endif()
  endif()
  if(PLAIT_WITH_TORCH)
    message(STATUS "torch shim: built against torch ${PLAIT_TORCH_VERSION} at ${PLAIT_TORCH_DIR}")
  elseif(PLAIT_TORCH STREQUAL "AUTO")
    message(STATUS "torch shim: not built, no torch >= 2.10 found (got '${found}')")
  else()
    message(FATAL_ERROR "PLAIT_TORCH=${PLAIT_TORCH}: no torch >= 2.10 found by '${Python_EXECUTABLE}' (got '${found}'). "
                        "Install torch for that Python, name another with -DPython_EXECUTABLE, or set PLAIT_TORCH=OFF.")
  endif()
endif()
