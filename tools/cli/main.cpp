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

// The command that was asked for, "" if none, with a space behind it.
std::string asked_command(const CLI::App& app) {
  const auto parsed = app.get_subcommands();
  return parsed.empty() ? "" : parsed.front()->get_name() + " ";
}

std::string help_hint(const CLI::App& app) { return fmt::format(" (see plait {}--help)", asked_command(app)); }

// A refusal of the library under the name of the option that the user gave.
std::string in_options(const CLI::App& app, const Error& error) {
  const auto parsed = app.get_subcommands();
  std::string option = "--" + error.argument();
  std::replace(option.begin(), option.end(), '_', '-');
  const bool given = !parsed.empty() && parsed.front()->get_option_no_throw(option) != nullptr &&
                     parsed.front()->get_option_no_throw(option)->count() > 0;
  return given ? option + std::string(error.what()).substr(error.argument().size()) : error.what();
}

// "; did you mean --seqlen-q, --seqlen-kv?" for an option that no command has.
std::string similar_options(const CLI::App& app) {
  std::string found;
  for (const CLI::App* command : app.get_subcommands()) {
    for (std::string extra : command->remaining()) {
      std::replace(extra.begin(), extra.end(), '_', '-');
      extra = extra.substr(0, extra.find('='));
      if (extra.size() < 3 || extra.compare(0, 2, "--") != 0) continue;
      for (const CLI::Option* option : command->get_options()) {
        const std::string name = option->get_name();
        if (name.find(extra.substr(2)) == std::string::npos && extra.find(name) == std::string::npos) continue;
        found += (found.empty() ? "; did you mean " : ", ") + name;
      }
    }
  }
  return found.empty() ? found : found + "?";
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
  if (argc < 2) {
    fmt::print("{}", app.help());
    return kExitOk;
  }
  const std::string first = argv[1];
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
  } catch (const CLI::ExtrasError& error) {
    return refuse(error.what() + similar_options(app) + help_hint(app));
  } catch (const CLI::ParseError& error) {
    return refuse(error.what() + help_hint(app));
  } catch (const Error& error) {
    return refuse(in_options(app, error) + help_hint(app));
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
