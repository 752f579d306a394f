// What the CPU backend promises beside accuracy: bit-equality, batch invariance, masked keys that never count,
// external LSE, empty problems, plans.
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>

#include "cpu/run.hpp"

namespace plait::testing {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

AttentionCase mixed_case(uint64_t seed) {
  AttentionCase c;
  c.problem = attention_problem(2, 6, 2, 150, 700, 40, 24);
  c.problem.causal = true, c.problem.has_sinks = true;
  c.strides = Strides::kRandom;
  c.seed = seed;
  return c;
}

// Everything a run writes, in one vector whose NaNs compare equal.
std::vector<double> results(const Attention& a, const AttentionTensors& t) {
  std::vector<double> all = values(t.out, a.out_shape);
  const auto append = [&](const std::vector<double>& more) { all.insert(all.end(), more.begin(), more.end()); };
  append(values(as_canonical(t.lse), a.lse_shape));
  if (t.dq.data != nullptr) {
    append(values(t.dq, a.q_shape));
    append(values(t.dk, a.k_shape));
    append(values(t.dv, a.v_shape));
    if (a.problem.has_sinks) append(values(a.dsinks(t), a.sinks_shape()));
  }
  for (double& v : all) v = std::isnan(v) ? 12345.0 : v;
  return all;
}

std::vector<double> run_both(Attention& a, const RunOptions& options) {
  const AttentionTensors forward = a.with_outputs();
  run_cpu(a.problem, forward, options);
  const AttentionTensors t = a.with_gradients(forward);
  run_cpu(a.problem, t, options);
  return results(a, t);
}

TEST(CpuBehaviour, BitEqualForAnyWorkersAndOrder) {
  for (const HeadMode mode : {HeadMode::kPlain, HeadMode::kJoint, HeadMode::kInterleaved}) {
    for (const Strategy strategy : {Strategy::kSplitQ, Strategy::kSplitKv}) {
      AttentionCase c = mixed_case(1);
      c.problem.mode = mode, c.problem.pseudo_heads = mode == HeadMode::kPlain ? 1 : 2;
      Attention a(c);
      const std::vector<double> once = run_both(a, {.workers = 1, .strategy = strategy});
      for (const int32_t workers : {1, 2, 3, 7}) {
        EXPECT_EQ(run_both(a, {.workers = workers, .strategy = strategy}), once) << workers << " workers";
      }
      EXPECT_EQ(run_both(a, {.workers = 3, .sequential = true, .strategy = strategy}), once);
    }
  }
}

// With more workers a task takes fewer row tiles through each packed key tile; a window makes their first keys differ.
TEST(CpuBehaviour, BitEqualHoweverTilesAreGrouped) {
  AttentionCase c;
  c.problem = attention_problem(1, 8, 8, 600, 600, 16, 16);
  c.problem.causal = true, c.problem.window_left = 70;
  Attention a(c);
  const std::vector<double> once = run_both(a, {.workers = 1});
  for (const int32_t workers : {3, 16}) EXPECT_EQ(run_both(a, {.workers = workers}), once) << workers << " workers";

  // A NaN value: rows that do not see its key keep their bits, however the tile of a row that does is grouped.
  constexpr int64_t kKey = 300;
  auto* v = static_cast<float*>(a.inputs.v.data);
  v[kKey * a.inputs.v.seq_stride] = NAN;
  const auto blind_rows = [&](int32_t workers) {
    const AttentionTensors t = a.with_outputs();
    run_cpu(a.problem, t, {.workers = workers});
    std::vector<double> rows = values(t.out, a.out_shape);
    for (int64_t row = kKey; row <= kKey + 70; ++row) std::fill_n(rows.begin() + row * 16, 16, 0.0);  // head 0 sees it
    return rows;
  };
  const std::vector<double> blind = blind_rows(1);
  for (const double x : blind) ASSERT_FALSE(std::isnan(x));
  for (const int32_t workers : {3, 16}) EXPECT_EQ(blind_rows(workers), blind) << workers << " workers";
}

TEST(CpuBehaviour, ChosenStrategyDoesNotDependOnWorkers) {
  for (const int64_t q : {1, 40, 5000}) {
    const AttentionProblem problem = attention_problem(1, 2, 2, q, 5000, 64, 64);
    Plan few, many;
    DeviceInfo device;
    cpu::plan_attention(problem, device, few);
    device.workers = 64;
    cpu::plan_attention(problem, device, many);
    EXPECT_EQ(few.strategy, q < 5000 ? Strategy::kSplitKv : Strategy::kSplitQ);
    EXPECT_EQ(few.strategy, many.strategy);
    EXPECT_EQ(few.split_size, many.split_size);
    EXPECT_GE(many.workers, 24) << q;
  }
}

TEST(CpuBehaviour, SplitsAgree) {
  AttentionCase c = mixed_case(2);
  for (const int64_t split_size : {1, 37, 128, 300, 100000}) {
    c.problem.split_size = split_size;
    SCOPED_TRACE(split_size);
    check_case(c);
  }
}

// A sequence alone, and the same sequence among others, dense and packed.
TEST(CpuBehaviour, FixedSplitIsBatchInvariant) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const std::vector<int32_t> q_lens{3, 20, 1, 70}, kv_lens{500, 333, 90, 1000};
    AttentionCase c;
    c.problem = attention_problem(1, 4, 2, 0, 0, 32, 32);
    c.problem.dtype = dtype, c.problem.causal = true, c.problem.split_size = 100;
    c.q_lens = q_lens, c.kv_lens = kv_lens, c.q_tail = 5, c.kv_tail = 9;
    Attention packed(c);
    const AttentionTensors together = packed.with_outputs();
    run_cpu(packed.problem, together);
    for (size_t i = 0; i < q_lens.size(); ++i) {
      AttentionCase one = c;
      one.q_lens.clear(), one.kv_lens.clear();
      one.problem.batch = 1, one.problem.seqlen_q = q_lens[i], one.problem.seqlen_kv = kv_lens[i];
      Attention alone(one);
      const auto copy = [&](const CanonicalTensor& from, const CanonicalTensor& to, const Shape& shape, int64_t begin) {
        for_each_index(shape, [&](const reference::Index& at) {
          reference::Index source = at;
          source.seq += begin;
          reference::store(to, at, reference::load(from, source));
        });
      };
      const int64_t q_begin = packed.inputs.cu_seqlens_q[i], kv_begin = packed.inputs.cu_seqlens_kv[i];
      copy(packed.inputs.q, alone.inputs.q, alone.q_shape, q_begin);
      copy(packed.inputs.k, alone.inputs.k, alone.k_shape, kv_begin);
      copy(packed.inputs.v, alone.inputs.v, alone.v_shape, kv_begin);
      const AttentionTensors single = alone.with_outputs();
      run_cpu(alone.problem, single, {.workers = 1});
      for_each_index(alone.out_shape, [&](const reference::Index& at) {
        reference::Index source = at;
        source.seq += q_begin;
        ASSERT_EQ(reference::load(single.out, at), reference::load(together.out, source)) << "sequence " << i;
      });
    }
  }
}

