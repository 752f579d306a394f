// Prints a plan.
// Called by users, `plait explain` and plait.explain().
#include <fmt/format.h>

#include "plait/plan.hpp"

namespace plait {

std::string Plan::explain() const {
  std::string text = fmt::format("{} on {}\n  backend    {}\n", op_name(op), device.name, backend_name(backend));
  if (strategy != Strategy::kAuto) text += fmt::format("  strategy   {}\n", strategy_name(strategy));
  if (tile_m > 0) text += fmt::format("  tile       {} rows x {} keys\n", tile_m, tile_n);
  if (split_size > 0) {
    text += fmt::format("  splits     {} of {} keys\n", splits, split_size);
  } else if (splits > 1) {
    text += fmt::format("  splits     {}, even shares\n", splits);
  }
  text += fmt::format("  workers    {}\n  workspace  {} bytes\n", workers, workspace_bytes);
  for (const std::string& reason : reasons) text += fmt::format("  because    {}\n", reason);
  return text;
}

}  // namespace plait
