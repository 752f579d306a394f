// Names of enums as the public API spells them, and their parsers.
// Called by explain(), by error messages, by the CLI and by the torch shim.
#include <fmt/format.h>

#include <array>
#include <utility>

#include "plait/error.hpp"
#include "plait/plan.hpp"

namespace plait {
namespace {

constexpr std::array<std::pair<Backend, const char*>, 6> kBackends{{{Backend::kAuto, "auto"},
                                                                    {Backend::kReference, "reference"},
                                                                    {Backend::kCpu, "cpu"},
                                                                    {Backend::kCudaNaive, "cuda_naive"},
                                                                    {Backend::kCudaMma, "cuda_mma"},
                                                                    {Backend::kCudaSm90, "cuda_sm90"}}};
constexpr std::array<std::pair<Strategy, const char*>, 4> kStrategies{{{Strategy::kAuto, "auto"},
                                                                       {Strategy::kSplitQ, "split_q"},
                                                                       {Strategy::kSplitKv, "split_kv"},
                                                                       {Strategy::kSplitD, "split_d"}}};
constexpr std::array<std::pair<Op, const char*>, 7> kOps{{{Op::kAttentionForward, "attention_forward"},
                                                          {Op::kAttentionBackward, "attention_backward"},
                                                          {Op::kPremixForward, "premix_forward"},
                                                          {Op::kPremixBackward, "premix_backward"},
                                                          {Op::kCollapseForward, "collapse_forward"},
                                                          {Op::kCollapseBackward, "collapse_backward"},
                                                          {Op::kKvCacheForward, "attention_with_kvcache"}}};
constexpr std::array<std::pair<DType, const char*>, 6> kDtypes{{{DType::kFloat16, "float16"},
                                                                {DType::kBFloat16, "bfloat16"},
                                                                {DType::kFloat32, "float32"},
                                                                {DType::kFloat64, "float64"},
                                                                {DType::kInt32, "int32"},
                                                                {DType::kOther, "another dtype"}}};

template <class Table, class Value>
const char* name_in(const Table& table, Value value) {
  for (const auto& [candidate, name] : table) {
    if (candidate == value) return name;
  }
  return "?";
}

template <class Value, class Table>
Value parse_in(const Table& table, const char* argument, std::string_view text) {
  std::string legal;
  for (const auto& [value, name] : table) {
    if (text == name) return value;
    legal += (legal.empty() ? "" : ", ") + std::string(name);
  }
  throw Error(ErrorCode::kInvalidArgument, argument, fmt::format("got '{}', expected one of {}", text, legal));
}

}  // namespace

const char* backend_name(Backend backend) { return name_in(kBackends, backend); }
const char* strategy_name(Strategy strategy) { return name_in(kStrategies, strategy); }
const char* op_name(Op op) { return name_in(kOps, op); }
const char* dtype_name(DType dtype) { return name_in(kDtypes, dtype); }
Backend parse_backend(std::string_view name) { return parse_in<Backend>(kBackends, "backend", name); }
Strategy parse_strategy(std::string_view name) { return parse_in<Strategy>(kStrategies, "strategy", name); }

}  // namespace plait
