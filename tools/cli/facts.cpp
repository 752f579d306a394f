// Reads /proc, asks libcuda through dlopen, and runs one short Python program.
// Called through facts.hpp.
#include "facts.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>

namespace plait::cli {
namespace {

// The value of the first "key : value" line of a /proc file; empty where there is none.
std::string proc_field(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, key.size(), key) != 0) continue;
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

constexpr double kGib = 1024.0 * 1024.0 * 1024.0;

// The calls of libcuda that doctor needs, by their C names.
struct Cuda {
  int (*init)(unsigned);
  int (*driver_version)(int*);
  int (*device_count)(int*);
  int (*device_name)(char*, int, int);
  int (*attribute)(int*, int, int);
  int (*total_memory)(size_t*, int);

  bool load(void* library) {
    return get(library, "cuInit", init) && get(library, "cuDriverGetVersion", driver_version) &&
           get(library, "cuDeviceGetCount", device_count) && get(library, "cuDeviceGetName", device_name) &&
           get(library, "cuDeviceGetAttribute", attribute) && get(library, "cuDeviceTotalMem_v2", total_memory);
  }

 private:
  template <class Function>
  static bool get(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
  }
};

void ask_libcuda(Driver& driver) {
  constexpr int kMajorAttribute = 75, kMinorAttribute = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    driver.library_problem = "libcuda.so.1 is not installed";
    return;
  }
  Cuda cuda{};
  int count = 0;
  if (!cuda.load(library)) {
    driver.library_problem = "libcuda.so.1 is too old";
  } else if (const int code = cuda.init(0); code != 0) {
    driver.library_problem = "cuInit failed with code " + std::to_string(code);
  } else if (cuda.driver_version(&driver.cuda_version) == 0 && cuda.device_count(&count) == 0) {
    for (int device = 0; device < count; ++device) {
      std::array<char, 256> name{};
      int major = 0, minor = 0;
      size_t memory_bytes = 0;
      cuda.device_name(name.data(), static_cast<int>(name.size()) - 1, device);
      cuda.attribute(&major, kMajorAttribute, device);
      cuda.attribute(&minor, kMinorAttribute, device);
      cuda.total_memory(&memory_bytes, device);
      driver.gpus.push_back({name.data(), 10 * major + minor, static_cast<double>(memory_bytes) / kGib});
    }
  }
  dlclose(library);
}

// PREFIX/bin/python3 when this program is PREFIX/lib/pythonX.Y/site-packages/plait/bin/plait, else python3.
std::string python_program() {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::filesystem::path packages = self.parent_path().parent_path().parent_path();
  const std::filesystem::path python = packages.parent_path().parent_path().parent_path() / "bin" / "python3";
  const bool installed = !error && packages.filename() == "site-packages" && access(python.c_str(), X_OK) == 0;
  return installed && python.string().find('\'') == std::string::npos ? python.string() : "python3";
}

}  // namespace

std::string cpu_model() {
  for (const char* key : {"model name", "Model", "CPU part"}) {
    const std::string value = proc_field("/proc/cpuinfo", key);
    if (!value.empty()) return value;
  }
  return "unknown processor";
}

std::vector<std::string> cpu_features() {
  std::string flags = proc_field("/proc/cpuinfo", "flags");
  if (flags.empty()) flags = proc_field("/proc/cpuinfo", "Features");
  std::vector<std::string> found;
  std::istringstream words(flags);
  for (std::string word; words >> word;) {
    for (const char* known : {"sse4_2", "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve"}) {
      if (word == known) found.push_back(word);
    }
  }
  return found;
}

double memory_gib() {
  return static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE)) / kGib;
}

Driver nvidia_driver() {
  Driver driver;
  std::string version = proc_field("/proc/driver/nvidia/version", "NVRM version");
  std::istringstream words(version);
  for (std::string word; words >> word;) {  // the first word that is a number with a dot
    const bool number =
        word.find_first_not_of("0123456789.") == std::string::npos && word.find('.') != std::string::npos;
    if (number && driver.kernel_module.empty()) driver.kernel_module = word;
  }
  ask_libcuda(driver);
  return driver;
}

PythonFacts python_facts() {
  constexpr const char* kProgram = R"(
import sys
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
print(sys.executable, sys.version.split()[0], version("torch"), version("plait"), sep="\n")
)";
  const std::string command = fmt::format("'{}' -c '{}' 2>/dev/null", python_program(), kProgram);
  PythonFacts facts;
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  if (!pipe) return facts;
  std::string output;
  std::array<char, 512> part{};
  while (std::fgets(part.data(), static_cast<int>(part.size()), pipe.get()) != nullptr) output += part.data();
  std::istringstream lines(output);
  for (std::string* field : {&facts.executable, &facts.version, &facts.torch, &facts.plait})
    std::getline(lines, *field);
  return facts;
}

}  // namespace plait::cli