// NaN and infinity in keys, values, queries and dout must stay with the pairs that the mask lets through: results
// of rows and keys without such a pair are those of the same problem with the poison replaced by zeros.
TEST(CpuBehaviour, MaskedElementsNeverCount) {
  for (const double poison : {kNan, HUGE_VAL}) {
    AttentionCase c;
    c.problem = attention_problem(1, 2, 1, 90, 90, 20, 20);
    c.problem.causal = true, c.problem.window_left = 50;
    Attention poisoned(c), clean(c);
    const int64_t bad_key = 40, bad_row = 30;
    for (int64_t d = 0; d < 20; ++d) {
      for (const auto& [a, value] : {std::pair<Attention&, double>(poisoned, poison), {clean, 0.0}}) {
        reference::store(a.inputs.k, {0, 0, bad_key, 0, d}, value);
        reference::store(a.inputs.v, {0, 0, bad_key, 0, d}, value);
        reference::store(a.inputs.q, {0, 0, bad_row, 0, d}, value);
        reference::store(a.inputs.dout, {0, 0, bad_row, 0, d}, value);
      }
    }
    AttentionTensors got = poisoned.with_outputs(), expected = clean.with_outputs();
    run_cpu(poisoned.problem, got), run_cpu(clean.problem, expected);
    const auto sees = [](int64_t row, int64_t key) { return key <= row && row - key <= 50; };
    const auto expect_rows = [&](const CanonicalTensor& x, const CanonicalTensor& y, bool rows) {
      for (int64_t head = 0; head < (rows ? 2 : 1); ++head) {
        for (int64_t i = 0; i < 90; ++i) {
          const bool touched = rows ? sees(i, bad_key) || i == bad_row : sees(bad_row, i) || i == bad_key;
          // dk and dv of a key also mix in rows that saw the bad key.
          const bool indirect = !rows && [&] {
            for (int64_t row = 0; row < 90; ++row) {
              if (sees(row, i) && sees(row, bad_key)) return true;
            }
            return false;
          }();
          if (touched || indirect) continue;
          for (int64_t d = 0; d < 20; ++d) {
            ASSERT_NEAR(reference::load(x, {0, head, i, 0, d}), reference::load(y, {0, head, i, 0, d}), 1e-5)
                << (rows ? "row " : "key ") << i;
          }
        }
      }
    };
    expect_rows(got.out, expected.out, true);
    EXPECT_TRUE(std::isnan(reference::load(got.out, {0, 0, bad_key, 0, 0})));
    got = poisoned.with_gradients(got), expected = clean.with_gradients(expected);
    run_cpu(poisoned.problem, got), run_cpu(clean.problem, expected);
    expect_rows(got.dq, expected.dq, true);
    expect_rows(got.dk, expected.dk, false);
    expect_rows(got.dv, expected.dv, false);
    EXPECT_TRUE(std::isnan(reference::load(got.dk, {0, 0, 0, 0, 0})));
  }
}

