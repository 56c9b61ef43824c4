// The threads that compute, and how they share work and wait for each other.
//
// A decode step has hundreds of points where threads meet, some microseconds apart. There they spin, since to sleep and
// be woken takes longer than the work. What takes longer than SPIN, as the pause between two requests, is slept through.
//
// Other processes want the cores too: those that bring the requests and take the tokens. A thread that is put off for
// one of them must not hold up the rest, so what counts is that the work is done, not that everybody has come:
//
//     thread 0   | norm | product, and the rest of thread 1's share | ... thread 1 finds that this phase is over |
//     thread 1   | norm | product | (another process)               | and goes on with the present one           |
//
// It would hold them up in the midst of an item, so before each job, where it has none, it lets others run.
//
// Linux readily wakes a thread on the core of the one that wakes it, and then sees two busy threads there that it has no
// reason to part, while another core is idle: each waits for the other, and a step takes ten times as long. So whoever
// has waited for YIELD lets others run once, and a thread that finds itself on the core of a colleague keeps off it.
//
// OpenMP's threads are told how to wait by environment variables only, torch's loops and these alike, and stop spinning
// altogether once several threads of the process have used OpenMP.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pagoda {

constexpr std::chrono::microseconds SPIN(2000);  // longer than what lies between two steps
constexpr std::chrono::microseconds YIELD(50);

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

class Team {
public:
    explicit Team(int size) : size_(size), cpu_of_(size), shares_(size) {
        sched_getaffinity(0, sizeof allowed_, &allowed_);
        for (int index = 1; index < size; ++index) threads_.emplace_back([this, index] { serve(index); });
    }

    ~Team() {
        is_ending_ = true;
        advance(announced_, 1);
        for (std::thread& thread : threads_) thread.join();
    }

    // Calls body(*this) on every thread of the team that is free, this one included; returns when all have returned.
    template <class Body>
    void run(Body& body) {
        context_ = &body;
        cpu_of_[0] = sched_getcpu();
        job_ = [](void* context, Team& team) { (*static_cast<Body*>(context))(team); };
        own() = at_start_;
        // Nobody else is here now. A share that is empty in every phase would keep a number so old that it seems new.
        for (SharedShare& share : shares_) share.left.store(Share{at_start_.phase, 0, 0}, std::memory_order_relaxed);
        door_.store(OPEN, std::memory_order_release);
        advance(announced_, 1);
        let_others_run();
        job_(context_, *this);
        door_.fetch_sub(OPEN, std::memory_order_acq_rel);
        wait(door_, [](uint32_t door) { return door == 0; });
        at_start_ = own();
    }

    // body(0), body(1), ... body(count - 1), each on one thread; all done at the end. Each thread begins with a contiguous
    // share, and then takes from the end of others'. To be called by all threads of the team in the same order, with
    // nothing between two calls but what each does for itself.
    template <class Body>
    void share(int64_t count, Body body) {
        Place& place = own();
        ++place.phase;
        const int64_t size = (count >> (Share::BITS - 1)) + 1, items = (count + size - 1) / size;
        uint32_t num_done = 0;
        for (int offset = 0; offset < size_; ++offset) {
            const int owner = (place.index + offset) % size_;
            for (int64_t item; (item = take(owner, place.phase, items, offset == 0)) >= 0; ++num_done) {
                const int64_t end = std::min((item + 1) * size, count);
                for (int64_t i = item * size; i < end; ++i) body(i);
            }
        }
        place.target += uint32_t(items);
        if (num_done) advance(done_, num_done);
        wait(done_, [target = place.target](uint32_t done) { return int32_t(done - target) >= 0; });
    }

private:
    static constexpr uint32_t OPEN = 1u << 31;

    // Where a thread is in the sequence of phases.
    struct Place {
        int index = 0;
        uint32_t phase = 0;
        uint32_t target = 0;  // items of all phases before
    };

    // What is left of a thread's share in a phase.
    struct Share {
        static constexpr int BITS = 20;
        uint64_t phase : 64 - 2 * BITS, begin : BITS, end : BITS;
    };
    struct alignas(64) SharedShare {
        std::atomic<Share> left{Share{0, 0, 0}};
    };

    static Place& own() {
        thread_local Place place;
        return place;
    }

    void serve(int index) {
        for (uint32_t seen = 0;;) {
            wait(announced_, [seen](uint32_t announced) { return announced != seen; });
            seen = announced_.load();
            if (is_ending_) return;
            let_others_run();
            uint32_t door = door_.load();
            while (door & OPEN && !door_.compare_exchange_weak(door, door + 1, std::memory_order_acq_rel)) {}
            if (!(door & OPEN)) continue;  // done without this one
            keep_apart(index);
            own() = at_start_;
            own().index = index;
            job_(context_, *this);
            advance(door_, -1);
        }
    }

