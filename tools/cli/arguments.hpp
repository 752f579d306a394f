// Numbers and names on the command line, read strictly: whole numbers in range, choices by name.
// Called by every command when it adds its options.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace plait::cli {

// Larger sizes than this are refused before anything multiplies them.
constexpr int64_t kMaxSize = int64_t{1} << 40;

// Throws CLI::ValidationError naming `option` unless `text` is a whole decimal number in [low, high].
int64_t parse_integer(const std::string& option, const std::string& text, int64_t low, int64_t high);

// An option that takes one whole number in [low, high].
CLI::Option* add_integer(CLI::App& app, const std::string& name, int64_t& value, int64_t low, const std::string& help,
                         int64_t high = kMaxSize);
CLI::Option* add_integer(CLI::App& app, const std::string& name, std::optional<int64_t>& value, int64_t low,
                         const std::string& help, int64_t high = kMaxSize);

// An option that takes one decimal number (finiteness is the library's to judge).
CLI::Option* add_real(CLI::App& app, const std::string& name, double& value, const std::string& help);
CLI::Option* add_real(CLI::App& app, const std::string& name, std::optional<double>& value, const std::string& help);

// An option that takes one of the given names.
template <class Value>
CLI::Option* add_choice(CLI::App& app, const std::string& name, Value& value,
                        const std::vector<std::pair<std::string, Value>>& choices, const std::string& help) {
  std::string legal;
  for (const auto& choice : choices) legal += (legal.empty() ? "" : ", ") + choice.first;
  const auto read = [name, &value, choices, legal](const std::string& text) {
    for (const auto& [candidate, meaning] : choices) {
      if (candidate != text) continue;
      value = meaning;
      return;
    }
    throw CLI::ValidationError(name, "got '" + text + "', expected one of " + legal);
  };
  return app.add_option_function<std::string>(name, read, help + " (" + legal + ")");
}

}  // namespace plait::cli