// Keys outside every interval are never read: here they lie on pages without access.
TEST(CpuBehaviour, KeysOutsideEveryIntervalAreNotRead) {
  constexpr int64_t kLength = 600, kRows = 10, kDim = 16;
  AttentionCase c;
  c.problem = attention_problem(1, 1, 1, kRows, kLength, kDim, kDim);
  c.problem.window_left = 5, c.problem.window_right = 3;  // the rows see keys 585 to 599
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), row_bytes = kDim * sizeof(float);
  const size_t closed = (kLength - 24) * row_bytes / page * page;  // at most 576 keys
  ASSERT_GT(closed, size_t{0});
  Attention a(c);
  const std::vector<double> whole = run_both(a, {});
  std::vector<void*> maps;
  for (CanonicalTensor* t : {&a.inputs.k, &a.inputs.v}) {
    void* map = mmap(nullptr, kLength * row_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(map, MAP_FAILED);
    maps.push_back(map);
    const CanonicalTensor moved{map, DType::kFloat32, 0, 0, kDim, 0, 1};
    assign(moved, a.k_shape, values(*t, a.k_shape));
    ASSERT_EQ(mprotect(map, closed, PROT_NONE), 0);
    *t = moved;
  }
  EXPECT_EQ(run_both(a, {}), whole);
  for (void* map : maps) munmap(map, kLength * row_bytes);
}

