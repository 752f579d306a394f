/* The C API of plait: the functions of the C++ headers behind versioned structs. No exception crosses it.
 * Called from C and from any language with a C foreign-function interface.
 *
 * Every call returns a plait_status and, where `error` is not null, fills it. Nothing has run or been written when a
 * call fails. Parameter structs begin with `struct_size`: start from their _INIT macro, so that a program built against
 * an older header keeps working with a newer library. The other structs never change. Formulas, shapes and dtypes:
 * attention.hpp, iha.hpp, kv_cache.hpp.
 */
#ifndef PLAIT_PLAIT_H
#define PLAIT_PLAIT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#pragma GCC visibility push(default)
extern "C" {
#endif

typedef enum plait_status {
  PLAIT_OK = 0,
  PLAIT_INVALID_ARGUMENT = 1, /* a value, shape, dtype or combination that the contract forbids */
  PLAIT_UNSUPPORTED = 2,      /* legal, but no built backend can serve it */
  PLAIT_INTERNAL = 3,         /* a bug in the library, or no memory for the plan */
  PLAIT_DEVICE = 4            /* the GPU or its driver refused a call */
} plait_status;

typedef struct plait_error {
  plait_status status;
  char argument[64];  /* name of the refused argument, "" on success */
  char message[1984]; /* what was got, what is legal, the way out; cut at the end if longer */
} plait_error;

typedef enum plait_dtype {
  PLAIT_FLOAT16 = 0,
  PLAIT_BFLOAT16 = 1,
  PLAIT_FLOAT32 = 2,
  PLAIT_FLOAT64 = 3,
  PLAIT_INT32 = 4
} plait_dtype;

typedef enum plait_device_kind { PLAIT_CPU = 0, PLAIT_CUDA = 1 } plait_device_kind;
typedef enum plait_layout { PLAIT_BHSD = 0, PLAIT_BSHD = 1 } plait_layout;
typedef enum plait_head_mode { PLAIT_PLAIN = 0, PLAIT_JOINT = 1, PLAIT_INTERLEAVED = 2 } plait_head_mode;
typedef enum plait_pseudo_mask { PLAIT_FLAT = 0, PLAIT_TOKEN = 1 } plait_pseudo_mask;
typedef enum plait_rope_style { PLAIT_ROPE_HALF = 0, PLAIT_ROPE_PAIRS = 1 } plait_rope_style;
typedef enum plait_rope_index { PLAIT_ROPE_TOKEN = 0, PLAIT_ROPE_ROW = 1 } plait_rope_index;
typedef enum plait_iha_cache { PLAIT_CACHE_MIXED = 0, PLAIT_CACHE_RAW = 1 } plait_iha_cache;
typedef enum plait_strategy {
  PLAIT_STRATEGY_AUTO = 0,
  PLAIT_SPLIT_Q = 1,
  PLAIT_SPLIT_KV = 2,
  PLAIT_SPLIT_D = 3
} plait_strategy;
typedef enum plait_backend {
  PLAIT_BACKEND_AUTO = 0,
  PLAIT_BACKEND_REFERENCE = 1,
  PLAIT_BACKEND_CPU = 2,
  PLAIT_BACKEND_CUDA_NAIVE = 3,
  PLAIT_BACKEND_CUDA_MMA = 4,
  PLAIT_BACKEND_CUDA_SM90 = 5
} plait_backend;

#define PLAIT_MAX_RANK 5

/* A strided view that owns nothing; strides in elements, 0 for an expanded dimension. Its layout never changes. */
typedef struct plait_tensor {
  void* data;
  int32_t dtype;       /* plait_dtype */
  int32_t device_kind; /* plait_device_kind */
  int32_t device_index;
  int32_t rank;
  int64_t shape[PLAIT_MAX_RANK];
  int64_t stride[PLAIT_MAX_RANK];
} plait_tensor;

/* Fills `tensor` with a row-major view on the CPU. Fails on a rank outside 0 to 5. */
plait_status plait_tensor_contiguous(plait_tensor* tensor, void* data, plait_dtype dtype, int32_t rank,
                                     const int64_t* shape, plait_error* error);

typedef struct plait_options {
  uint32_t struct_size;
  int32_t mode;   /* plait_head_mode */
  int32_t mask;   /* plait_pseudo_mask */
  int32_t layout; /* plait_layout */
  int32_t causal; /* 0 or 1 */
  int32_t deterministic;
  int32_t strategy;     /* plait_strategy */
  int32_t backend;      /* plait_backend */
  int32_t out_dtype;    /* plait_dtype, or -1 for the dtype of q */
  int32_t has_scale;    /* 0: 1 / sqrt(head_dim) */
  double scale;         /* read when has_scale is 1 */
  double softcap;       /* 0 is off */
  int64_t window_left;  /* inclusive; -1 unbounded */
  int64_t window_right; /* inclusive; -1 unbounded */
  int64_t split_size;   /* keys per split; 0 lets the planner choose */
  int64_t reserved[8];  /* 0; options to come, so that the size of this embedded struct stays */
} plait_options;
#define PLAIT_OPTIONS_INIT {sizeof(plait_options), 0, 0, 0, 0, 0, 0, 0, -1, 0, 0.0, 0.0, -1, -1, 0, {0}}

typedef struct plait_rope {
  uint32_t struct_size;
  int32_t style; /* plait_rope_style */
  int32_t index; /* plait_rope_index */
  plait_tensor cos, sin;
  int64_t offset;
} plait_rope;
#define PLAIT_ROPE_INIT {sizeof(plait_rope), 0, 0, {0}, {0}, 0}

/* Pointers may be null where a tensor is optional, and outputs are null when only planning. */
typedef struct plait_attention {
  uint32_t struct_size;
  plait_options options;
  const plait_tensor *q, *k, *v;
  const plait_tensor* sinks;        /* optional */
  const plait_tensor* cu_seqlens_q; /* optional, with cu_seqlens_k: packed */
  const plait_tensor* cu_seqlens_k; /* optional */
  const plait_tensor *out, *lse;    /* written by a forward call, read by a backward call */
  const plait_tensor* dout;         /* backward */
  const plait_tensor* dlse;         /* backward, optional: zero */
  const plait_tensor *dq, *dk, *dv; /* written by a backward call */
  const plait_tensor* dsinks;       /* written by a backward call, with sinks */
} plait_attention;
#define PLAIT_ATTENTION_INIT {sizeof(plait_attention), PLAIT_OPTIONS_INIT, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

typedef struct plait_premix {
  uint32_t struct_size;
  int32_t layout;  /* plait_layout */
  int32_t backend; /* plait_backend */
  const plait_tensor *x, *w;
  const plait_rope* rope;               /* optional */
  const plait_tensor* cu_seqlens;       /* optional: packed */
  const plait_tensor* cu_seqlens_other; /* optional: of the keys when x are queries */
  const plait_tensor* y;                /* written by a forward call */
  const plait_tensor* dy;               /* backward */
  const plait_tensor *dx, *dw;          /* written by a backward call */
} plait_premix;
#define PLAIT_PREMIX_INIT {sizeof(plait_premix), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

typedef struct plait_collapse {
  uint32_t struct_size;
  int32_t layout;  /* plait_layout */
  int32_t backend; /* plait_backend */
  int32_t packed;  /* 0 or 1 */
  const plait_tensor *x, *r;
  const plait_tensor* y;       /* written by a forward call */
  const plait_tensor* dy;      /* backward */
  const plait_tensor *dx, *dr; /* written by a backward call */
} plait_collapse;
#define PLAIT_COLLAPSE_INIT {sizeof(plait_collapse), 0, 0, 0, 0, 0, 0, 0, 0, 0}

typedef struct plait_merge {
  uint32_t struct_size;
  int32_t layout; /* plait_layout */
  int32_t packed; /* 0 or 1 */
  int32_t workers;
  int64_t parts;
  const plait_tensor *outs, *lses; /* arrays of `parts` tensors */
  const plait_tensor *out, *lse;   /* written */
} plait_merge;
#define PLAIT_MERGE_INIT {sizeof(plait_merge), 0, 0, 1, 0, 0, 0, 0, 0}

/* Attention over a key/value cache; with `w_q` set, joint-mode IHA over one. */
typedef struct plait_kvcache {
  uint32_t struct_size;
  plait_options options;
  const plait_tensor *q, *k_cache, *v_cache; /* the caches are appended to in place */
  const plait_tensor *k_new, *v_new;         /* optional, both or none */
  const plait_tensor* cache_seqlens;
  const plait_tensor* block_table;     /* optional: paged */
  const plait_tensor* cache_batch_idx; /* optional */
  const plait_rope* rope;              /* optional */
  const plait_tensor* sinks;           /* optional */
  const plait_tensor *w_q, *w_k, *w_v; /* optional, all or none: IHA */
  int32_t iha_cache;                   /* plait_iha_cache, read with w_q */
  const plait_tensor *out, *lse;       /* written */
} plait_kvcache;
#define PLAIT_KVCACHE_INIT {sizeof(plait_kvcache), PLAIT_OPTIONS_INIT, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/* A device to plan for: "cpu" with its number of workers (0: all cores), "cuda" or "cuda:1" for a GPU of this machine,
 * or the catalog name of one that need not be present ("h200", ...). */
typedef struct plait_device {
  const char* name;
  int32_t workers;
} plait_device;

/* CPU: runs body(arg, worker) once for each worker in [0, workers), in parallel if it can, and returns when all are
 * done. A null executor, or a null `run`, means plain threads of the library. CUDA: kernels go to `stream` of the
 * tensors' device (a cudaStream_t; null: the default stream), without waiting. */
typedef struct plait_executor {
  void (*run)(void* context, int32_t workers, void (*body)(void* arg, int32_t worker), void* arg);
  void* context;
  void* stream;
} plait_executor;

/* What a plan is for. */
typedef enum plait_op {
  PLAIT_ATTENTION_FORWARD = 0,
  PLAIT_ATTENTION_BACKWARD = 1,
  PLAIT_PREMIX_FORWARD = 2,
  PLAIT_PREMIX_BACKWARD = 3,
  PLAIT_COLLAPSE_FORWARD = 4,
  PLAIT_COLLAPSE_BACKWARD = 5,
  PLAIT_KVCACHE_FORWARD = 6
} plait_op;

typedef struct plait_plan plait_plan;

/* Plans `op`. `params` is the struct of the op: plait_attention, plait_premix, plait_collapse or plait_kvcache.
 * On success *plan must be given to plait_plan_destroy; on failure *plan is null. */
plait_status plait_plan_create(plait_plan** plan, plait_op op, const void* params, const plait_device* device,
                               plait_error* error);
void plait_plan_destroy(plait_plan* plan);

/* Bytes of workspace that plait_run needs, 64-byte aligned; 0 for none. */
int64_t plait_plan_workspace_bytes(const plait_plan* plan);

/* Writes the plan as text, at most `size` bytes with the final zero; returns the bytes the whole text needs without it.
 */
size_t plait_plan_explain(const plait_plan* plan, char* buffer, size_t size);

/* Runs what was planned. `params` must describe the same problem, and now holds the outputs. */
plait_status plait_run(const plait_plan* plan, const void* params, void* workspace, const plait_executor* executor,
                       plait_error* error);

plait_status plait_merge_states(const plait_merge* params, const plait_executor* executor, plait_error* error);

typedef struct plait_flop_match {
  int64_t left, formula_left, visits, causal_visits;
  double visit_ratio;
} plait_flop_match;
/* mode: PLAIT_JOINT or PLAIT_INTERLEAVED. See flop_matched_window in iha.hpp. */
plait_status plait_flop_matched_window(int64_t seqlen, int64_t pseudo_heads, plait_head_mode mode, int64_t tile,
                                       plait_flop_match* match, plait_error* error);

const char* plait_version(void);

#ifdef __cplusplus
}
#pragma GCC visibility pop
#endif

#endif /* PLAIT_PLAIT_H */
