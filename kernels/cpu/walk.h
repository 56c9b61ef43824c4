// A thread's walk along the context of some queries, in tiles of 64 positions: keys are scored against all rows, and the
// probabilities meet the values, with the softmax kept up to date as it goes. Few rows read keys and values where they
// are, turned in registers; for many they are packed into panels first.
//
// Source: Dao et al., arXiv:2205.14135 (tiles).
#pragma once

#include <vector>

#include "product.h"
#include "softmax.h"
#include "transpose.h"

namespace pagoda {

constexpr int TILE = 64;             // positions
constexpr int64_t CHUNK = 8 * TILE;  // positions
constexpr int MAX_TASK_ROWS = 96;    // queries times heads of the group

template <class T>
struct AttentionArguments {
    const T* q;        // [tokens][heads][size], tokens `q_stride` apart
    T* out;            // [tokens][heads][size], contiguous
    const T* cache;    // [blocks][2][block_size][kv_heads][size], blocks `block_stride` apart
    const int32_t* block_table;  // [requests][table_stride]
    const int32_t* query_start;  // [requests + 1]
    const int32_t* seq_lens;     // [requests]
    int64_t requests, heads, kv_heads, size, q_stride, block_size, block_stride, table_stride;
    float scale;
    float soft_cap;    // scores become soft_cap * tanh(score / soft_cap); 0: they stay
    int64_t window;    // positions a query sees, its own included; 0: all
    int64_t sinks;     // leading positions seen beyond the window

    int64_t group() const { return heads / kv_heads; }
    int64_t value_panels() const { return (size + PANEL - 1) / PANEL; }
    int64_t padded_size() const { return value_panels() * PANEL; }
    int64_t queries_per_task() const { return std::max<int64_t>(1, MAX_TASK_ROWS / group()); }
};

// Some queries of one request for one KV head.
struct Task {
    int64_t request, kv_head;
    int64_t first_query, num_queries;  // tokens of the batch
    int64_t first_position;            // of the first query
    int64_t num_positions() const { return first_position + num_queries; }
    int64_t num_chunks() const { return (num_positions() + CHUNK - 1) / CHUNK; }
};

// One thread's memory for walking a context.
template <class T>
class Walk {
public:
    // `rows` is the most that a task has.
    Walk(const AttentionArguments<T>& arguments, int64_t rows)
        : a(arguments),
          depth_(round_up(a.size, DEPTH_STEP<T>)),
          q_(round_up(rows, GROUP<T>) * depth_),
          keys_(TILE * depth_),
          values_(TILE * PANEL),
          narrow_values_(a.size % PANEL ? TILE * PANEL : 0),
          zeros_(PANEL),
          padded_(a.padded_size()),
          scores_(round_up(rows, GROUP<T>) * TILE),
          weights_(round_up(rows, GROUP<T>) * TILE),
          most_of_tile_(round_up(rows, W)),
          kept_(round_up(rows, W)),
          totals_(rows * W),
          softmax(rows, a.padded_size()) {}

    // Read the queries of a task, row after row: query by query, head by head.
    void begin(const Task& task) {
        task_ = task;
        T* to = q_.data();
        for (int64_t query = 0; query < task.num_queries; ++query)
            for (int64_t head = 0; head < a.group(); ++head, to += depth_)
                std::copy_n(
                    a.q + (task.first_query + query) * a.q_stride + (task.kv_head * a.group() + head) * a.size, a.size,
                    to);
    }

    // softmax = that of one chunk of the context.
    void walk(int64_t chunk) {
        softmax.clear(num_rows(), a.padded_size());
        std::fill(totals_.begin(), totals_.end(), 0.0f);
        const int64_t end = std::min((chunk + 1) * CHUNK, task_.num_positions());
        locate(chunk * CHUNK, end);
        for (int64_t position = chunk * CHUNK; position < end; position += TILE) {
            std::swap(keys_at_, next_keys_at_);
            locate(position + TILE, end);
            const int count = int(std::min<int64_t>(TILE, end - position));
            if (is_seen(position, count)) tile(position, count);
        }
        for (int64_t row = 0; row < num_rows(); ++row) softmax.total[row] = sum_of(load<Floats>(&totals_[row * W]));
    }

