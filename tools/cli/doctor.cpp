// `plait doctor`: what this machine has, what plait can use of it, what is missing and how to get it.
// Called by main.cpp.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "commands.hpp"
#include "facts.hpp"
#include "plait/plan.hpp"
#include "plait/version.hpp"

namespace plait::cli {
namespace {

void line(const char* name, const std::string& text) { fmt::print("  {:<10} {}\n", name, text); }

std::string driver_text(const Driver& driver) {
  if (driver.kernel_module.empty() && !driver.library_problem.empty())
    return "no NVIDIA driver (" + driver.library_problem + ")";
  std::string text = driver.kernel_module.empty() ? "no kernel module seen" : "driver " + driver.kernel_module;
  if (driver.cuda_version > 0)
    text += fmt::format(", CUDA up to {}.{}", driver.cuda_version / 1000, driver.cuda_version % 1000 / 10);
  if (!driver.library_problem.empty()) text += ", " + driver.library_problem;
  return text;
}

std::vector<std::string> advice(const Driver& driver, const PythonFacts& python, bool cuda_built) {
  std::vector<std::string> lines;
  if (python.executable.empty()) {
    lines.emplace_back("python3 was not found: install Python 3.10 or newer to use plait from PyTorch");
  } else {
    if (python.torch.empty())
      lines.push_back(fmt::format("no torch for this Python: {} -m pip install torch", python.executable));
    if (python.plait.empty())
      lines.emplace_back("the plait package is not installed for this Python: run `make setup` in a checkout");
  }
  if (!driver.gpus.empty() && !cuda_built) {
    lines.emplace_back("this build has no CUDA backend, so the GPU is not used; the CPU backend serves every call");
  }
  constexpr int kCuda13 = 13000;
  if (cuda_built && driver.cuda_version > 0 && driver.cuda_version < kCuda13) {
    lines.emplace_back(
        "the NVIDIA driver is too old for the CUDA 13 kernels of this build: install driver 580 or newer");
  }
  if (!driver.kernel_module.empty() && !driver.library_problem.empty()) {
    lines.push_back("the NVIDIA driver cannot be used: " + driver.library_problem +
                    "; install the driver's libcuda for this system");
  }
  return lines;
}

int doctor() {
  const DeviceInfo host = DeviceInfo::host();
  const Driver driver = nvidia_driver();
  const PythonFacts python = python_facts();
  fmt::print("plait {}\nmachine\n", version());
  line("cpu", fmt::format("{}, {} usable cores, {}", cpu_model(), host.workers, fmt::join(cpu_features(), " ")));
  line("memory", fmt::format("{:.1f} GiB", memory_gib()));
  line("nvidia", driver_text(driver));
  for (const Gpu& gpu : driver.gpus) {
    line("gpu", fmt::format("{}, sm_{}, {:.1f} GiB", gpu.name, gpu.compute_capability, gpu.memory_gib));
  }
  fmt::print("backends\n");
  bool cuda_built = false;
  for (const Backend backend :
       {Backend::kReference, Backend::kCpu, Backend::kCudaNaive, Backend::kCudaMma, Backend::kCudaSm90}) {
    const bool here = backend_is_built(backend);
    cuda_built = cuda_built || (here && backend >= Backend::kCudaNaive);
    line(backend_name(backend), here ? "built" : "not in this build");
  }
  fmt::print("python\n");
  line("python", python.executable.empty() ? "not found" : python.version + " at " + python.executable);
  line("torch", python.torch.empty() ? "not found" : python.torch);
  line("plait", python.plait.empty() ? "not found" : python.plait);
  const std::vector<std::string> missing = advice(driver, python, cuda_built);
  fmt::print("missing\n");
  for (const std::string& text : missing) fmt::print("  {}\n", text);
  if (missing.empty()) fmt::print("  nothing\n");
  return kExitOk;
}

}  // namespace

void add_doctor(CLI::App& app, Run& run) {
  CLI::App* command =
      app.add_subcommand("doctor", "Show the machine, the backends of this build, devices, torch and what is missing");
  command->footer("Example:\n  plait doctor");
  command->callback([&run] { run = doctor; });
}

}  // namespace plait::cli
