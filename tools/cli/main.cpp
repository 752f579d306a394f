// The `plait` command: parses, runs one command, and turns every failure into one line and an exit code.
// Called from the shell: plait doctor | explain | window | check | bench.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <new>
#include <string>

#include "commands.hpp"
#include "plait/error.hpp"
#include "plait/version.hpp"

namespace plait::cli {
namespace {

int refuse(std::string message) {
  std::replace(message.begin(), message.end(), '\n', ' ');
  fmt::print(stderr, "plait: error: {}\n", message);
  return kExitRefused;
}

// The commands by name, for messages.
std::string command_names(const CLI::App& app) {
  std::string names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
    names += (names.empty() ? "" : ", ") + command->get_name();
  return names;
}

int run_main(int argc, char** argv) {
  CLI::App app{"Exact attention and Interleaved Head Attention (IHA): what runs here, why, how exactly and how fast"};
  app.name("plait");
  app.set_version_flag("--version", fmt::format("plait {}", version()));
  app.require_subcommand(0, 1);
  app.footer(
      "Examples:\n"
      "  plait doctor\n"
      "  plait explain --seqlen-q 4096 --causal\n"
      "  plait window --P 4 8192 16384 32768 65536\n"
      "  plait check --causal --dtype bfloat16\n"
      "  plait bench --seqlen-q 2048 --head-dim 128 --causal\n"
      "Each command has its own --help. Exit codes: 0 ok, 1 a check failed, 2 wrong usage or a refused problem.");
  Run run;
  add_doctor(app, run);
  add_explain(app, run);
  add_window(app, run);
  add_check(app, run);
  add_bench(app, run);
  const std::string first = argc > 1 ? argv[1] : "";
  const std::string choose = fmt::format("expected one of {} (see plait --help)", command_names(app));
  const auto named = app.get_subcommands([&first](const CLI::App* command) { return command->get_name() == first; });
  if (first.empty() || (first[0] != '-' && named.empty())) {
    return refuse(fmt::format("command: got '{}', {}", first, choose));
  }
  try {
    app.parse(argc, argv);
    return run ? run() : refuse("command: got none, " + choose);
  } catch (const CLI::Success& asked) {  // --help, --version
    return app.exit(asked);
  } catch (const CLI::ParseError& error) {
    const auto parsed = app.get_subcommands();
    const std::string command = parsed.empty() ? "" : parsed.front()->get_name() + " ";
    return refuse(fmt::format("{} (see plait {}--help)", error.what(), command));
  } catch (const Error& error) {
    return refuse(error.what());
  } catch (const std::bad_alloc&) {
    return refuse("not enough memory for this problem; use smaller sizes");
  } catch (const std::exception& error) {
    return refuse(error.what());
  }
}

}  // namespace
}  // namespace plait::cli

int main(int argc, char** argv) {
  const int code = plait::cli::run_main(argc, argv);
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  std::fputs("plait: cannot write the output\n", stderr);
  return 2;
}