    // Write what `done`, the softmax of the whole context, comes to.
    void finish(const Softmax& done) {
        int64_t row = 0;
        T* padded = padded_.data();
        for (int64_t query = 0; query < task_.num_queries; ++query)
            for (int64_t head = 0; head < a.group(); ++head, ++row) {
                const float factor = 1.0f / done.total[row];
                for (int64_t i = 0; i < a.padded_size(); i += W)
                    store_floats(padded + i, load<Floats>(&done.values[row * a.padded_size() + i]) * factor);
                std::copy_n(
                    padded, a.size,
                    a.out + ((task_.first_query + query) * a.heads + task_.kv_head * a.group() + head) * a.size);
            }
    }

    int64_t num_rows() const { return task_.num_queries * a.group(); }

private:
    const AttentionArguments<T>& a;
    const int64_t depth_;  // of queries and packed keys: their size, and zeros
    std::vector<T> q_, keys_, values_, narrow_values_, zeros_, padded_;
    std::vector<float> scores_;
    std::vector<T> weights_;
    std::vector<float> most_of_tile_, kept_;  // kept: what remains of earlier sums, whose weights had another `most`
    std::vector<float> totals_;               // softmax.total, a vector each
    Task task_{};
    Tiles tiles_;
    const T* keys_arrays_[2][TILE];
    const T **keys_at_ = keys_arrays_[0], **next_keys_at_ = keys_arrays_[1];  // of a tile, and of the one after it

public:
    Softmax softmax;

private:
    // Whether any query sees any of these positions.
    bool is_seen(int64_t position, int64_t count) const {
        return !a.window || position < a.sinks || position + count > task_.first_position - a.window + 1;
    }

    // next_keys_at_ = where the keys from `position` on are, block after block. Past `end` they are anywhere.
    void locate(int64_t position, int64_t end) {
        const int32_t* table = a.block_table + task_.request * a.table_stride;
        int64_t column = position / a.block_size, offset = position % a.block_size;
        int i = 0;
        for (const int count = int(std::clamp<int64_t>(end - position, 0, TILE)); i < count; ++column, offset = 0) {
            const T* key = a.cache + table[column] * a.block_stride + (offset * a.kv_heads + task_.kv_head) * a.size;
            for (; offset < a.block_size && i < count; ++offset, key += a.kv_heads * a.size) next_keys_at_[i++] = key;
        }
        std::fill(next_keys_at_ + i, next_keys_at_ + TILE, a.cache);
    }

    // From a key to its value.
    int64_t value_distance() const { return a.block_size * a.kv_heads * a.size; }

    void tile(int64_t position, int count) {
        score(keys_at_, count);
        weigh(position, count);
        add_values(keys_at_, count);
    }

    // Calls body(first, count) for groups of rows. With tiles all are alike: what is behind the last row is multiplied too,
    // which takes less time than to shape tiles anew.
    template <class Body>
    void for_groups(Body body) {
        if constexpr (USES_TILES<T>)
            for (int64_t first = 0; first < num_rows(); first += GROUP<T>)
                body(first, int(std::min<int64_t>(GROUP<T>, num_rows())));
        else
            for_row_groups<T>(num_rows(), body);
    }

    // scores_ = queries @ keys, of the whole tile: what is past `count` is masked later.
    void score(const T* const* keys, int count) {
#if defined(__AVX512F__)
        if (!USES_TILES<T> && num_rows() <= MAX_ROWS) {
            with_rows(int(num_rows()), [&](auto rows) { score_few<rows.value>(keys, count); });
            return;
        }
#endif
        for (int first = 0; first < count; first += PANEL) {
            T* packed = &keys_[first * depth_];
            transpose(
                reinterpret_cast<const uint32_t* const*>(keys) + first, count - first, a.size / PER_LANE<T>,
                reinterpret_cast<uint32_t*>(packed),
                [&](int row, int64_t column) { prefetch_keys(first + row, column * PER_LANE<T>); });
            for_groups([&](int64_t row, int num) {
                multiply_group(
                    tiles_, num, &q_[row * depth_], depth_, packed, depth_, &scores_[row * TILE + first], TILE);
            });
        }
    }

