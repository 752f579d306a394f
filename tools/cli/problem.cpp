// Options of an attention problem, its shapes and its mask.
// Called through problem.hpp.
#include "problem.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "arguments.hpp"

namespace plait::cli {
namespace {

constexpr int64_t kMaxHeadDim = 1024;  // of the library

void add_shape_options(CLI::App& app, Problem& problem) {
  const std::string group = "Shape";
  add_integer(app, "--batch", problem.batch, 0, fmt::format("sequences (default {})", problem.batch))->group(group);
  add_integer(app, "--heads", problem.heads, 0, fmt::format("query heads (default {})", problem.heads))->group(group);
  add_integer(app, "--kv-heads", problem.heads_kv, 0, "key/value heads, a divisor of --heads (default --heads)")
      ->group(group);
  add_integer(app, "--seqlen-q", problem.seqlen_q, 0,
              fmt::format("query positions per sequence (default {})", problem.seqlen_q))
      ->group(group);
  add_integer(app, "--seqlen-kv", problem.seqlen_kv, 0, "key positions per sequence (default --seqlen-q)")
      ->group(group);
  add_integer(app, "--head-dim", problem.head_dim, 1, fmt::format("width of q and k (default {})", problem.head_dim),
              kMaxHeadDim)
      ->group(group);
  add_integer(app, "--head-dim-v", problem.head_dim_v, 1, "width of v and the output (default --head-dim)", kMaxHeadDim)
      ->group(group);
  add_choice<DType>(app, "--dtype", problem.dtype,
                    {{"float16", DType::kFloat16},
                     {"bfloat16", DType::kBFloat16},
                     {"float32", DType::kFloat32},
                     {"float64", DType::kFloat64}},
                    "dtype of q, k and v, default float32")
      ->group(group);
  add_choice<Layout>(app, "--layout", problem.options.layout, {{"bhsd", Layout::kBhsd}, {"bshd", Layout::kBshd}},
                     "order of dimensions, default bhsd")
      ->group(group);
  app.add_flag("--packed", problem.packed, "one packed tensor of --batch sequences, with cu_seqlens")->group(group);
}

void add_head_options(CLI::App& app, Problem& problem) {
  const std::string group = "Heads and mask";
  AttentionOptions& options = problem.options;
  add_choice<HeadMode>(
      app, "--mode", options.mode,
      {{"plain", HeadMode::kPlain}, {"joint", HeadMode::kJoint}, {"interleaved", HeadMode::kInterleaved}},
      "how pseudo-heads meet, default plain")
      ->group(group);
  add_integer(app, "--P", problem.pseudo_heads, 1, "pseudo-heads per head in joint and interleaved mode (default 1)")
      ->group(group);
  add_choice<PseudoMask>(app, "--mask", options.mask, {{"flat", PseudoMask::kFlat}, {"token", PseudoMask::kToken}},
                         "causal rule of interleaved mode, default flat")
      ->group(group);
  app.add_flag("--causal", options.causal, "row i sees keys up to i + Sk - Sq")->group(group);
  const auto window = [&options](const std::vector<std::string>& sides) {
    options.window_left = parse_integer("--window", sides.at(0), -1, INT64_MAX);
    options.window_right = parse_integer("--window", sides.at(1), -1, INT64_MAX);
  };
  app.add_option_function<std::vector<std::string>>(
         "--window", window, "LEFT and RIGHT: how many keys beside its own a row sees, -1 for all")
      ->expected(2)
      ->type_name("INT")
      ->group(group);
  add_real(app, "--scale", options.scale, "factor of the scores (default 1/sqrt(head dim))")->group(group);
  add_real(app, "--softcap", options.softcap, "softcap * tanh(score / softcap); 0 is off (default)")->group(group);
  app.add_flag("--sinks", problem.sinks, "one more logit per head in the softmax denominator")->group(group);
}

void add_plan_options(CLI::App& app, Problem& problem) {
  const std::string group = "Plan";
  AttentionOptions& options = problem.options;
  const auto backend = [&options](const std::string& name) { options.backend = parse_backend(name); };
  app.add_option_function<std::string>("--backend", backend, "auto, reference, cpu, cuda_naive, cuda_mma, cuda_sm90")
      ->type_name("NAME")
      ->group(group);
  const auto strategy = [&options](const std::string& name) { options.strategy = parse_strategy(name); };
  app.add_option_function<std::string>("--strategy", strategy, "of the forward: auto, split_q, split_kv, split_d")
      ->type_name("NAME")
      ->group(group);
  add_integer(app, "--split-size", options.split_size, 0,
              "keys per split of the forward, selects split_kv; 0 lets the planner choose")
      ->group(group);
  app.add_flag("--deterministic", options.deterministic, "gradients bit-equal run to run")->group(group);
  add_choice<std::optional<DType>>(app, "--out-dtype", options.out_dtype,
                                   {{"float16", DType::kFloat16},
                                    {"bfloat16", DType::kBFloat16},
                                    {"float32", DType::kFloat32},
                                    {"float64", DType::kFloat64}},
                                   "dtype of the output, default --dtype")
      ->group(group);
  add_integer(app, "--threads", problem.workers, 0, "CPU threads; 0 is every core (default)", 4096)->group(group);
}

}  // namespace

void add_problem_options(CLI::App& app, Problem& problem) {
  add_shape_options(app, problem);
  add_head_options(app, problem);
  add_plan_options(app, problem);
}

void add_run_device(CLI::App& app, Problem& problem) {
  app.add_option("--device", problem.device, "where to run: cpu (default), cuda, or cuda:N for one of several GPUs")
      ->check([](const std::string& name) {
        const bool here = name == "cpu" || name.substr(0, 4) == "cuda";
        return here ? std::string()
                    : fmt::format("got '{}', expected cpu, cuda or cuda:N; explain plans for others", name);
      });
}

void finish_problem(const Problem& problem) {
  if (problem.options.mode == HeadMode::kPlain && problem.pseudo_heads != 1) {
    throw CLI::ValidationError(
        "--P", fmt::format("got {} in plain mode; add --mode joint or --mode interleaved", problem.pseudo_heads));
  }
  const int64_t divisor = problem.kv_heads();
  if (divisor == 0 ? problem.heads != 0 : problem.heads % divisor != 0) {
    throw CLI::ValidationError(
        "--kv-heads", fmt::format("got {} for {} query heads, expected a divisor of {}; see also --heads", divisor,
                                  problem.heads, problem.heads));
  }
  const int64_t dim = std::max(problem.head_dim, problem.value_dim()),
                length = std::max(problem.seqlen_q, problem.kv_length());
  int64_t elements = 1;
  for (const int64_t extent :
       {problem.batch, std::max(problem.heads, problem.kv_heads()), length, problem.pseudo_heads, dim, int64_t{8}}) {
    if (extent != 0 && __builtin_mul_overflow(elements, extent, &elements)) {
      throw CLI::ValidationError("shape", "the tensors would be larger than a 64-bit address space; use smaller sizes");
    }
  }
}

DeviceInfo Problem::device_info() const {
  return device == "cpu" ? DeviceInfo::host(static_cast<int32_t>(workers)) : DeviceInfo::named(device);
}

int32_t Problem::gpu_index() const {
  constexpr std::string_view kPrefix = "cuda:";
  return device.size() > kPrefix.size() ? std::stoi(device.substr(kPrefix.size())) : 0;
}

TensorView Problem::view(Slot slot, void* data, DType slot_dtype) const {
  const bool of_query = slot == Slot::kQuery || slot == Slot::kOut;
  const int64_t slot_heads = of_query ? heads : kv_heads(), length = of_query ? seqlen_q : kv_length();
  const int64_t dim = slot == Slot::kQuery || slot == Slot::kKey ? head_dim : value_dim();
  const bool has_pseudo = slot == Slot::kOut ? interleaved() : pseudo();
  TensorView view;
  if (slot == Slot::kSinks) {
    view = TensorView::contiguous(data, slot_dtype, {heads});
  } else if (slot == Slot::kCuQuery || slot == Slot::kCuKey) {
    view = TensorView::contiguous(data, slot_dtype, {batch + 1});
  } else if (slot == Slot::kLse) {
    view = packed ? TensorView::contiguous(data, slot_dtype, {heads, batch * rows()})
                  : TensorView::contiguous(data, slot_dtype, {batch, heads, rows()});
  } else if (packed) {
    view = has_pseudo ? TensorView::contiguous(data, slot_dtype, {batch * length, slot_heads, pseudo_heads, dim})
                      : TensorView::contiguous(data, slot_dtype, {batch * length, slot_heads, dim});
  } else {
    const bool bhsd = options.layout == Layout::kBhsd;
    const int64_t first = bhsd ? slot_heads : length, second = bhsd ? length : slot_heads;
    view = has_pseudo ? TensorView::contiguous(data, slot_dtype, {batch, first, second, pseudo_heads, dim})
                      : TensorView::contiguous(data, slot_dtype, {batch, first, second, dim});
  }
  view.device.kind = device_info().kind;
  return view;
}

std::pair<int64_t, int64_t> Problem::interval(int64_t row) const {
  const int64_t group = interleaved() && options.mask == PseudoMask::kToken ? pseudo_heads : 1;
  const int64_t diagonal = row + keys() - rows();
  int64_t lo = 0, hi = keys();
  if (options.causal) {
    const int64_t last_of_group = diagonal - ((diagonal % group) + group) % group + group - 1;
    hi = std::min(hi, last_of_group + 1);
  }
  // A window at least as wide as everything there is limits nothing.
  const int64_t everything = rows() + keys();
  if (options.window_left >= 0 && options.window_left < everything) lo = std::max(lo, diagonal - options.window_left);
  if (options.window_right >= 0 && options.window_right < everything)
    hi = std::min(hi, diagonal + options.window_right + 1);
  return {std::min(lo, keys()), std::max<int64_t>(hi, 0)};
}

double Problem::visible_pairs() const {
  double pairs = 0;
  for (int64_t row = 0; row < rows(); ++row) {
    const auto [lo, hi] = interval(row);
    pairs += static_cast<double>(std::max<int64_t>(hi - lo, 0));
  }
  return pairs * static_cast<double>(passes()) * static_cast<double>(batch) * static_cast<double>(heads);
}

std::string Problem::describe() const {
  const char* const modes[] = {"plain", "joint", "interleaved"};
  std::string text = fmt::format("{} {}", modes[static_cast<int>(options.mode)], dtype_name(dtype));
  for (const auto& [name, slot] :
       {std::pair{"q", Slot::kQuery}, std::pair{"k", Slot::kKey}, std::pair{"v", Slot::kValue}}) {
    text += fmt::format(", {} {}", name, view(slot, nullptr, dtype).shape_string());
  }
  if (packed) text += ", packed";
  if (!packed && options.layout == Layout::kBshd) text += ", bshd";
  if (options.causal) text += ", causal";
  if (options.window_left >= 0 || options.window_right >= 0) {
    text += fmt::format(", window ({}, {})", options.window_left, options.window_right);
  }
  if (interleaved() && options.mask == PseudoMask::kToken) text += ", token mask";
  if (options.softcap > 0) text += fmt::format(", softcap {}", options.softcap);
  if (sinks) text += ", sinks";
  return text;
}

}  // namespace plait::cli
