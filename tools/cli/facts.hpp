// What `plait doctor` finds out about the machine, each with an answer even where nothing is found.
// Called by doctor.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace plait::cli {

struct Gpu {
  std::string name;
  int compute_capability = 0;
  double memory_gib = 0;
};

struct Driver {
  std::string kernel_module;    // version of the loaded NVIDIA kernel module, empty: none
  std::string library_problem;  // why libcuda cannot be used, empty: it works
  int cuda_version = 0;         // 13000 for CUDA 13.0
  std::vector<Gpu> gpus;
};

struct PythonFacts {
  std::string executable, version, torch, plait;  // empty: not found
};

std::string cpu_model();
// Instruction sets that matter here, as the kernel names them.
std::vector<std::string> cpu_features();
double memory_gib();
Driver nvidia_driver();
// Asks the Python that plait is installed in, else python3 on the PATH. Imports nothing heavy.
PythonFacts python_facts();

}  // namespace plait::cli