    // Ask for the line with a number of 16 keys of the next tile. Blocks lie anywhere, so the hardware cannot guess
    // where. Asked for all at once, lines would wait for each other; so each is asked for when its like of this tile is
    // used.
    void prefetch_keys(int first, int64_t number) const {
        for (int i = 0; i < 16; ++i) __builtin_prefetch(next_keys_at_[first + i] + number);
    }

    // The same of values, for the positions of a lane.
    void prefetch_values(int64_t lane, int64_t number) const {
        for (int i = 0; i < PER_LANE<T>; ++i)
            __builtin_prefetch(next_keys_at_[lane * PER_LANE<T> + i] + value_distance() + number);
    }

#if defined(__AVX512F__)
    // The same sums in the same order, with keys that are turned in registers: nobody else would read them packed.
    template <int ROWS>
    void score_few(const T* const* keys, int count) {
        const int64_t words = a.size / PER_LANE<T>;
        const auto rows = reinterpret_cast<const uint32_t* const*>(keys);
        for (int position = 0; position < count; position += 16) {
            Floats sums[ROWS] = {};
            for (int64_t column = 0; column < words; column += 16) {
                __m512i turned[16];
                const int64_t width = std::min<int64_t>(16, words - column);
                transpose16(rows + position, count - position, column, width, turned);
                prefetch_keys(position, column * PER_LANE<T>);
                const T* q = &q_[column * PER_LANE<T>];
                const auto add = [&](int i) {
#pragma GCC unroll 12
                    for (int row = 0; row < ROWS; ++row)
                        sums[row] = multiply_add(
                            sums[row], load<uint32_t>(q + row * depth_ + i * PER_LANE<T>), bits<Words>(turned[i]), T{});
                };
                if (width == 16)
#pragma GCC unroll 16
                    for (int i = 0; i < 16; ++i) add(i);
                else
                    for (int i = 0; i < width; ++i) add(i);
            }
            for (int row = 0; row < ROWS; ++row) store(&scores_[row * TILE + position], sums[row]);
        }
    }
#endif

    // softmax.values = softmax.values * kept_ + weights @ values.
    void add_values(const T* const* keys, int count) {
        constexpr int P = PER_LANE<T>;
        const int64_t rows = num_rows(), lanes = (count + P - 1) / P, depth = round_up(count, DEPTH_STEP<T>);
        for (int64_t panel = 0; panel < a.value_panels(); ++panel) {
            const T* values[TILE];
            find_values(keys, count, panel * PANEL, values);
            const auto words_at = [&values](int64_t lane, int v) __attribute__((always_inline)) {
                if constexpr (P == 1)
                    return load<Words>(values[lane] + v * W);
                else
                    return pair(values[2 * lane] + v * W, values[2 * lane + 1] + v * W);
            };
            T* packed = values_.data();
            // Few rows read values where they are, unless tiles do; several groups of rows read them packed.
            const bool is_packed = USES_TILES<T> || rows > MAX_ROWS;
            if (is_packed) {
                for (int64_t lane = 0; lane < lanes; ++lane) {
                    prefetch_values(lane, panel * PANEL);
                    for (int v = 0; v < PANEL / W; ++v) store(packed + (lane * PANEL + v * W) * P, words_at(lane, v));
                }
                std::fill(packed + lanes * PANEL * P, packed + depth * PANEL, T{});
            }
            for_groups([&](int64_t first, int num) {
                float part[GROUP<T> * PANEL];
                const T* weights = &weights_[first * TILE];
                if (is_packed)
                    multiply_group(tiles_, num, weights, TILE, packed, depth, part);
                else
                    with_rows(num, [&](auto fixed) {
                        for (int v = 0; v < PANEL / W; v += VECTORS)
                            multiply_rows<T, fixed.value, VECTORS>(
                                weights, TILE, lanes,
                                [&, v](int64_t lane, int w) __attribute__((always_inline)) {
                                    if (w == 0) prefetch_values(lane, panel * PANEL);
                                    return words_at(lane, v + w);
                                },
                                part + v * W, PANEL);
                    });
                num = int(std::min<int64_t>(num, rows - first));
                for (int row = 0; row < num; ++row) {
                    float* sums = &softmax.values[(first + row) * a.padded_size() + panel * PANEL];
                    const float kept = kept_[first + row];
                    for (int i = 0; i < PANEL; i += W)
                        store(sums + i, load<Floats>(sums + i) * kept + load<Floats>(part + row * PANEL + i));
                }
            });
        }
    }

