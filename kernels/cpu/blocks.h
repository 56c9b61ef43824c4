// The two halves of a decoder layer, each in one parallel region: between its parts threads only wait until all is done.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "linear.h"

namespace pagoda {

// residual += x; out = attention(norm(residual)) projected. `out` may be `x`.
template <class T>
struct AttentionBlock {
    const T* x;       // [rows][hidden]
    float* residual;  // [rows][hidden]
    const float* norm;             // [hidden]
    const float *q_norm, *k_norm;  // [size], or null
    const LinearArguments<T>*qkv, *output;       // weights; their x, rows and out are not read
    const RopeArguments<T>* rope;                // as are q, k, v and what describes them here
    const AttentionArguments<T>* attention;      // and here
    T* scratch;       // [rows][hidden + columns of qkv + heads * size]
    T* out;           // [rows][hidden]
    int64_t rows, hidden;
    float eps;
};

// residual += x; out = down(gated(norm(residual))). `out` may be `x`.
template <class T>
struct FeedForwardBlock {
    const T* x;
    float* residual;
    const float* norm;
    const LinearArguments<T>*gate_up, *down;
    T* scratch;  // [rows][hidden + columns of gate_up]
    T* out;
    int64_t rows, hidden;
    float eps;
};

// `x` has rows of exactly the weight's depth, which packing has left as it was: `operators.py` sees to it.
template <class T>
LinearArguments<T> applied(const LinearArguments<T>& weight, const T* x, int64_t rows, T* out) {
    LinearArguments<T> arguments = weight;
    arguments.x = x;
    arguments.rows = rows;
    arguments.x_stride = weight.depth;
    arguments.out = out;
    arguments.wide_out = nullptr;
    return arguments;
}

template <class T>
void attention_block(const AttentionBlock<T>& b, int num_threads) {
    T* normed = b.scratch;
    T* qkv = normed + b.rows * b.hidden;
    const int64_t columns = b.qkv->columns;
    T* attended = qkv + b.rows * columns;
    AttentionArguments<T> attention = *b.attention;
    const int64_t heads = attention.heads, kv_heads = attention.kv_heads, size = attention.size;
    attention.q = qkv;
    attention.q_stride = columns;
    attention.out = attended;
    RopeArguments<T> rope = *b.rope;
    rope.q = qkv;
    rope.k = qkv + heads * size;
    rope.v = rope.k + kv_heads * size;
    rope.q_stride = rope.k_stride = rope.v_stride = columns;
    rope.heads = heads;
    rope.kv_heads = kv_heads;
    rope.size = size;
    const LinearArguments<T> project = applied(*b.qkv, normed, b.rows, qkv);
    const LinearArguments<T> output = applied(*b.output, attended, b.rows, b.out);
    Attention<T> step(attention, num_threads);
    on_team(num_threads, [&](Team& team) {
        add_rms_norm(team, b.x, b.residual, b.norm, normed, b.rows, b.hidden, b.eps);
        linear(team, project);
        if (b.q_norm) rms_norm_heads(team, qkv, columns, b.q_norm, b.rows, heads, size, b.eps);
        if (b.k_norm) rms_norm_heads(team, qkv + heads * size, columns, b.k_norm, b.rows, kv_heads, size, b.eps);
        rope_kv_write(team, rope);
        step.run(team);
        linear(team, output);
    });
}

template <class T>
void feed_forward_block(const FeedForwardBlock<T>& b, int num_threads) {
    T* normed = b.scratch;
    T* inner = normed + b.rows * b.hidden;
    const LinearArguments<T> gate_up = applied(*b.gate_up, normed, b.rows, inner);
    const LinearArguments<T> down = applied(*b.down, inner, b.rows, b.out);
    on_team(num_threads, [&](Team& team) {
        add_rms_norm(team, b.x, b.residual, b.norm, normed, b.rows, b.hidden, b.eps);
        linear(team, gate_up);
        linear(team, down);
    });
}

}  // namespace pagoda
