// `plait window`: the window that makes IHA cost what causal attention costs.
// Called by main.cpp.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "arguments.hpp"
#include "commands.hpp"
#include "plait/iha.hpp"

namespace plait::cli {
namespace {

constexpr int64_t kMaxPositions = int64_t{1} << 32;  // what flop_matched_window takes

struct Window {
  std::vector<int64_t> lengths;
  int64_t pseudo_heads = 4, tile = 128;
  HeadMode mode = HeadMode::kJoint;
  bool json = false;
  bool given = false;  // --P
};

int window(const Window& asked) {
  nlohmann::json rows = nlohmann::json::array();
  std::string table = fmt::format("{:>10} {:>10} {:>12} {:>14} {:>14} {:>7}\n", "N", "formula", "tile-matched",
                                  "visits", "causal visits", "ratio");
  for (const int64_t length : asked.lengths) {
    if (asked.pseudo_heads > 1 && asked.pseudo_heads > length / 2) {
      throw CLI::ValidationError(
          "--P", fmt::format("got {}{} with N = {}, expected 2P <= N; name longer sequences or a smaller --P",
                             asked.pseudo_heads, asked.given ? "" : " (the default)", length));
    }
    const FlopMatch match = flop_matched_window(length, asked.pseudo_heads, asked.mode, asked.tile);
    rows.push_back({{"N", length},
                    {"P", asked.pseudo_heads},
                    {"tile", asked.tile},
                    {"mode", asked.mode == HeadMode::kJoint ? "joint" : "interleaved"},
                    {"formula_left", match.formula_left},
                    {"left", match.left},
                    {"visits", match.visits},
                    {"causal_visits", match.causal_visits},
                    {"visit_ratio", match.visit_ratio}});
    table += fmt::format("{:>10} {:>10} {:>12} {:>14} {:>14} {:>7.4f}\n", length, match.formula_left, match.left,
                         match.visits, match.causal_visits, match.visit_ratio);
  }
  fmt::print("{}", asked.json ? rows.dump(2) + "\n" : table);
  return kExitOk;
}

}  // namespace

void add_window(CLI::App& app, Run& run) {
  const auto asked = std::make_shared<Window>();
  CLI::App* command = app.add_subcommand(
      "window", "Print the window that makes IHA visit as many key tiles as causal attention does at length N");
  const auto lengths = [asked](const std::vector<std::string>& texts) {
    for (const std::string& text : texts) asked->lengths.push_back(parse_integer("N", text, 1, kMaxPositions));
  };
  command->add_option_function<std::vector<std::string>>("N", lengths, "sequence lengths")
      ->required()
      ->type_name("INT");
  CLI::Option* const pseudo_heads =
      add_integer(*command, "--P", asked->pseudo_heads, 1, "pseudo-heads per head (default 4)");
  add_integer(*command, "--tile", asked->tile, 1, "rows and keys of a tile (default 128)", kMaxPositions);
  add_choice<HeadMode>(*command, "--mode", asked->mode,
                       {{"joint", HeadMode::kJoint}, {"interleaved", HeadMode::kInterleaved}},
                       "how pseudo-heads meet, default joint");
  command->add_flag("--json", asked->json, "print JSON");
  command->footer(
      "tile-matched is LEFT of --window, beside --causal: the row itself and LEFT keys before it; -1 is unbounded.\n"
      "In interleaved mode it counts virtual rows, N*P of them.\n"
      "Examples:\n"
      "  plait window --P 4 8192 16384 32768 65536\n"
      "  plait window --P 2 --mode interleaved --json 4096");
  command->callback([asked, pseudo_heads, &run] {
    asked->given = pseudo_heads->count() > 0;
    run = [asked] { return window(*asked); };
  });
}

}  // namespace plait::cli
