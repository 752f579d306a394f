// Strict number parsing.
// Called through arguments.hpp.
#include "arguments.hpp"

#include <fmt/format.h>

#include <charconv>

namespace plait::cli {
namespace {

template <class Target>
CLI::Option* add_integer_to(CLI::App& app, const std::string& name, Target& value, int64_t low, const std::string& help,
                            int64_t high) {
  const auto read = [name, &value, low, high](const std::string& text) {
    value = parse_integer(name, text, low, high);
  };
  return app.add_option_function<std::string>(name, read, help)->type_name("INT");
}

template <class Target>
CLI::Option* add_real_to(CLI::App& app, const std::string& name, Target& value, const std::string& help) {
  const auto read = [name, &value](const std::string& text) {
    double number = 0;
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, number);
    if (error != std::errc() || stop != end) {
      throw CLI::ValidationError(name, fmt::format("got '{}', expected a number", text));
    }
    value = number;
  };
  return app.add_option_function<std::string>(name, read, help)->type_name("FLOAT");
}

}  // namespace

int64_t parse_integer(const std::string& option, const std::string& text, int64_t low, int64_t high) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  const bool whole = error == std::errc() && stop == end;
  if (!whole || value < low || value > high) {
    throw CLI::ValidationError(option, fmt::format("got '{}', expected a whole number from {} to {}", text, low, high));
  }
  return value;
}

CLI::Option* add_integer(CLI::App& app, const std::string& name, int64_t& value, int64_t low, const std::string& help,
                         int64_t high) {
  return add_integer_to(app, name, value, low, help, high);
}

CLI::Option* add_integer(CLI::App& app, const std::string& name, std::optional<int64_t>& value, int64_t low,
                         const std::string& help, int64_t high) {
  return add_integer_to(app, name, value, low, help, high);
}

CLI::Option* add_real(CLI::App& app, const std::string& name, double& value, const std::string& help) {
  return add_real_to(app, name, value, help);
}

CLI::Option* add_real(CLI::App& app, const std::string& name, std::optional<double>& value, const std::string& help) {
  return add_real_to(app, name, value, help);
}

}  // namespace plait::cli