TEST(CpuBehaviour, FullyMaskedRowsAndSinks) {
  for (const bool sinks : {false, true}) {
    AttentionCase c;
    c.problem = attention_problem(1, 2, 2, 100, 30, 16, 16);  // rows 0 to 69 see nothing
    c.problem.causal = true, c.problem.has_sinks = sinks;
    Attention a(c);
    const AttentionTensors forward = a.with_outputs();
    run_cpu(a.problem, forward);
    for (int64_t head = 0; head < 2; ++head) {
      const double sink = sinks ? reference::load(a.sinks(), {0, 0, head, 0, 0}) : -HUGE_VAL;
      for (int64_t row = 0; row < 70; ++row) {
        EXPECT_EQ(reference::load(forward.out, {0, head, row, 0, 3}), 0.0);
        const double lse = reference::load(forward.lse, 0, head, row);
        EXPECT_TRUE(sinks ? std::abs(lse - sink) < 1e-6 : lse == -HUGE_VAL) << lse;
      }
    }
    check_case(c);
  }
}

// P = exp(S - LSE) with an LSE from outside, and an LSE of -inf that silences its row.
TEST(CpuBehaviour, ExternalOutAndLse) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    AttentionCase c = mixed_case(5);
    c.problem.dtype = dtype;
    Attention a(c);
    Oracle oracle(a);
    AttentionTensors forward = a.with_outputs();
    for_each_index(a.out_shape, [&](const reference::Index& i) {
      const double value = 0.5 * reference::load(oracle.tensors.out, i);
      reference::store(forward.out, i, value);
      reference::store(oracle.tensors.out, i, reference::load(forward.out, i));
    });
    for_each_index(a.lse_shape, [&](const reference::Index& i) {
      double value = reference::load(oracle.tensors.lse, i.batch, i.head, i.seq) + 0.3 * std::sin(i.seq);
      if (i.seq % 17 == 3) value = -HUGE_VAL;
      reference::store(forward.lse, i.batch, i.head, i.seq, value);
      reference::store(oracle.tensors.lse, i.batch, i.head, i.seq,
                       reference::load(forward.lse, i.batch, i.head, i.seq));
    });
    reference::attention_backward(a.problem, oracle.tensors);
    const AttentionTensors t = a.with_gradients(forward);
    run_cpu(a.problem, t);
    const Bars bars = bars_of(dtype);
    expect_close(values(t.dq, a.q_shape), values(oracle.tensors.dq, a.q_shape), bars.dq_dk, 0, "dq");
    expect_close(values(t.dk, a.k_shape), values(oracle.tensors.dk, a.k_shape), bars.dq_dk, 0, "dk");
    expect_close(values(t.dv, a.v_shape), values(oracle.tensors.dv, a.v_shape), bars.dv, 0, "dv");
    expect_close(values(a.dsinks(t), a.sinks_shape()), values(a.dsinks(oracle.tensors), a.sinks_shape()), 1e-5, 0,
                 "dsinks");
  }
}

TEST(CpuBehaviour, NoLseGradientIsZeroLseGradient) {
  AttentionCase c = mixed_case(6);
  Attention a(c);
  for_each_index(a.lse_shape,
                 [&](const reference::Index& i) { reference::store(a.inputs.dlse, i.batch, i.head, i.seq, 0.0); });
  const std::vector<double> zero = run_both(a, {});
  a.inputs.dlse.data = nullptr;
  EXPECT_EQ(run_both(a, {}), zero);
}

TEST(CpuBehaviour, WorkspaceIsLinearInLength) {
  for (const Op op : {Op::kAttentionForward, Op::kAttentionBackward}) {
    for (const int64_t q : {int64_t{1}, int64_t{0}}) {
      int64_t bytes[2];
      for (int i = 0; i < 2; ++i) {
        const int64_t length = int64_t{65536} << i;
        AttentionProblem problem = attention_problem(1, 8, 8, q > 0 ? q : length, length, 128, 128);
        problem.op = op;
        Plan plan;
        DeviceInfo device;
        device.workers = 2;
        cpu::plan_attention(problem, device, plan);
        bytes[i] = plan.workspace_bytes;
      }
      EXPECT_LE(bytes[1], 2 * bytes[0] + 1024) << "op " << static_cast<int>(op);
    }
  }
}

}  // namespace
}  // namespace plait::testing