    // values[i] = where PANEL columns of the value of each position are, then zeros up to a whole lane.
    void find_values(const T* const* keys, int count, int64_t first_column, const T** values) {
        const int64_t width = std::min<int64_t>(PANEL, a.size - first_column);
        for (int i = 0; i < count; ++i) {
            values[i] = keys[i] + value_distance() + first_column;
            if (width < PANEL) {
                std::copy_n(values[i], width, &narrow_values_[i * PANEL]);
                values[i] = &narrow_values_[i * PANEL];
            }
        }
        if (count % PER_LANE<T>) values[count] = zeros_.data();
    }

    // scores_ -> weights_, 2^(score - most). softmax.most is brought up to date, and totals_ are.
    void weigh(int64_t position, int count) {
        const int64_t rows = num_rows();
        float* scores = scores_.data();
        float* most_of_tile = most_of_tile_.data();
        for (int64_t query = 0; query < task_.num_queries; ++query)
            for (int64_t head = 0; head < a.group(); ++head, scores += TILE) {
                if (a.soft_cap > 0)
                    for (int i = 0; i < TILE; i += W)
                        store(scores + i, a.soft_cap * tanh(load<Floats>(scores + i) * (a.scale / a.soft_cap)));
                mask(scores, task_.first_position + query - position, position, count);
                Floats most = splat(EMPTY);
                for (int i = 0; i < TILE; i += W) most = larger(load<Floats>(scores + i), most);  // of numbers only
                *most_of_tile++ = max_of(most);
            }
        const float exponents = LOG2_E * (a.soft_cap > 0 ? 1.0f : a.scale);
        for (int64_t row = 0; row < rows; row += W) {
            const Floats before = load<Floats>(&softmax.most[row]);
            const Floats now = larger(load<Floats>(&most_of_tile_[row]) * exponents, before);
            store(&softmax.most[row], now);
            store(&kept_[row], now == EMPTY ? splat(1.0f) : exp2(before - now));
        }
        for (int64_t row = 0; row < rows; ++row) {
            scores = &scores_[row * TILE];
            T* weights = &weights_[row * TILE];
            const float most = softmax.most[row];
            if (most == EMPTY) {  // nothing seen yet, or no number
                std::fill_n(weights, TILE, T{});
                if (std::any_of(scores, scores + TILE, [](float score) { return std::isnan(score); })) {
                    softmax.most[row] = 0.0f;
                    totals_[row * W] = std::numeric_limits<float>::quiet_NaN();
                }
                continue;
            }
            Floats total = load<Floats>(&totals_[row * W]) * kept_[row];
            for (int i = 0; i < TILE; i += W) {
                const Floats weight = exp2(load<Floats>(scores + i) * exponents - most);
                total += weight;
                store_floats(weights + i, weight);
            }
            store(&totals_[row * W], total);
        }
    }

    // The scores of what a query does not see become EMPTY. It is at `own`, counted from `position`.
    void mask(float* scores, int64_t own, int64_t position, int count) const {
        const int64_t last = std::min<int64_t>(own, count - 1);  // seen are first..last, and sinks
        const int64_t first = a.window ? std::max<int64_t>(own - a.window + 1, 0) : 0;
        if (last >= TILE - 1 && first == 0) return;
        const int64_t sinks = std::min<int64_t>(a.sinks - position, TILE);
        Ints lane;
        for (int i = 0; i < W; ++i) lane[i] = i;
        for (int i = 0; i < TILE; i += W) {
            const Ints at = lane + i;
            const Ints seen = (at <= int(last)) & ((at >= int(first)) | (at < int(sinks)));
            store(scores + i, seen ? load<Floats>(scores + i) : splat(EMPTY));
        }
    }
};

}  // namespace pagoda
