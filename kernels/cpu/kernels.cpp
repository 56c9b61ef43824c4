// The C interface: every operator for bfloat16 and for float32. Shapes are checked by the caller, `operators.py`.
//
// Built once for each instruction set by `build.py`; no other headers than the compiler's own are needed.
#include "blocks.h"
#include "sampling.h"

using namespace pagoda;

// Run a statement on every thread of a team.
#define PAGODA_TEAM(num_threads, statement) on_team(num_threads, [&](Team& team) { statement; });

#define PAGODA_OPERATORS(T, NAME)                                                                                     \
    void pagoda_pack_##NAME(const T* weight, int64_t columns, int64_t depth, T* panels, int num_threads) {            \
        const auto source = [=](int64_t column) { return column < columns ? column : -1; };                           \
        PAGODA_TEAM(num_threads, pack(team, weight, num_panels(columns), depth, panels, source))                            \
    }                                                                                                                 \
    void pagoda_pack_gated_##NAME(const T* weight, int64_t gates, int64_t depth, T* panels, int num_threads) {        \
        const auto source = [=](int64_t column) { return gated_source(column, gates); };                              \
        PAGODA_TEAM(num_threads, pack(team, weight, num_panels(2 * gates), depth, panels, source))                          \
    }                                                                                                                 \
    void pagoda_linear_##NAME(const LinearArguments<T>* arguments, int num_threads) {                                 \
        PAGODA_TEAM(num_threads, linear(team, *arguments))                                                                  \
    }                                                                                                                 \
    void pagoda_rms_norm_##NAME(                                                                                      \
        const T* x, const float* weight, T* out, int64_t rows, int64_t size, float eps, int num_threads) {            \
        PAGODA_TEAM(num_threads, rms_norm(team, x, weight, out, rows, size, eps))                                           \
    }                                                                                                                 \
    void pagoda_add_rms_norm_##NAME(                                                                                  \
        const T* x, float* residual, const float* weight, T* out, int64_t rows, int64_t size, float eps,              \
        int num_threads) {                                                                                            \
        PAGODA_TEAM(num_threads, add_rms_norm(team, x, residual, weight, out, rows, size, eps))                             \
    }                                                                                                                 \
    void pagoda_rope_kv_write_##NAME(const RopeArguments<T>* arguments, int num_threads) {                            \
        PAGODA_TEAM(num_threads, rope_kv_write(team, *arguments))                                                           \
    }                                                                                                                 \
    void pagoda_attend_##NAME(const AttentionArguments<T>* arguments, int num_threads) {                              \
        Attention<T> step(*arguments, num_threads);                                                                   \
        PAGODA_TEAM(num_threads, step.run(team))                                                                          \
    }                                                                                                                 \
    void pagoda_attention_block_##NAME(const AttentionBlock<T>* block, int num_threads) {                             \
        attention_block(*block, num_threads);                                                                         \
    }                                                                                                                 \
    void pagoda_feed_forward_block_##NAME(const FeedForwardBlock<T>* block, int num_threads) {                        \
        feed_forward_block(*block, num_threads);                                                                      \
    }                                                                                                                 \
    void pagoda_sample_##NAME(const SamplingArguments<T>* arguments, int num_threads) {                               \
        Sampling<T> sampling(*arguments);                                                                             \
        PAGODA_TEAM(num_threads, sampling.run(team))                                                                  \
    }

extern "C" {
// To be called once before all else; false if this machine cannot run what this was compiled for.
bool pagoda_enable() { return enable_amx(); }
PAGODA_OPERATORS(bf16, bf16)
PAGODA_OPERATORS(float, f32)
}
