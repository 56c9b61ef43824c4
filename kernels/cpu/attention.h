// Attention over the paged cache: decode, prefill, and prefill over a cached prefix are one kernel.
//
// A task is one request, one KV head and a tile of consecutive queries; its rows are all query heads of that KV head, so
// a key is read once for its group. `walk.h` walks along its context.
//
//     context   |--------- chunk (512 positions) ---------|--------- chunk ---------| ...
//               | tile | tile | tile | ...                 | tile | ...
//
// Every chunk begins with an empty softmax, and chunks are merged in order. So long contexts can be divided among threads,
// and what a query gets depends on its position only: not on the other requests, on how the prompt was cut, on the
// number of threads, or on whether it was decoded or prefilled.
#pragma once

#include <algorithm>
#include <vector>

#include "team.h"
#include "walk.h"

namespace pagoda {

// A step's attention, divided into pieces for the threads.
template <class T>
class Attention {
public:
    Attention(const AttentionArguments<T>& arguments, int num_threads) : a(arguments) {
        const int64_t step = a.queries_per_task();
        int64_t most_chunks = 0;
        for (int64_t request = 0; request < a.requests; ++request) {
            const int64_t begin = a.query_start[request], end = a.query_start[request + 1];
            const int64_t before = a.seq_lens[request] - (end - begin);
            for (int64_t first = 0; first < end - begin; first += step)
                for (int64_t head = 0; head < a.kv_heads; ++head) {
                    const Task task{request, head, begin + first, std::min(step, end - begin - first), before + first};
                    rows_ = std::max(rows_, task.num_queries * a.group());
                    most_chunks = std::max(most_chunks, task.num_chunks());
                    tasks_.push_back(task);
                }
        }
        // Few tasks of long contexts: their chunks are divided too.
        if (most_chunks > 1 && int64_t(tasks_.size()) < 4 * num_threads) {
            for (size_t index = 0; index < tasks_.size(); ++index) {
                first_part_.push_back(parts_.size());
                for (int64_t chunk = 0; chunk < tasks_[index].num_chunks(); ++chunk) parts_.push_back({index, chunk});
            }
            softmaxes_.assign(parts_.size(), Softmax(0, 0));
        } else {  // long ones first, so that no thread is left alone with one
            std::stable_sort(tasks_.begin(), tasks_.end(), [](const Task& one, const Task& two) {
                return one.num_positions() * one.num_queries > two.num_positions() * two.num_queries;
            });
        }
    }

    // Called by every thread of a team; all have finished when it returns.
    void run(Team& team) {
        Walk<T> walk(a, rows_);
        Softmax done(rows_, a.padded_size());
        if (!parts_.empty())
            team.share(parts_.size(), [&](int64_t index) {
                walk.begin(tasks_[parts_[index].task]);
                walk.walk(parts_[index].chunk);
                softmaxes_[index] = walk.softmax;
            });
        team.share(tasks_.size(), [&](int64_t index) {
            walk.begin(tasks_[index]);
            const int64_t rows = walk.num_rows(), size = a.padded_size();
            done.clear(rows, size);
            for (int64_t chunk = 0; chunk < tasks_[index].num_chunks(); ++chunk) {
                if (parts_.empty()) walk.walk(chunk);
                merge(done, parts_.empty() ? walk.softmax : softmaxes_[first_part_[index] + chunk], rows, size);
            }
            walk.finish(done);
        });
    }

private:
    struct Part {
        size_t task;
        int64_t chunk;
    };

    const AttentionArguments<T>& a;
    std::vector<Task> tasks_;
    int64_t rows_ = 0;  // the most that a task has
    std::vector<Part> parts_;
    std::vector<size_t> first_part_;  // of each task
    std::vector<Softmax> softmaxes_;  // of each part
};

}  // namespace pagoda