    // The next item of `owner`'s share, from its end unless `is_own`; -1 if none is left, or the phase is over.
    int64_t take(int owner, uint32_t phase, int64_t items, bool is_own) {
        std::atomic<Share>& left = shares_[owner].left;
        Share whole{phase, uint64_t(items * owner / size_), uint64_t(items * (owner + 1) / size_)};
        Share seen = left.load(std::memory_order_acquire);
        while (true) {
            const int32_t ahead = int32_t(uint32_t(seen.phase - whole.phase) << (2 * Share::BITS - 32));
            if (ahead > 0) return -1;
            Share now = ahead == 0 ? seen : whole;
            if (now.begin == now.end) return -1;
            const int64_t taken = is_own ? now.begin++ : --now.end;
            if (left.compare_exchange_weak(seen, now, std::memory_order_acq_rel, std::memory_order_acquire)) return taken;
        }
    }

    // Leave this core, and stay away from it, if a member of lower index is on it.
    void keep_apart(int own_index) {
        const int cpu = sched_getcpu();
        cpu_of_[own_index] = cpu;
        for (int other = 0; other < own_index; ++other) {
            if (cpu_of_[other] != cpu) continue;
            cpu_set_t mask = allowed_;
            for (int member = 0; member < size_; ++member)
                if (member != own_index) CPU_CLR(cpu_of_[member], &mask);
            if (CPU_COUNT(&mask)) sched_setaffinity(0, sizeof mask, &mask);
            cpu_of_[own_index] = sched_getcpu();
            return;
        }
    }

    void let_others_run() const {
        if (size_ > 1) sched_yield();
    }

    void advance(std::atomic<uint32_t>& value, uint32_t by) {
        value.fetch_add(by);
        if (num_asleep_.load()) value.notify_all();
    }

    // Returns when is_reached(value).
    template <class IsReached>
    void wait(const std::atomic<uint32_t>& value, IsReached is_reached) {
        const auto begin = std::chrono::steady_clock::now();
        for (auto now = begin, yielded = begin; now < begin + SPIN; now = std::chrono::steady_clock::now()) {
            for (int i = 0; i < 64; ++i) {
                if (is_reached(value.load(std::memory_order_acquire))) return;
                pause();
            }
            if (now > yielded + YIELD) {
                sched_yield();
                yielded = now;
            }
        }
        num_asleep_.fetch_add(1);
        for (uint32_t seen; !is_reached(seen = value.load());) value.wait(seen);
        num_asleep_.fetch_sub(1);
    }

    const int size_;
    void (*job_)(void*, Team&) = nullptr;
    void* context_ = nullptr;
    Place at_start_;  // of the job
    std::atomic<bool> is_ending_{false};
    cpu_set_t allowed_;
    std::vector<std::atomic<int>> cpu_of_;  // of each member, when it last began a job
    alignas(64) std::atomic<uint32_t> announced_{0};  // jobs so far
    std::atomic<int> num_asleep_{0};
    alignas(64) std::atomic<uint32_t> door_{0};  // threads in the job beside the one that runs it, and whether more may come
    alignas(64) std::atomic<uint32_t> done_{0};  // items so far
    std::vector<SharedShare> shares_;
    std::vector<std::thread> threads_;
};

// The team of this process, and whose turn it is to use it. Not in a template: there must be one only.
struct Turn {
    std::mutex mutex;
    std::unique_ptr<Team> team;
    int size = 0;

    static Turn& the_one() {
        static Turn& turn = *new Turn;  // never destroyed: when the process exits, a thread may be computing
        static const int registered = pthread_atfork(
            [] { the_one().mutex.lock(); }, [] { the_one().mutex.unlock(); },
            [] {
                (void)turn.team.release();  // its threads are not in the child
                turn.size = 0;
                turn.mutex.unlock();
            });
        (void)registered;
        return turn;
    }
};

// body(team) on `size` threads, which stay for the next call. Calls from several threads take turns.
template <class Body>
void on_team(int size, Body body) {
    Turn& turn = Turn::the_one();
    const std::lock_guard<std::mutex> lock(turn.mutex);
    if (turn.size != size) {
        turn.team.reset();
        turn.team = std::make_unique<Team>(size);
        turn.size = size;
    }
    turn.team->run(body);
}

}  // namespace pagoda
