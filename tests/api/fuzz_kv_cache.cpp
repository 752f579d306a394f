// Random steps over caches: a backend against the float64 reference, in two halves: what is appended, then what the
// attention makes of the cache that the backend left. Cache elements that nobody may read are NaN.
// Called through fuzz.hpp.
#include "api/fuzz.hpp"
#include "api/fuzz_cache.hpp"

namespace plait::testing {
namespace {

// Bytes of a tensor's elements, so that NaN equals NaN.
std::vector<std::string> bytes_of(const CanonicalTensor& t, const Shape& shape) {
  std::vector<std::string> all;
  const auto size = static_cast<size_t>(dtype_bytes(t.dtype));
  for_each_index(shape, [&](const reference::Index& i) {
    const char* at = static_cast<const char*>(t.data) + reference::offset(t, i) * static_cast<int64_t>(size);
    all.emplace_back(at, size);
  });
  return all;
}

// Whether each element of a cache belongs to a position that the step appends.
std::vector<bool> appended(const CacheCase& c, const Shape& shape) {
  std::vector<bool> all(static_cast<size_t>(elements(shape)));
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t position = c.lengths[b]; position < c.lengths[b] + c.new_keys; ++position) {
      const auto [row, slot] = c.place(b, position);
      size_t at = 0;
      for_each_index(shape, [&](const reference::Index& i) {
        if (i.batch == row && i.seq == slot) all[at] = true;
        ++at;
      });
    }
  }
  return all;
}

// One cache after the step: appended elements near the reference's, all others untouched.
void expect_cache(const char* what, const CacheCase& c, const CanonicalTensor& after, const Shape& shape,
                  const std::vector<std::string>& before, const std::vector<double>& expected, double bar) {
  const std::vector<bool> fresh = appended(c, shape);
  const std::vector<std::string> now = bytes_of(after, shape);
  const std::vector<double> numbers = values(after, shape);
  std::vector<double> got_fresh, expected_fresh;
  for (size_t i = 0; i < fresh.size(); ++i) {
    if (fresh[i]) {
      got_fresh.push_back(numbers[i]), expected_fresh.push_back(expected[i]);
    } else if (now[i] != before[i]) {
      throw Failure(fmt::format("{}[{}] changed and is not among the appended", what, i));
    }
  }
  expect_near(what, got_fresh, expected_fresh, after.dtype, bar);
}

}  // namespace

void fuzz_kv_cache(uint64_t seed, const Target& target) {
  const CacheCase c(seed, target.splits(), target.tensor_cores());
  const double lse_bar = target.tensor_cores() ? c.tensor_lse_bar() : c.lse_bar();
  const double out_bar = target.tensor_cores() ? c.tensor_out_bar() : c.out_bar();
  HostPlace host(1, true);
  CacheStep step(c, c.dtype, c.strides);
  const std::vector<std::string> k_before = bytes_of(step.k, step.k_shape), v_before = bytes_of(step.v, step.v_shape);
  const int64_t k_written = step.arena.written(step.k.data), v_written = step.arena.written(step.v.data);

  // The append, in float64 from the same numbers.
  CacheStep wide(c, DType::kFloat64, Strides::kBhsd);
  wide.take_numbers(step);
  wide.run(Backend::kReference, c.new_keys, host);
  step.run(target.backend(), c.new_keys, *target.place(c.workers, c.sequential));

  expect_cache("k_cache", c, step.k, step.k_shape, k_before, values(wide.k, wide.k_shape), c.mix_bar());
  expect_cache("v_cache", c, step.v, step.v_shape, v_before, values(wide.v, wide.v_shape), c.mix_bar());
  const auto grown = [&](const Shape& shape) { return c.batch * c.new_keys * shape[1] * shape[3] * shape[4]; };
  if (c.new_keys > 0) {
    expect_written("k_cache", step.arena, step.k.data, k_written + grown(step.k_shape));
    expect_written("v_cache", step.arena, step.v.data, v_written + grown(step.v_shape));
  }

  // The attention, in float64 over the cache that the backend left.
  wide.take_numbers(step);
  wide.run(Backend::kReference, 0, host);
  expect_near("lse", values(as_canonical(step.lse), step.lse_shape), values(as_canonical(wide.lse), wide.lse_shape),
              DType::kFloat32, lse_bar);
  expect_near("out", values(step.out, step.out_shape), values(wide.out, wide.out_shape), step.out.dtype, out_bar);
  expect_written("out", step.arena, step.out.data, elements(step.out_shape));
  expect_written("lse", step.arena, step.lse.data, elements(step.lse_shape));
}

}  // namespace plait::testing
