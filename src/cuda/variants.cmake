# The instantiation table of cuda_mma: one generated .cu for each dtype and head-dim bucket of a kernel folder.
# Called by CMakeLists.txt of this folder.
set(plait_type_float16 __half)
set(plait_type_bfloat16 __nv_bfloat16)

# plait_variants(target folder): instantiates folder/variant.cu.in for PLAIT_DTYPES x PLAIT_HEAD_DIMS.
function(plait_variants target folder)
  string(REPLACE "/" "_" name ${folder})
  foreach(dtype ${PLAIT_DTYPES})
    foreach(PLAIT_HEAD_DIM ${PLAIT_HEAD_DIMS})
      set(PLAIT_TYPE ${plait_type_${dtype}})
      if(NOT PLAIT_TYPE)
        message(FATAL_ERROR "PLAIT_DTYPES: got '${dtype}', expected float16 or bfloat16")
      endif()
      set(file ${CMAKE_CURRENT_BINARY_DIR}/variants/${name}_${dtype}_${PLAIT_HEAD_DIM}.cu)
      configure_file(${folder}/variant.cu.in ${file} @ONLY)
      target_sources(${target} PRIVATE ${file})
    endforeach()
  endforeach()
endfunction()
