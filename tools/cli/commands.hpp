// The commands of the CLI: each adds itself to the parser and, when it is the one asked for, sets what to run.
// Called by main.cpp.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace plait::cli {

constexpr int kExitOk = 0;
constexpr int kExitCheckFailed = 1;
constexpr int kExitRefused = 2;  // usage, or a problem that the library refuses

// What to run after parsing; returns the exit code.
using Run = std::function<int()>;

void add_doctor(CLI::App& app, Run& run);
void add_explain(CLI::App& app, Run& run);
void add_window(CLI::App& app, Run& run);
void add_check(CLI::App& app, Run& run);
void add_bench(CLI::App& app, Run& run);

}  // namespace plait::cli
